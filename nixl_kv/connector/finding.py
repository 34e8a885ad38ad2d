"""Adapts vLLM's requests to `conversations/finding.py`: a prompt's KV that another engine has.

A request that computes its prompt here, for itself or for another engine, may load a part of it
first. The scheduler asks the engine that has read this conversation before, and parks the request
meanwhile. A router may also name the engine: by the field OWNER of decode's last answer, or by
llm-d's field SOURCE. The request is loaded from a ticket that this engine makes of the answer; if
the load fails, vLLM computes the prompt, whatever `on_load_failure` says.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
from vllm.v1.request import Request

from nixl_kv.config import AllowedHosts, Config
from nixl_kv.connector.conversations import HASHES
from nixl_kv.connector.decode import DecodeScheduler
from nixl_kv.connector.legs import SOURCE, Leg
from nixl_kv.connector.stats import Stats
from nixl_kv.conversations.finding import MIN_TOKENS, Finds, Source, marks
from nixl_kv.conversations.owners import Answer, Owners, Question
from nixl_kv.engine.trust import Trust
from nixl_kv.errors import LimitedLog, TicketRefused, get_logger
from nixl_kv.geometry import match
from nixl_kv.ids import Endpoint, Nonce, RequestId, endpoint_at, endpoint_host
from nixl_kv.protocol import messages
from nixl_kv.protocol.messages import ContentFacts
from nixl_kv.protocol.ticket import FIELD, TicketHead

logger = get_logger(__name__)

OWNER: Final = "nixl_kv_owner"
"""The field of decode's answer in which it names its own directory, sealed like a ticket."""

Hashes = Sequence[bytes]

# Another engine's blocks may be so small. A hash takes 2 us, so those of 131,072 tokens take 15 ms
# of the 20 that a request waits. VLLM's blocks have 16 tokens or more on NVIDIA's GPUs.
MIN_BLOCK: Final = 16


def why_not_sought(request: Request) -> str:
    """Why the KV of a prompt is never asked for; '' if it may be."""
    if request.prompt_embeds is not None or request.prompt_is_token_ids is not None:
        return "it has embeddings, whose places vLLM's hashes do not cover"
    if request.get_skip_reading_prefix_cache():
        return "it must be computed"
    if request.resumable or request.abort_immediately:
        return "its prompt is not complete"
    return "" if request.num_prompt_tokens > MIN_TOKENS else "it is short"


def hashes_by(
    facts: ContentFacts, request: Request, own: ContentFacts, *, begin: int = 0
) -> Hashes | str:
    """The hashes of the full blocks of a prompt as another engine makes them.

    If this engine has to make them, those that a question for the tokens from `begin` on can have.
    A text says why this engine cannot make them. Empty: the other engine can have none of them.
    Runs on another thread, while the request is parked.
    """
    if request.mm_features and facts.has_stand_ins:
        return ()
    if _rules(facts) == _rules(own):
        return tuple(request.block_hashes)
    if facts.algorithm not in HASHES:
        allowed = " or ".join(HASHES)
        return f"its --prefix-caching-hash-algo is {facts.algorithm!r}; allowed: {allowed}"
    if facts.lookahead or own.lookahead:
        return "its block hashes also cover tokens after the block (a draft model), and others"
    if facts.block_size < MIN_BLOCK:
        return f"its blocks have {facts.block_size} tokens; allowed: {MIN_BLOCK} or more"
    first = begin // facts.block_size
    if first > messages.MAX_HASHES:  # making the hashes before it would take too long
        return ()
    # Imported for this feature alone.
    from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys  # noqa: PLC0415

    hash_of = get_hash_fn_by_name(facts.algorithm)
    size = facts.block_size
    tokens = (request.prompt_token_ids or ())[: (first + messages.MAX_HASHES) * size]
    parent, media, hashes = hash_of(facts.seed), 0, list[bytes]()
    for end in range(size, len(tokens) + 1, size):
        extras, media = generate_block_hash_extra_keys(request, end - size, end, media)
        parent = hash_of((parent, tuple(tokens[end - size : end]), extras))
        hashes.append(parent)
    return hashes


def why_unfit(
    model: Mapping[str, str], extras: Mapping[str, str], owner: messages.Description
) -> str:
    """Why the KV of another engine is of no use to one with these facts; '' if it is of use."""
    differ = match.model_mismatches(model, owner.model)
    differ += match.extra_mismatches(extras, owner.extras)
    return "; ".join(map(str, differ))


def _rules(facts: ContentFacts) -> tuple[object, ...]:
    return facts.algorithm, facts.seed, facts.block_size, facts.lookahead


