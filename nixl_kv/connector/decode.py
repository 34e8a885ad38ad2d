"""The decode half of the scheduler: which requests load their KV, and into which blocks.

A request that arrives with a valid ticket is a load. Workers ask prefill for its blocks at once, so
that prefill holds them while the request is queued. The first allocation of vLLM starts the load,
or releases prefill if the local cache has everything.

vLLM must get exactly one report of each started load. A load whose KV is from before a cache reset
must never count as good. So `update_connector_output` holds such a report back, and the workers
report the load again, as failed. No vLLM here: the simulator runs this file alone.
"""

import enum
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from nixl_kv.connector.media import NO_MEDIA, Media, MediaRules, MustLoads
from nixl_kv.connector.paging import Paging
from nixl_kv.errors import TicketRefused
from nixl_kv.ids import (
    EngineId,
    HintKey,
    Incarnation,
    Nonce,
    Rank,
    RequestId,
    new_claim,
    new_hint_key,
)
from nixl_kv.protocol import events
from nixl_kv.protocol.machine import MachineState
from nixl_kv.protocol.messages import Hint, Landed
from nixl_kv.protocol.ticket import SealedTicket, Ticket, context_hash

# An engine without a new ticket no longer counts as decoding.
IN_USE_S: Final = 60.0

# Decode forgets a used ticket. Prefill denies an older one anyway.
REMEMBER_S: Final = 600.0

# How many prefill engines are remembered: 3 MiB, even if a client without a key invents them.
MAX_ENGINES: Final = 1 << 14

# The epoch of an engine that has described itself but told no epoch.
UNTOLD: Final = -1

AUTO: Final = MediaRules()
POLICY: Final = "on_load_failure is 'fail'"
OTHER_PROMPT: Final = (
    "check that prefill and decode have the same model, chat template, tokenizer and LoRA "
    "adapters, and that the router sends both the same text, cache_salt and media"
)


@dataclass(frozen=True)
class Rows:
    """Bytes that belong to the tokens of a prompt, such as their embeddings."""

    name: bytes
    data: memoryview  # flat
    size: int  # bytes per token


@dataclass(frozen=True)
class Prompt:
    """The parts of a vLLM request that determine its KV."""

    request: RequestId
    num_tokens: int
    token_ids: Sequence[int] | None  # None for prompt embeddings
    extras: tuple[bytes, ...] = ()  # the adapter and the salt
    rows: tuple[Rows, ...] = ()
    media: Media = NO_MEDIA

    def context(self, nonce: Nonce, *, num_tokens: int | None = None) -> str:
        """Hash the first tokens (None: all)."""
        count = self.num_tokens if num_tokens is None else num_tokens
        ids = self.token_ids
        if ids is not None and count < len(ids):
            ids = ids[:count]
        return context_hash(nonce, ids, self._extras(count))

    def hashes(self, nonce: Nonce, *, num_tokens: int | None = None) -> tuple[str, str]:
        """The hashes of the first tokens and of the prompt's media; see `Ticket`."""
        return self.context(nonce, num_tokens=num_tokens), self.media.hash(nonce)

    def _extras(self, num_tokens: int) -> Iterator[bytes]:
        yield from self.extras
        for rows in self.rows:
            yield rows.name + rows.data[: num_tokens * rows.size]
        yield from self.media.before(num_tokens).geometries()


class ScheduledState(MachineState):
    """The scheduler's view of a load. It ends with the workers' report or the request's end."""

    EARLY = enum.auto()  # prefill has not begun to compute its request; vLLM has not asked yet
    ASIDE = enum.auto()  # likewise, and vLLM's own cache lacks a part: it waits outside the queue
    READY = enum.auto()  # vLLM may give it blocks
    REFUSED = enum.auto()  # its ticket was refused, and the request must fail
    SOUGHT = enum.auto()  # it has no ticket; another engine is asked for its KV, outside the queue
    STARTED = enum.auto()  # the workers read into its blocks
    RETRACTED = enum.auto()  # it has blocks, and must not end well


