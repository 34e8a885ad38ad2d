"""The scheduler's side of decode: which requests load KV, and into which blocks."""

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from nixl_kv.connector.paging import Paging
from nixl_kv.connector.prompt import Prompt
from nixl_kv.errors import RemoteProtocolError
from nixl_kv.ids import Incarnation, Nonce, RequestId, new_claim
from nixl_kv.protocol import events
from nixl_kv.protocol.ticket import SealedTicket, Ticket

IN_USE_S: Final = 60.0
"""How long after its last ticket an engine still counts as one that decodes."""

REMEMBER_S: Final = 600.0
"""How long a used nonce is remembered here. Later than that prefill denies it anyway."""


MAX_ENGINES: Final = 1 << 14
"""Prefill engines that are remembered: 3 MiB, also if a client without a key invents them."""


@dataclass
class _Load:
    """A request with a valid ticket."""

    num_tokens: int  # to be loaded at most: all but the last of the prompt, or the last few
    local: int = 0  # tokens that vLLM has in its own cache, by its last question
    is_started: bool = False


class DecodeScheduler:
    """Decides loads."""

    def __init__(
        self,
        pagings: Sequence[Paging],
        check: Callable[[object], SealedTicket],
        *,
        computed: int = 1,
        verify: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Start with nothing to load.

        Args:
            pagings: of the groups that are transferred.
            check: finds the ticket in `kv_transfer_params`, of any version; it raises
                RemoteProtocolError for one that is not to be trusted.
            computed: how many of a prompt's last tokens are computed here, at least.
            verify: the share of loads that are verified.
            clock: monotonic seconds.
            draw: a random number from 0 to 1 (excluded), for that share.
        """
        self._pagings = pagings
        self._check_trust = check
        self._computed = computed
        self._verify = verify
        self._clock = clock
        self._draw = draw
        self._loads: dict[RequestId, _Load] = {}
        self._open: set[RequestId] = set()  # of these, those that have not ended
        self._retracted: set[RequestId] = set()  # of these, those that must not end well
        self._held_back: list[RequestId] = []  # to be reported as failed with the next step
        self._used: OrderedDict[Nonce, float] = OrderedDict()
        self._epochs: dict[Incarnation, int] = {}  # the latest of each engine met since the reset
        self._outdated: dict[Incarnation, int] = {}  # the latest of each engine met before
        self._commands: list[events.Command] = []
        self.weights = ""
        """The label of this engine's weights."""

    @property
    def is_in_use(self) -> bool:
        """Whether a request with a ticket came lately."""
        last = next(reversed(self._used.values()), None)
        return last is not None and self._clock() < last + IN_USE_S

    @property
    def num_open(self) -> int:
        """How many requests are being loaded, or will be when they have blocks."""
        return len(self._open)

    def on_arrival(self, prompt: Prompt, params: object, *, is_rejected: bool = False) -> None:
        """A request brings a ticket: ask for its blocks at once, so that they wait for it.

        Args:
            prompt: of the request.
            params: what the client sent as `kv_transfer_params`.
            is_rejected: vLLM's frontend says that the request never came here, and has put another
                prompt in its place: it only releases its offer.

        Raises:
            RemoteProtocolError: if the ticket is not valid; the request is computed here.
        """
        sealed = self._check_trust(params)  # before anything is connected to where it leads
        ticket = sealed.open()
        prepare = events.PrepareLoad(prompt.request, ticket, new_claim())
        if is_rejected:
            # The frontend says so too of each request whose client hung up after it had come here.
            if ticket.nonce not in self._used:
                self._commands += [prepare, events.CancelLoad(prompt.request)]
            return
        self._check(prompt, ticket)
        outdated = self._why_outdated(ticket)
        if outdated:
            self._give_back(prepare)
            raise RemoteProtocolError(f"kv_transfer_params: {outdated}")
        self._meet(ticket)
        self._used[ticket.nonce] = self._clock()
        num_tokens = min(ticket.num_tokens, prompt.num_tokens - self._computed)
        self._loads[prompt.request] = _Load(num_tokens)
        self._open.add(prompt.request)
        self._commands.append(prepare)

    def count_matched(self, request: RequestId, local: int) -> tuple[int, bool]:
        """How many tokens to load beyond the `local` ones. May be asked often, starts nothing.

        At most all but the last of the prompt: that one is computed here, for its logits. A draft
        model of several modules looks at more.
        """
        load = self._loads.get(request)
        if load is None or load.is_started:
            return 0, False
        load.local = local
        num_tokens = load.num_tokens - local
        return (num_tokens, True) if num_tokens > 0 else (0, False)

    def on_allocation(
        self, request: RequestId, tables: Sequence[Sequence[int]], num_tokens: int
    ) -> None:
        """The request has blocks. Only its first allocation decides: load, or release prefill.

        Args:
            request: of vLLM.
            tables: its whole block table, for each group that is transferred.
            num_tokens: to be loaded, 0 for none.
        """
        load = self._loads.get(request)
        if load is None or load.is_started:
            return
        if num_tokens == 0:
            self._release(request)
            return
        load.is_started = True
        tokens = range(load.local, load.local + num_tokens)
        pairs = zip(self._pagings, tables, strict=True)
        self._commands.append(
            events.StartLoad(
                request,
                tokens.start,
                tokens.stop,
                tuple(paging.table(table, tokens) for paging, table in pairs),
                verify=self._draw() < self._verify,  # one decision for all ranks
            )
        )

    def has_begun(self, request: RequestId) -> bool:
        """Whether its load was started, whatever came of it."""
        load = self._loads.get(request)
        return load is not None and load.is_started

    def on_end(
        self, requests: Iterable[RequestId], failed: Iterable[RequestId] = ()
    ) -> set[RequestId]:
        """Their loads have ended, well or not (`failed`).

        Returns:
            Those whose good end vLLM must not see, since their KV is from before a reset. Each is
            reported once more, as failed; see `pop_held_back`.
        """
        ended = set(requests)
        held_back = (ended & self._retracted).difference(failed)
        self._held_back += held_back
        self._retracted -= ended
        self._open -= ended - held_back
        return held_back

    def pop_held_back(self) -> list[RequestId]:
        """Loads that each worker has to report as failed in the next step."""
        held_back, self._held_back = self._held_back, []
        return held_back

    def reset(self) -> None:
        """The cache was reset, or the weights are others: use no KV from before.

        A request whose load has not started is computed here; vLLM is owed nothing for it. A load
        that has started ends as failed, even if the workers have just reported it as good. Tickets
        of all prefill engines that were met are refused until those reset their caches too.
        """
        self._outdated |= self._epochs
        self._epochs.clear()
        while len(self._outdated) > MAX_ENGINES:
            del self._outdated[next(iter(self._outdated))]
        for request, load in list(self._loads.items()):
            if not load.is_started:
                self._release(request)
            elif request in self._open:
                self._retracted.add(request)
                self._commands.append(events.CancelLoad(request))

    def accept_again(self) -> None:
        """This engine woke up with the weights that it had: tickets from before may be used."""
        self._outdated.clear()

    def on_finish(self, request: RequestId) -> None:
        """A request is over, perhaps before its load, or during it."""
        if request in self._loads:
            self._release(request)

    def pop_commands(self) -> list[events.Command]:
        """The commands for the next step."""
        commands, self._commands = self._commands, []
        return commands

    def _give_back(self, prepare: events.PrepareLoad) -> None:
        """Release an offer that this engine will not read, once, so that its blocks come free."""
        self._forget_used()
        nonce = prepare.ticket.nonce
        if nonce not in self._used:
            self._used[nonce] = self._clock()
            self._commands += [prepare, events.CancelLoad(prepare.request)]

    def _release(self, request: RequestId) -> None:
        """To cancel what was loaded and reported long ago does nothing."""
        del self._loads[request]
        self._open.discard(request)
        self._commands.append(events.CancelLoad(request))

    def _meet(self, ticket: Ticket) -> None:
        """Remember its engine, and how often that has reset its cache."""
        latest = self._epochs.pop(ticket.incarnation, 0)
        self._epochs[ticket.incarnation] = max(latest, ticket.epoch)
        if len(self._epochs) > MAX_ENGINES:
            del self._epochs[next(iter(self._epochs))]

    def _why_outdated(self, ticket: Ticket) -> str:
        """Why KV that is of this prompt may be of other weights; empty if it is not."""
        if ticket.weights != self.weights:
            return f"weights is {ticket.weights!r}; this engine's weights are {self.weights!r}"
        if ticket.epoch <= self._outdated.get(ticket.incarnation, -1):
            return (
                f"epoch is {ticket.epoch}, from before this engine's cache was reset; reset the "
                f"cache of prefill engine {ticket.engine!r} as well"
            )
        return ""

    def _check(self, prompt: Prompt, ticket: Ticket) -> None:
        """A ticket is good for one request, and for its own prompt."""
        self._forget_used()
        if ticket.nonce in self._used:
            raise RemoteProtocolError("kv_transfer_params: nonce was used before")
        if ticket.num_tokens > prompt.num_tokens:
            raise RemoteProtocolError(
                f"kv_transfer_params: num_tokens is {ticket.num_tokens}; "
                f"allowed: up to the prompt's {prompt.num_tokens}"
            )
        if prompt.context(ticket.nonce) != ticket.context:
            raise RemoteProtocolError("kv_transfer_params: context is another prompt's")

    def _forget_used(self) -> None:
        now = self._clock()
        while self._used and next(iter(self._used.values())) + REMEMBER_S < now:
            self._used.popitem(last=False)