@dataclass
class Finder:
    """The prompts of one engine whose KV another one may have. Scheduler thread only."""

    decode: DecodeScheduler
    facts: ContentFacts  # of this engine
    config: Config
    trust: Trust
    stats: Stats
    why_unfit: Callable[[messages.Description], str]  # see `Owners`
    wake: Callable[[], None]  # the thread that asks
    _: KW_ONLY
    #: Whether the field SOURCE is this connector's: in a MultiConnector, it is another one's.
    owns_source: bool
    #: Set by `SchedulerHooks`: whether vLLM computes what cannot be loaded.
    may_ask: bool = False
    own: Endpoint | None = None  # this engine's directory, once it listens
    loading: set[RequestId] = field(default_factory=set)  # from their start to the workers' report
    _found: set[RequestId] = field(default_factory=set)  # from the answer to the start
    _marks: dict[RequestId, tuple[bytes, ...]] = field(default_factory=dict)  # of open offers

    def __post_init__(self) -> None:
        self.owners = Owners(self.why_unfit, LimitedLog(logger, time.monotonic))
        self._finds = Finds(self._ask)

    def _ask(self, question: Question) -> None:
        self.owners.questions.append(question)
        self.wake()

    def on_new_request(self, request: Request, leg: Leg) -> None:
        if not self.may_ask:
            return
        request_id = RequestId(request.request_id)
        hashes = tuple(request.block_hashes)
        if leg is Leg.PREFILL:
            self._marks[request_id] = marks(hashes)
        if why_not_sought(request):
            return
        named = self._named(request.kv_transfer_params)
        table = self._finds.table
        source = Source(named, math.inf) if named else table.find(hashes, self.facts.block_size)
        if source is not None and source.owner != self.own:
            self._finds.add(request_id, source)

    def begin(self, request: Request, local: int) -> None:
        """Ask, if that may pay: vLLM wants the request's KV, and has `local` tokens itself."""
        request_id = RequestId(request.request_id)
        make = partial(self._question, request, local)
        place = local // self.facts.block_size
        wanted = next(iter(request.block_hashes[place : place + 1]), None)
        if self._finds.begin(request_id, local, request.num_prompt_tokens, make, wanted):
            self.decode.seek(request_id, request.num_prompt_tokens)

    def reset_cache(self) -> None:
        """Use no KV from before a cache reset or a change of weights.

        Call it before `DecodeScheduler.reset_cache`, which needs the owners met so far.
        """
        self._note_met()
        self._finds.clear()
        self._found.clear()
        self._marks.clear()

    def _note_met(self) -> None:
        while self.owners.met:
            self.decode.on_met(*self.owners.met.popleft())

    def take_answers(self) -> None:
        """Begin the loads of the requests whose answers have come, and give up late ones.

        Requests that waited for another one's load go on if that has ended, well or not.
        """
        self._note_met()
        while self.owners.answers:
            reply = self.owners.answers.popleft()
            if self._finds.end(reply) is not None:
                self._on_answer(reply)
        for request_id in self._finds.pop_late():
            self._end(request_id, "late")
        for request_id in self._finds.pop_behind(self.decode.has_load):
            self.decode.on_not_found(request_id)

    def _on_answer(self, reply: Answer) -> None:
        request_id, ticket, run = reply.request, reply.ticket, reply.run
        if ticket is None:
            self._end(request_id, reply.outcome)
        elif self.decode.on_found(request_id, ticket, run, begin=reply.begin, least=MIN_TOKENS):
            self._found.add(request_id)
        else:
            self._end(request_id, "none")

    def _end(self, request_id: RequestId, outcome: str) -> None:
        self.stats.count("sought_requests", 1, outcome)
        self.decode.on_not_found(request_id)

    def on_start(self, request_id: RequestId) -> bool:
        """A load of this connector starts; whether it is one of this half."""
        if request_id not in self._found:
            return False
        self._found.discard(request_id)
        self.loading.add(request_id)
        return True

    def on_load_ended(self, request_id: RequestId, num_tokens: int, reason: str) -> None:
        """All workers have reported the load; it has failed for a `reason`, or not."""
        if request_id in self.loading:
            self.loading.discard(request_id)
            self.stats.count("sought_requests", 1, "lost" if reason else "read")
            self.stats.count("found_tokens", 0 if reason else num_tokens)

    # --- whom to ask

    def on_offer_ended(self, request_id: RequestId, reader: Endpoint | None) -> None:
        """The engine whose directory is `reader` has read the offer; None: none has."""
        hashes = self._marks.pop(request_id, ())
        if reader is not None and self.trust.allowed.allows(endpoint_host(reader)):
            self._finds.table.learn(hashes, reader)

    def on_finished(self, request_id: RequestId, *, is_offered: bool) -> None:
        self._finds.forget(request_id)
        self._found.discard(request_id)
        if not is_offered:
            self._marks.pop(request_id, None)

    def _named(self, params: Mapping[str, Any] | None) -> Endpoint | None:
        """The owner that a router names; None if it names none that this engine may ask."""
        fields = params or {}
        try:
            if OWNER in fields:
                head = self.trust.check({FIELD: fields[OWNER]}).head()
                return head.endpoint
        except TicketRefused:
            self.stats.count("sought_requests", 1, "refused")
        return self._source(fields.get(SOURCE)) if self.owns_source else None

    def _source(self, value: object) -> Endpoint | None:
        """The engine that llm-d's router has chosen: no engine of ours has sealed it."""
        named = value if isinstance(value, Mapping) else {}
        address = {"host": named.get("remote_host"), "port": named.get("remote_port")}
        try:
            head = msgspec.convert({**address, "nonce": "0" * 32}, TicketHead, strict=False)
        except ValueError:
            return None
        networks = self.config.peers
        if networks is None or not AllowedHosts(networks).allows(head.host):
            return None
        return endpoint_at(head.host, head.port)

    def _question(
        self, request: Request, local: int, owner: Endpoint, nonce: Nonce, ends_at: float
    ) -> Question:
        return Question(
            request=RequestId(request.request_id),
            owner=owner,
            nonce=nonce,
            begin=local,
            weights=self.decode.weights,
            make_hashes=partial(hashes_by, request=request, own=self.facts, begin=local),
            ends_at=ends_at,
        )