class ScheduledEvent(MachineState):
    COMPUTING = enum.auto()  # prefill computes the request, or has computed it
    MISSED = enum.auto()  # vLLM asks, and its own cache lacks a part of the prompt
    FOUND = enum.auto()  # another engine has KV of the prompt
    ALLOCATED = enum.auto()  # vLLM has given it blocks
    RESET = enum.auto()  # this engine's cache was reset


SCHEDULED_TRANSITIONS: Final[
    Mapping[ScheduledState, Mapping[ScheduledEvent, ScheduledState | None]]
] = {
    ScheduledState.EARLY: {
        ScheduledEvent.COMPUTING: ScheduledState.READY,
        ScheduledEvent.MISSED: ScheduledState.ASIDE,
        ScheduledEvent.ALLOCATED: ScheduledState.STARTED,  # in a MultiConnector
        ScheduledEvent.RESET: None,
    },
    ScheduledState.ASIDE: {
        ScheduledEvent.COMPUTING: ScheduledState.READY,
        ScheduledEvent.MISSED: ScheduledState.ASIDE,  # in a scheduler without hooks
        ScheduledEvent.ALLOCATED: ScheduledState.STARTED,  # as above
        ScheduledEvent.RESET: None,
    },
    ScheduledState.READY: {
        ScheduledEvent.COMPUTING: ScheduledState.READY,
        ScheduledEvent.MISSED: ScheduledState.READY,
        ScheduledEvent.ALLOCATED: ScheduledState.STARTED,
        ScheduledEvent.RESET: None,
    },
    ScheduledState.REFUSED: {
        ScheduledEvent.COMPUTING: ScheduledState.REFUSED,
        ScheduledEvent.MISSED: ScheduledState.REFUSED,
        ScheduledEvent.ALLOCATED: ScheduledState.RETRACTED,
        ScheduledEvent.RESET: None,
    },
    ScheduledState.SOUGHT: {
        ScheduledEvent.MISSED: ScheduledState.SOUGHT,
        ScheduledEvent.FOUND: ScheduledState.READY,
        ScheduledEvent.ALLOCATED: None,  # in a MultiConnector, whose other connector loads it
        ScheduledEvent.RESET: None,
    },
    ScheduledState.STARTED: {
        ScheduledEvent.COMPUTING: ScheduledState.STARTED,
        ScheduledEvent.RESET: ScheduledState.RETRACTED,
    },
    ScheduledState.RETRACTED: {
        ScheduledEvent.COMPUTING: ScheduledState.RETRACTED,
        ScheduledEvent.RESET: ScheduledState.RETRACTED,
    },
}


@dataclass
class _Load:
    """A request that loads KV, until its load has ended or vLLM has finished it."""

    request: RequestId
    num_tokens: int  # the upper bound of tokens to load
    state: ScheduledState
    hint_key: HintKey | None = None  # None in REFUSED, in RETRACTED after it, and in SOUGHT
    local: int = 0  # tokens in vLLM's own prefix cache, as of its last question
    begin: int = 0  # the first token whose KV the other engine has
    #: In STARTED, by a rank that has landed; see `Grant`.
    num_cached: int | None = None
    #: In STARTED, the ranks that have landed, and their incarnations.
    landed: dict[Rank, Incarnation] = field(default_factory=dict)

    @property
    def has_blocks(self) -> bool:
        return self.state in (ScheduledState.STARTED, ScheduledState.RETRACTED)

    @property
    def waits_aside(self) -> bool:
        """Whether it waits for another engine, outside vLLM's queue, once vLLM has asked."""
        return self.state in (ScheduledState.ASIDE, ScheduledState.SOUGHT)

    def move(self, event: ScheduledEvent) -> None:
        """Change the state. In the state before None, the load ends instead of moving."""
        self.state = SCHEDULED_TRANSITIONS[self.state][event] or self.state


