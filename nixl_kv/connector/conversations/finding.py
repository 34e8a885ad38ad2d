"""Adapts vLLM's requests to `conversations/finding.py`: KV of a prompt that another engine has.

A request that computes its prompt here, for itself or for another engine, may load a part of it
first. The scheduler asks the engine that has read this conversation before, and parks the request
meanwhile. A router may also name the engine: by the field OWNER of decode's last answer, or by
llm-d's field SOURCE. The request is loaded from a ticket that this engine makes of the answer; if
the load fails, vLLM computes the prompt, whatever `on_load_failure` says.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
from vllm.v1.request import Request

from nixl_kv.config import AllowedHosts, Config
from nixl_kv.connector.conversations.content import HASHES, OWNER
from nixl_kv.connector.decode import DecodeScheduler
from nixl_kv.connector.legs import SOURCE, Leg
from nixl_kv.connector.part import SchedulerPart
from nixl_kv.connector.stats import LoadReport, OfferReport, Stats
from nixl_kv.conversations.finding import (
    MIN_TOKENS,
    Finds,
    SoughtEvent,
    SoughtState,
    Source,
    marks,
)
from nixl_kv.conversations.owners import Answer, Owners, Question
from nixl_kv.engine.trust import Trust
from nixl_kv.errors import LimitedLog, TicketRefused, get_logger
from nixl_kv.geometry import match
from nixl_kv.ids import Endpoint, Nonce, RequestId, endpoint_at, endpoint_host
from nixl_kv.protocol import messages
from nixl_kv.protocol.messages import ContentFacts
from nixl_kv.protocol.ticket import FIELD, TicketHead

logger = get_logger(__name__)

NOT_SOUGHT: Final = (
    "conversations: this engine asks no other engine for cached KV, because vLLM would fail a "
    "request whose load fails; with a MultiConnector, set kv_load_failure_policy of "
    "--kv-transfer-config to 'recompute'"
)

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
    return facts.algorithm, facts.seed, facts.block_size


@dataclass
class Finder(SchedulerPart):
    """The prompts of one engine whose KV another one may have. Scheduler thread only."""

    decode: DecodeScheduler
    own: ContentFacts  # of this engine
    config: Config
    trust: Trust
    stats: Stats
    why_unfit: Callable[[messages.Description], str]  # see `Owners`
    _: KW_ONLY
    #: Whether the field SOURCE is this connector's: in a MultiConnector, it is another one's.
    owns_source: bool
    may_ask: bool = False  # see `may_seek`
    _marks: dict[RequestId, tuple[bytes, ...]] = field(default_factory=dict)  # of open offers

    reads = True

    def __post_init__(self) -> None:
        self.owners = Owners(self.why_unfit, LimitedLog(logger, time.monotonic))
        self.finds = Finds(self._ask)

    @property
    def asks(self) -> Owners:
        return self.owners

    def may_seek(self, may: bool) -> None:  # noqa: FBT001 - one fact
        self.may_ask = may
        if not may:
            logger.warning(NOT_SOUGHT)

    def _ask(self, question: Question) -> None:
        self.owners.questions.append(question)
        if self.directory is not None:
            self.directory.wake()

    def on_new_request(self, request: Request, leg: Leg) -> None:
        if not self.may_ask:
            return
        request_id = RequestId(request.request_id)
        hashes = tuple(request.block_hashes)
        if leg is Leg.PREFILL:
            self._marks[request_id] = marks(hashes)
        if why_not_sought(request):
            return
        named, table = self._named(request.kv_transfer_params), self.finds.table
        source = Source(named, math.inf) if named else table.find(hashes, self.own.block_size)
        own = None if self.directory is None else self.directory.endpoint
        if source is not None and source.owner != own:
            self.finds.add(request_id, source)

    def on_match(self, request: Request, num_computed_tokens: int) -> None:
        """Ask, if that may pay."""
        request_id, local = RequestId(request.request_id), num_computed_tokens
        make = partial(self._question, request, local)
        place = local // self.own.block_size
        wanted = next(iter(request.block_hashes[place : place + 1]), None)
        if self.finds.begin(request_id, local, request.num_prompt_tokens, make, wanted):
            self.decode.seek(request_id, request.num_prompt_tokens)

    def reset_cache(self, epoch: int, weights: str) -> None:
        """Use no KV from before a cache reset or a change of weights."""
        del epoch, weights
        self._note_met()  # `DecodeScheduler.reset_cache` needs them
        self.finds.clear()
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
            if self.finds.awaits(reply):
                self._on_answer(reply)
        for request_id in self.finds.pop_late():
            self._drop(request_id, "late")
        for request_id in self.finds.pop_behind(self.decode.has_load):
            self.decode.on_not_found(request_id)

    def _on_answer(self, reply: Answer) -> None:
        request_id, ticket, run = reply.request, reply.ticket, reply.run
        is_found = ticket is not None and self.decode.on_found(
            request_id, ticket, run, begin=reply.begin, least=MIN_TOKENS
        )
        self.finds.move(request_id, SoughtEvent.FOUND if is_found else SoughtEvent.DROPPED)
        if not is_found:
            self._drop(request_id, "none" if ticket else reply.outcome)

    def _drop(self, request_id: RequestId, outcome: str) -> None:
        self.stats.count("sought_requests", 1, outcome)
        self.decode.on_not_found(request_id)

    # --- loads

    def on_load(self, request: RequestId) -> bool:
        is_own = self.finds.state_of(request) is SoughtState.FOUND
        if is_own:
            self.finds.move(request, SoughtEvent.STARTED)
        return is_own

    def is_load(self, request: RequestId) -> bool:
        return self.finds.is_load(request)

    def on_landed(self, requests: Collection[RequestId]) -> None:
        for request in requests:
            if self.finds.state_of(request) is SoughtState.LOADING:
                self.finds.move(request, SoughtEvent.LANDED)

    def on_loads_ended(self, ended: Mapping[RequestId, LoadReport]) -> None:
        for request, load in ended.items():
            if self.finds.is_load(request):
                is_used = self.finds.state_of(request) is not SoughtState.ABANDONED
                is_read = is_used and not load.reason
                self.finds.move(request, SoughtEvent.REPORTED)
                self.stats.count("sought_requests", 1, "read" if is_read else "lost")
                self.stats.count("found_tokens", load.num_tokens if is_read else 0)

    # --- whom to ask

    def on_offers_ended(
        self, sent: Collection[RequestId], ended: Mapping[RequestId, OfferReport]
    ) -> None:
        for request in sent:
            hashes, offer = self._marks.pop(request, ()), ended.get(request)
            reader = None if offer is None else offer.read_by
            if reader is not None and self.trust.allowed.allows(endpoint_host(reader)):
                self.finds.table.learn(hashes, reader)

    def request_finished(self, request: Request, *, is_offered: bool) -> None:
        request_id = RequestId(request.request_id)
        self.finds.finish(request_id)
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
            make_hashes=partial(hashes_by, request=request, own=self.own, begin=local),
            ends_at=ends_at,
        )