class DecodeScheduler:
    """The loads of one engine. Scheduler thread only."""

    def __init__(  # noqa: PLR0913 - facts about the engine
        self,
        pagings: Sequence[Paging],  # one for each transferred cache group
        check: Callable[[object], SealedTicket],  # see `Trust.check`
        *,
        computed: int = 1,  # how many of a prompt's last tokens this engine computes, at least
        verify: float = 0.0,  # the share of loads to verify, 0 to 1
        media: MediaRules = AUTO,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,  # for that share
    ) -> None:
        self.weights = ""  # the label of this engine's weights
        self.ends_failed = False  # whether a request with a refused ticket or a lost load ends
        self.must_load = MustLoads()
        self._pagings = pagings
        self._check_trust = check
        self._computed = computed
        self._verify = verify
        self.media = media
        self._clock = clock
        self._draw = draw
        self._loads: dict[RequestId, _Load] = {}
        self._by_hint_key: dict[HintKey, _Load] = {}
        self.aside: set[RequestId] = set()  # the loads in ASIDE and SOUGHT
        self._told: set[RequestId] = set()  # ended loads that workers report again
        self._held_back: list[RequestId] = []  # the workers report these as failed in the next step
        self._used: OrderedDict[Nonce, float] = OrderedDict()  # when each was used, oldest first
        # The latest of each engine since the last reset, or UNTOLD.
        self._epochs: dict[Incarnation, int] = {}
        self._outdated: dict[Incarnation, int] = {}  # the latest of each engine before it
        self._commands: list[events.Command] = []

    @property
    def is_in_use(self) -> bool:
        last = next(reversed(self._used.values()), None)
        return last is not None and self._clock() < last + IN_USE_S

    @property
    def num_open(self) -> int:
        return len(self._loads)

    def on_new_request(self, prompt: Prompt, params: object, *, is_rejected: bool = False) -> None:
        """Ask prefill for the blocks of a new request, so that it holds them from now on.

        Raises:
            TicketRefused: if the ticket is not valid. `why_not_computed` says whether this engine
                may compute the request.
        """
        # Checked before anything connects to its host.
        ticket = self._check_trust(params).open()
        hint_key = new_hint_key()
        prepare = events.PrepareLoad(prompt.request, ticket, new_claim(), hint_key)
        self._forget_used()
        if ticket.nonce in self._used:
            if is_rejected:  # the client hung up after the request had arrived
                return
            raise TicketRefused(
                "kv_transfer_params: its ticket was used before (a ticket is good for one load; "
                "of n > 1 or a list of prompts, only the first request loads)",
                "used",
            )
        if ticket.not_offered:
            raise TicketRefused(
                f"kv_transfer_params: prefill does not offer this request: {ticket.not_offered}",
                "not_offered",
            )
        if is_rejected:  # by vLLM's frontend, so the prompt is a placeholder
            self._give_back(prepare)
            return
        num_tokens = min(ticket.num_tokens, prompt.num_tokens - self._computed)
        if refusal := self._refusal(ticket, prompt, num_tokens):
            words, reason = refusal
            if reason != "prompt":  # a request with another prompt must not end this one's offer
                self._give_back(prepare)
            raise TicketRefused(f"kv_transfer_params: {words}", reason)
        self.on_met(ticket.incarnation, ticket.epoch)
        self._used[ticket.nonce] = self._clock()
        state = ScheduledState.EARLY if ticket.is_early else ScheduledState.READY
        load = _Load(prompt.request, num_tokens, state, hint_key)
        self._loads[load.request] = self._by_hint_key[hint_key] = load
        self._commands.append(prepare)
        if why := self.media.why_not_computed(prompt.media, ticket):
            self.must_load.add(prompt.request, why)
        elif self.ends_failed:
            self.must_load.add(prompt.request, POLICY, is_policy=True)

    def why_not_computed(self, prompt: Prompt, params: object) -> str:
        """Why this engine may not compute a request whose ticket it refuses; '' if it may.

        This is about the request's media; `refuse` follows on_load_failure.
        """
        try:
            ticket = self._check_trust(params).open()
        except TicketRefused:
            return self.media.why_not_computed(prompt.media, None)
        return self.media.why_not_computed(prompt.media, ticket)

    def refuse(self, request: RequestId, num_tokens: int) -> None:
        """Let a request fail whose ticket was refused, unless its KV is in the local cache.

        A connector cannot reject a request, so this pretends a load that fails.
        """
        num_tokens -= self._computed
        self._loads[request] = _Load(request, num_tokens, ScheduledState.REFUSED)
        if self.ends_failed:
            self.must_load.add(request, POLICY, is_policy=True)

    def get_num_new_matched_tokens(self, request: RequestId, local: int) -> tuple[int | None, bool]:
        """How many tokens to load after the `local` ones. vLLM may ask often; starts nothing.

        None: the request waits without blocks until prefill computes it, or until vLLM ends it
        before its next step.
        """
        if self.must_load.has_failed(request):
            return None, False
        load = self._loads.get(request)
        if load is None or load.has_blocks:
            return 0, False
        load.local = local
        num_tokens = max(0, load.num_tokens - local)
        if num_tokens == 0:
            return 0, False
        if local < load.begin:  # vLLM has evicted blocks since it was sought
            self._release(request)
            return 0, False
        load.move(ScheduledEvent.MISSED)
        if load.waits_aside:
            self.aside.add(request)
            return None, False
        return num_tokens, True

    def update_state_after_alloc(
        self, request: RequestId, tables: Sequence[Sequence[int]], num_tokens: int
    ) -> None:
        """Start the load of `num_tokens`, or release prefill if that is 0."""
        load = self._loads.get(request)
        if load is None or load.has_blocks:
            return  # only the first allocation of a request counts
        if load.state is ScheduledState.SOUGHT:
            self.on_not_found(request)
            return
        if num_tokens == 0:
            if load.local >= load.num_tokens:
                self.must_load.on_loaded(request, load.num_tokens)
            else:
                self.must_load.give_up(request, "other_load", "another connector loads its KV")
            self._release(request)
            return
        self._move(load, ScheduledEvent.ALLOCATED)
        if load.state is ScheduledState.RETRACTED:
            self._held_back.append(request)
            return
        tokens = range(load.local, load.local + num_tokens)
        pairs = zip(self._pagings, tables, strict=True)
        self._commands.append(
            events.StartLoad(
                request,
                tokens.start,
                tokens.stop,
                tuple(paging.table(table, tokens) for paging, table in pairs),
                verify=self._draw() < self._verify,  # drawn here: all ranks must decide alike
            )
        )

    def seek(self, request: RequestId, num_tokens: int) -> None:
        """Let a request of `num_tokens` without a ticket wait: another engine may have its KV."""
        num_tokens -= self._computed
        self._loads[request] = _Load(request, num_tokens, ScheduledState.SOUGHT)

    def on_found(
        self, request: RequestId, ticket: Ticket, run: bytes, *, begin: int = 0, least: int = 1
    ) -> bool:
        """Load a sought request by a ticket that this engine has made of another one's answer.

        The other engine has the KV of its tokens from `begin` on. VLLM computes the request if that
        KV may come from other weights, or the load would have fewer than `least` tokens. It is
        never failed for its load.
        """
        load = self._loads.get(request)
        if load is None or load.state is not ScheduledState.SOUGHT:
            return False
        num_tokens = min(ticket.num_tokens, load.num_tokens)
        if num_tokens - load.local < least or not self._is_current(ticket):
            self._forget(request)
            return False
        load.begin, load.num_tokens, load.hint_key = begin, num_tokens, new_hint_key()
        self._by_hint_key[load.hint_key] = load
        self.on_met(ticket.incarnation, ticket.epoch)
        prepare = events.PrepareLoad(request, ticket, new_claim(), load.hint_key, run)
        self._commands.append(prepare)
        self._move(load, ScheduledEvent.FOUND)
        return True

    def on_not_found(self, request: RequestId) -> None:
        load = self._loads.get(request)
        if load is not None and load.state is ScheduledState.SOUGHT:
            self._forget(request)

    def on_ready(self, requests: Iterable[RequestId]) -> None:
        for request in self._loads.keys() & requests:
            self._move(self._loads[request], ScheduledEvent.COMPUTING)

    def has_load(self, request: RequestId) -> bool:
        """Whether it loads KV, or waits for it."""
        return request in self._loads

    def has_begun(self, request: RequestId) -> bool:
        load = self._loads.get(request)
        return load is not None and load.has_blocks

    def take_landed(
        self, hints: Iterable[Hint], engine: EngineId, num_ranks: int
    ) -> dict[RequestId, int | None]:
        """End the loads that have landed on all ranks of this engine. vLLM must hear of them now.

        Returns `Grant.num_cached` of each. Any peer may send hints, but only this engine knows the
        key of a load. A failed load never lands on all ranks, so it ends with the workers' reports.
        """
        landed: dict[RequestId, int | None] = {}
        for hint in hints:
            load, reader = self._by_hint_key.get(hint.hint_key), hint.reader
            if load is None or reader.engine != engine or reader.rank >= num_ranks:
                continue  # the load has ended, or the hint is forged
            self._move(load, ScheduledEvent.COMPUTING)
            if not isinstance(hint, Landed) or load.state is not ScheduledState.STARTED:
                continue
            load.num_cached = hint.num_cached if load.num_cached is None else load.num_cached
            if reader.incarnation not in load.landed.values():
                load.landed[Rank(reader.rank)] = Incarnation(reader.incarnation)
            if len(load.landed) == num_ranks and load.request not in self._told:
                self._end(load.request)
                landed[load.request] = load.num_cached
                self._told.add(load.request)
        return landed

    def ignore_hints(self) -> None:
        """Let the loads in progress end by the workers' reports only.

        The engine pauses, and may discard its cache before the next step. A hint may be older than
        that, but a report is not: after the cache is gone, workers report these loads as failed.
        """
        self._by_hint_key = {
            key: load for key, load in self._by_hint_key.items() if not load.has_blocks
        }

    def is_told(self, request: RequestId) -> bool:
        return request in self._told

    def pop_told(self, finished_recving: Iterable[RequestId]) -> set[RequestId]:
        """The loads of whose end vLLM must not hear again."""
        told = self._told.intersection(finished_recving)
        self._told -= told
        return told

    def update_connector_output(
        self, finished_recving: Iterable[RequestId], failed_recving: Collection[RequestId] = ()
    ) -> set[RequestId]:
        """Returns the loads whose good end vLLM must not see: their KV is from before a reset."""
        ended = self._loads.keys() & finished_recving
        held_back = {
            name
            for name in ended.difference(failed_recving)
            if self._loads[name].state is ScheduledState.RETRACTED
        }
        for request in ended - held_back:
            self._end(request, is_good=request not in failed_recving)
        self._held_back += held_back
        return held_back

    def pop_held_back(self) -> list[RequestId]:
        held_back, self._held_back = self._held_back, []
        return held_back

    def reset_cache(self) -> None:
        """Use no KV from before a cache reset or a change of weights.

        A started load ends as failed, even if the workers have just reported it as good. vLLM may
        still use the KV of a load whose end it knows, as that of running requests. Prefill
        engines that this one knows must reset their caches too; their older tickets are refused.
        """
        for engine, epoch in self._epochs.items():
            self._outdated[engine] = max(epoch, self._outdated.pop(engine, epoch))
        self._epochs.clear()
        while len(self._outdated) > MAX_ENGINES:
            del self._outdated[next(iter(self._outdated))]
        for request, load in list(self._loads.items()):
            if load.has_blocks:
                load.move(ScheduledEvent.RESET)
                self._commands.append(events.CancelLoad(request))
            else:
                self.must_load.give_up(request, "cancelled", "this engine's cache was reset")
                self._release(request)

    def accept_outdated(self) -> None:
        """Accept tickets from before the reset: the engine woke up with the same weights."""
        self._outdated.clear()

    def request_finished(self, request: RequestId) -> None:
        self.must_load.forget(request)
        if request in self._loads:
            self._release(request)

    def build_connector_meta(self) -> list[events.Command]:
        commands, self._commands = self._commands, []
        return commands

    def _give_back(self, prepare: events.PrepareLoad) -> None:
        """Release an offer that this engine will not read, so that its blocks come free."""
        self._used[prepare.ticket.nonce] = self._clock()
        self._commands += [prepare, events.CancelLoad(prepare.request)]

    def _end(self, request: RequestId, *, is_good: bool = True) -> None:
        if is_good:
            self.must_load.on_loaded(request, self._loads[request].num_tokens)
        else:
            self.must_load.fail(request, "load", "its KV load failed")
        self._forget(request)

    def _move(self, load: _Load, event: ScheduledEvent) -> None:
        load.move(event)
        if not load.waits_aside:
            self.aside.discard(load.request)

    def _forget(self, request: RequestId) -> None:
        load = self._loads.pop(request)
        self.aside.discard(request)
        if load.hint_key is not None:
            self._by_hint_key.pop(load.hint_key, None)

    def _release(self, request: RequestId) -> None:
        is_known = self._loads[request].state is not ScheduledState.SOUGHT  # to the workers
        self._forget(request)
        if is_known:
            self._commands.append(events.CancelLoad(request))

    def _refusal(self, ticket: Ticket, prompt: Prompt, num_tokens: int) -> tuple[str, str] | None:
        """Why the first `num_tokens` of a prompt cannot be loaded by a ticket, and the reason."""
        if not self._is_for(ticket, prompt):
            there, here = ticket.num_tokens, prompt.num_tokens
            counts = f"{there} tokens there, {here} here"
            if there == here:
                counts = f"{here} tokens on both sides, but others, or with another LoRA or salt"
            return f"the ticket is for another prompt: {counts}; {OTHER_PROMPT}", "prompt"
        if outdated := self._why_outdated(ticket):
            return outdated, "weights"
        if why := self.media.why_not_loaded(prompt.media, ticket, num_tokens):
            return why, "media"
        return None

    def _is_for(self, ticket: Ticket, prompt: Prompt) -> bool:
        # The prompt may be longer: a router may have added prefill's first token.
        nonce, num_tokens = ticket.nonce, ticket.num_tokens
        return (
            num_tokens <= prompt.num_tokens
            and prompt.context(nonce, num_tokens=num_tokens) == ticket.context
        )

    def _why_outdated(self, ticket: Ticket) -> str:
        """Why this prompt's KV may come from other weights, or ''."""
        if ticket.weights != self.weights:
            return f"weights is {ticket.weights!r}; this engine's weights are {self.weights!r}"
        if ticket.epoch <= self._outdated.get(ticket.incarnation, -1):
            return (
                f"epoch is {ticket.epoch}, from before this engine's cache was reset; reset the "
                f"cache of prefill engine {ticket.engine!r} as well"
            )
        return ""

    def _is_current(self, ticket: Ticket) -> bool:
        """Whether what another engine has cached cannot come from other weights.

        If this engine knew it at its last reset, the other one must have reset its cache since. So
        it must have told its epoch before.
        """
        is_told = self._outdated.get(ticket.incarnation) != UNTOLD
        return is_told and not self._why_outdated(ticket)

    def on_met(self, engine: Incarnation, epoch: int | None) -> None:
        """Another engine has told its epoch, or has described itself without one (None).

        After this engine's next reset, no KV of the other one is used until it is reset too.
        """
        told = UNTOLD if epoch is None else epoch
        self._epochs[engine] = max(told, self._epochs.pop(engine, UNTOLD))
        if len(self._epochs) > MAX_ENGINES:
            del self._epochs[next(iter(self._epochs))]

    def _forget_used(self) -> None:
        now = self._clock()
        while self._used and next(iter(self._used.values())) + REMEMBER_S < now:
            self._used.popitem(last=False)
