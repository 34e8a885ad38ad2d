"""The prefill half of the scheduler: which prompts are offered to decode, and until when.

When a step completes the prompt of a request with `do_remote_decode`, every worker gets the offer's
nonce and block tables. When vLLM finishes the request, its blocks stay and its ticket leaves. When
every rank has reported the offer as read, expired or revoked, vLLM frees the blocks.

Lost tickets and dead decode engines cost at most `offer_share` of the cache: above it, the
scheduler revokes the oldest unclaimed offers. The workers report, one step later, which offers
decode has claimed. They keep a claimed one, even if it is revoked meanwhile. On an engine that also
decodes, a prompt waits while offers hold the share. Otherwise two engines that prefill for each
other could fill each other's cache. If a request still finds no blocks, the workers also recall
granted offers that no rank reads yet.

No vLLM here: the simulator runs this file alone.
"""

import enum
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from nixl_kv.connector.paging import Pins, RequestBlocks, distinct_ids
from nixl_kv.errors import REQUEST_LINES, LimitedLog, LocalProtocolError, get_logger, shown_id
from nixl_kv.geometry.layout import BlockIds, Table
from nixl_kv.ids import EngineId, Incarnation, Nonce, RequestId, new_nonce
from nixl_kv.protocol import events
from nixl_kv.protocol.machine import MachineState
from nixl_kv.protocol.ticket import Ticket, weights_hash

logger = get_logger(__name__)

# A request that waits for blocks reclaims them from offers, or preempts another request. Meanwhile
# no request has got blocks, and no offer has ended.
BLOCK_WAIT_S: Final = 1.0

# Early tickets that are remembered, so that a second request with one makes an offer of its own.
MAX_PROMISED: Final = 1 << 16

NOT_OFFERED: Final = "request %s is not offered: %s"
LOST_BLOCKS: Final = (
    "request %s lost blocks that decode may read: vLLM freed them by an unknown method; its offer "
    "is withdrawn until vLLM has computed it again"
)

_Indices: TypeAlias = npt.NDArray[np.intp]
_NO_NONCE: Final = Nonce("")


@dataclass(frozen=True)
class Address:
    """The fields that all tickets share between two resets of the engine's cache."""

    engine: EngineId
    incarnation: Incarnation
    host: str
    port: int
    epoch: int = 0
    weights: str = ""


class OfferState(MachineState):
    """The scheduler's view of an offer. It ends with the workers' report or the request's end."""

    AWAITED = enum.auto()  # the workers know no blocks of it
    PREPARED = enum.auto()  # a step computes its prompt, or a part that decode may read
    OPEN = enum.auto()  # its ticket has left, and no rank has told that decode claims it
    KEPT = enum.auto()  # decode claims it, or it was revoked: only the workers know when it ends


class OfferEvent(MachineState):
    COMPUTED = enum.auto()  # the workers get its blocks with a step
    WITHDRAWN = enum.auto()  # vLLM has taken its blocks back
    PUBLISHED = enum.auto()  # vLLM has finished the request, and keeps its blocks
    CLAIMED = enum.auto()  # by decode, as a rank reports; or revoked
    ENDED = enum.auto()  # on all ranks


OFFER_TRANSITIONS: Final[Mapping[OfferState, Mapping[OfferEvent, OfferState | None]]] = {
    OfferState.AWAITED: {
        OfferEvent.COMPUTED: OfferState.PREPARED,
        OfferEvent.WITHDRAWN: OfferState.AWAITED,
    },
    OfferState.PREPARED: {
        OfferEvent.COMPUTED: OfferState.PREPARED,
        OfferEvent.WITHDRAWN: OfferState.AWAITED,
        OfferEvent.PUBLISHED: OfferState.OPEN,
    },
    OfferState.OPEN: {
        OfferEvent.CLAIMED: OfferState.KEPT,
        OfferEvent.ENDED: None,
    },
    OfferState.KEPT: {
        OfferEvent.CLAIMED: OfferState.KEPT,
        OfferEvent.ENDED: None,
    },
}


@dataclass
class _Offer:
    """A request that another engine decodes, from its arrival to the end of its offer."""

    request: RequestId
    num_tokens: int
    #: Hashes the prompt and its media with a nonce; deleted when the ticket leaves.
    make_hashes: Callable[[Nonce], tuple[str, str]] = field(repr=False)
    state: OfferState = OfferState.AWAITED
    expected: int = 0  # blocks that it will hold, from its allocation until its ticket leaves
    pins: Pins = field(default_factory=dict)
    count_cached: Callable[[], int | None] = field(default=lambda: None, repr=False)
    num_cached: int = 0  # tokens that vLLM did not compute, as of the last step of the prompt
    promised: Nonce = _NO_NONCE  # of an early ticket; it outlives a preemption
    num_hashed: int = 0  # tokens that its hashes cover; an early ticket's cover the whole prompt
    attempt: int = 0  # how often it was preempted
    local: int = 0  # tokens in vLLM's own prefix cache, as of its last question, and loaded ones
    in_parts: bool = True  # unless another connector loads a part, which vLLM may compute again
    #: Empty in AWAITED.
    nonce: Nonce = _NO_NONCE
    granted: Sequence[Sequence[int]] = ()  # block ids that decode may read before the ticket left
    hashes: tuple[str, str] = ("", "")  # of the prompt and of its media
    tables: tuple[Table, ...] = ()
    #: In OPEN and KEPT.
    held: _Indices = field(init=False, repr=False)
    left_at: float = 0.0  # when its ticket left, in Unix seconds

    def move(self, event: OfferEvent) -> None:
        """Change the state. In the state before None, the offer ends instead of moving."""
        self.state = OFFER_TRANSITIONS[self.state][event] or self.state


class PrefillScheduler:
    """Makes offers from the blocks of vLLM's cache manager. Scheduler thread only."""

    def __init__(  # noqa: PLR0913 - facts about the engine
        self,
        blocks: RequestBlocks,
        offer_share: float,  # of the cache's blocks, 0 to 1
        seal: Callable[[Ticket], dict[str, Any]],  # makes `kv_transfer_params`, with the MAC
        *,
        writes_late: bool = False,  # see `UnwrittenOffers`
        # Whether decode may read an early prompt before all of it is computed. vLLM must not write
        # into new blocks before it calls the workers' hooks: not zeroes, nor copies.
        in_parts: bool = False,
        is_decoding: Callable[[], bool] = lambda: False,  # whether this engine decodes at present
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address: Address | None = None  # set before the first request
        self._blocks = blocks
        self._seal = seal
        self._writes_late = writes_late
        self._in_parts = in_parts and blocks.are_kept
        self._is_decoding = is_decoding
        self._clock = clock
        self._log = LimitedLog(logger, clock, lines=REQUEST_LINES)
        self._needed = 0  # blocks for the request that waits in this step; 0 if none waits
        self._still_since: float | None = None  # since when a request waits and nothing moves
        # Since when a running request waits for blocks, and no offer has ended.
        self._short_since: float | None = None
        self._is_kept_free = False  # in this step: no request may begin
        self._awaited: dict[RequestId, _Offer] = {}  # their tickets have not left
        self._granted: dict[RequestId, _Offer] = {}  # of these: decode may read a part
        self._offers: dict[RequestId, _Offer] = {}  # their tickets have left, the oldest first
        self._revocable: OrderedDict[Nonce, _Offer] = OrderedDict()  # those not known to be claimed
        self._allowed = int(blocks.num_blocks * offer_share)
        self._held = _DistinctBlocks(blocks.num_blocks)
        self._unclaimed = _DistinctBlocks(blocks.num_blocks)
        self._promised: dict[Nonce, None] = {}  # nonces of the latest early tickets, oldest first
        self._num_expected = 0
        self._is_full = False  # in this step, for prompts that will be offered
        self._commands: list[events.Command] = []

    @property
    def awaited(self) -> KeysView[RequestId]:
        return self._awaited.keys()

    @property
    def num_offers(self) -> int:
        return len(self._offers)

    @property
    def num_held_blocks(self) -> int:
        return len(self._held)

    @property
    def oldest_offer_at(self) -> float:
        """When the ticket of the oldest open offer left, in Unix seconds; 0 without offers."""
        return next((offer.left_at for offer in self._offers.values()), 0.0)

    def on_new_request(
        self,
        request: RequestId,
        num_tokens: int,
        make_hashes: Callable[[Nonce], tuple[str, str]],
        promised: Nonce | None = None,
        *,
        num_hashed: int = 0,
        count_cached: Callable[[], int | None] = lambda: None,  # in a step; None: no longer known
    ) -> None:
        """Another engine decodes this request. `make_hashes` hashes prompt and media with a nonce.

        `count_cached` counts the tokens that vLLM takes from caches. An early ticket with the nonce
        `promised` is out already. A nonce that was used before is ignored. The hashes cover the
        first `num_hashed` tokens (0: all that are offered).
        """
        offer = _Offer(
            request,
            num_tokens,
            make_hashes,
            num_hashed=num_hashed or num_tokens,
            count_cached=count_cached,
        )
        self._awaited[request] = offer
        if promised is not None and self.is_new(promised):
            offer.promised = promised
            self._promised[promised] = None
            if len(self._promised) > MAX_PROMISED:
                del self._promised[next(iter(self._promised))]
            offer.hashes = make_hashes(promised)
            expect = events.ExpectOffer(promised, request, self._context(offer))
            self._commands.append(expect)

    def decline(self, promised: Nonce) -> None:
        """A request with an early ticket will not be offered."""
        if self.is_new(promised):
            self._commands.append(events.WithdrawOffer(promised))

    def is_new(self, promised: Nonce) -> bool:
        """Whether no request has had this nonce before."""
        # Without a key, a client could name another request's offer.
        is_used = any(promised in (offer.nonce, offer.promised) for offer in self._known())
        return promised not in self._promised and not is_used

    def awaited_of(self, promised: Collection[Nonce]) -> dict[Nonce, RequestId]:
        """The requests with these early tickets that this engine has not computed."""
        return {
            offer.promised: name
            for name, offer in self._awaited.items()
            if offer.promised in promised
        }

    def _known(self) -> Iterator[_Offer]:
        yield from self._awaited.values()
        yield from self._offers.values()

    def may_begin(self, request: RequestId, num_tokens: int, local: int = 0) -> bool:
        """Whether a waiting request, of any kind, may have blocks now if vLLM finds enough."""
        offer = self._awaited.get(request)
        if offer is not None:
            offer.local, offer.in_parts = local, self._in_parts
        if self._is_kept_free:
            return False  # a running request needs the blocks that come back
        if offer is not None and self._is_decoding():
            # vLLM asks about its waiting requests in order, in each step. Once a prompt has to
            # wait, all later prompts of this step wait too. So short prompts cannot overtake a long
            # one for ever.
            self._is_full = self._is_full or not self._has_room(offer)
            if self._is_full:
                return False
        self._needed = self._blocks.count(num_tokens)
        return True

    def update_state_after_alloc(self, request: RequestId) -> None:
        self._note_progress()
        offer = self._awaited.get(request)
        if offer is not None:
            self._expect(offer, self._blocks.count(offer.num_tokens))

    def on_load(self, request: RequestId, num_tokens: int) -> None:
        """This connector loads tokens of the prompt, behind those in vLLM's own cache."""
        offer = self._awaited.get(request)
        if offer is not None:
            offer.local += num_tokens

    def build_connector_meta(
        self,
        scheduled: Iterable[tuple[RequestId, range]] = (),
        preempted: Iterable[RequestId] = (),
    ) -> list[events.Command]:
        """End a step; `scheduled` gives the token positions that it computes of each request."""
        self._withdraw_changed(preempted)
        for request, positions in scheduled:
            offer = self._awaited.get(request)
            if offer is None:
                continue
            if positions.start < min(offer.local, offer.num_tokens):
                self._withdraw(offer)  # vLLM computes a part again, since it discarded a step
            self._blocks.pin(request, offer.num_tokens, offer.pins)
            offer.in_parts &= positions.start <= offer.local
            offer.local = max(offer.local, positions.stop)
            if offer.num_tokens - 1 in positions:
                self._prepare(offer)
            elif offer.promised and offer.in_parts and positions.stop < offer.num_tokens:
                self._prepare(offer, computed=positions.stop)
        self._is_full = False
        self._end_shortage()
        needed = self._pop_needed()
        if needed and self._offers:
            logger.info("a request has waited for %d blocks; reclaiming them from offers", needed)
            self._commands.append(events.ReclaimBlocks(needed))
        commands, self._commands = self._commands, []
        return commands

    def request_finished(
        self, request: RequestId, tables: Sequence[Sequence[int]], *, reason: str
    ) -> tuple[bool, dict[str, Any] | None]:
        """Publish the offer of a finished request; `reason` says why its KV is incomplete.

        Returns whether vLLM has to keep the blocks, and the response's `kv_transfer_params`.
        """
        offer = self._awaited.pop(request, None)
        if offer is None:
            return False, None
        reason, params = reason or self._why_not_offered(offer, tables), None
        if self.address is not None and not reason:
            try:
                params = self._seal(_ticket(offer, self.address))
            except Exception as error:  # noqa: BLE001 - vLLM ends the engine if a hook raises
                reason = f"its ticket cannot be made: {error!r}"
        if params is None:
            self._log.info(NOT_OFFERED, shown_id(request), reason)
            self._withdraw(offer, is_final=True)
            self._release(offer)
            return False, None
        self._granted.pop(request, None)
        self._commands.append(events.PublishOffer(offer.nonce, request))
        self._expect(offer, 0)
        self._hold(offer, distinct_ids(tables))
        # They hold the prompt: embeddings may be hundreds of megabytes.
        del offer.make_hashes, offer.count_cached
        return True, params

    def update_connector_output(self, finished_sending: Collection[RequestId]) -> None:
        for request in finished_sending:
            self._forget(request)
        if finished_sending:
            self._note_progress()
            self._short_since = None

    def on_granted(self, requests: Iterable[RequestId]) -> None:
        """Decode has claimed these offers."""
        for request in requests:
            offer = self._offers.get(request)
            if offer is not None:
                self._count_as_claimed(offer.nonce)

    def has_pending_block_frees(self) -> bool:
        """Whether a running request that finds no blocks gets some soon, without a preemption.

        Offers that decode has claimed, and revoked ones, give theirs back. But a reader may be
        dead, so vLLM waits at most BLOCK_WAIT_S after the last end of an offer. An engine that
        decodes does not wait: other requests would stand still, whose clients read their answers.
        """
        if len(self._offers) == len(self._revocable) or self._is_decoding():
            return False
        now = self._clock()
        if self._short_since is None:
            self._short_since = now
        self._is_kept_free = now < self._short_since + BLOCK_WAIT_S
        return self._is_kept_free

    def _end_shortage(self) -> None:
        """At the end of a step: vLLM may wait anew, unless it has waited in vain."""
        waits, self._is_kept_free = self._is_kept_free, False
        since = self._short_since
        if not waits and since is not None and self._clock() < since + BLOCK_WAIT_S:
            self._short_since = None

    def on_free(self, request: RequestId) -> None:
        """Withdraw an offer whose blocks vLLM frees: at the request's end, or a preemption."""
        self._forget(request)
        offer = self._awaited.get(request)
        if offer is not None:
            # If vLLM computes the prompt again, the offer gets a new nonce, because the workers
            # know other blocks under the old one.
            self._withdraw(offer)
            self._release(offer)

    def reset_cache(self) -> None:
        for request, offer in list(self._awaited.items()):
            # Its blocks may mix KV from before and after. vLLM recomputes a preempted request,
            # which has none, so that one is offered.
            is_mixed = self._blocks.has_blocks(request)
            # Decode may hold a part from before, and the early ticket has the former label.
            is_over = is_mixed or bool(offer.promised)
            self._withdraw(offer, is_final=is_over)
            if is_over:
                self._log.info(NOT_OFFERED, shown_id(request), "the cache was reset meanwhile")
                del self._awaited[request]
                self._release(offer)
        if self._offers:
            self._commands.append(events.RevokeAll())

    def _prepare(self, offer: _Offer, *, computed: int | None = None) -> None:
        """This step computes all of the prompt, or the first `computed` tokens of an early one."""
        offer.move(OfferEvent.COMPUTED)
        offer.nonce = offer.promised or new_nonce()
        if not offer.promised:
            offer.hashes = offer.make_hashes(offer.nonce)
        current = self._blocks.current(offer.request)
        if offer.promised and offer.in_parts:
            offer.granted = self._blocks.filled(computed or offer.num_tokens, current)
            self._granted[offer.request] = offer
        offer.tables = self._blocks.tables(computed or offer.num_tokens, current, offer.pins)
        num_cached = offer.count_cached()
        offer.num_cached = offer.num_cached if num_cached is None else num_cached
        self._commands.append(
            events.PrepareOffer(
                offer.nonce,
                offer.request,
                self._context(offer),
                offer.num_tokens,
                offer.tables,
                is_written=not (self._writes_late or offer.promised),
                is_early=bool(offer.promised),
                in_parts=bool(offer.promised) and offer.in_parts,
                attempt=offer.attempt,
                computed=computed,
                num_cached=offer.num_cached,
            )
        )

    def _context(self, offer: _Offer) -> str:
        """`Ticket.hashes` of its ticket."""
        address = self.address
        weights = weights_hash(address.epoch, address.weights) if address is not None else ""
        return "".join((*offer.hashes, weights))

    def _why_not_offered(self, offer: _Offer, tables: Sequence[Sequence[int]]) -> str:
        if self.address is None:
            return "this engine is not described yet"
        if not offer.nonce:
            return "its prompt was not computed in a step"
        if offer.tables != self._blocks.tables(offer.num_tokens, tables, offer.pins):
            return "its blocks changed since its prompt was computed"
        return ""

    def _withdraw(self, offer: _Offer, *, is_final: bool = False) -> None:
        nonce = offer.nonce or (offer.promised if is_final else _NO_NONCE)
        self._granted.pop(offer.request, None)
        if nonce:
            is_over = is_final or not offer.promised
            self._commands.append(events.WithdrawOffer(nonce, is_over))
            offer.nonce = _NO_NONCE
            offer.attempt += 1
        offer.move(OfferEvent.WITHDRAWN)

    def _withdraw_changed(self, preempted: Iterable[RequestId]) -> None:
        """Withdraw the offers that have lost blocks, if vLLM freed them by an unknown method."""
        # `on_free` has withdrawn them otherwise. Decode may read a granted block until then, and
        # this step may write it.
        for request in preempted:
            if request in self._awaited:
                self._withdraw(self._awaited[request])
        for offer in list(self._granted.values()):
            if not self._blocks.has_still(offer.request, offer.granted):
                self._log.warning(LOST_BLOCKS, shown_id(offer.request))
                self._withdraw(offer)

    def _hold(self, offer: _Offer, blocks: BlockIds) -> None:
        offer.move(OfferEvent.PUBLISHED)
        offer.held = blocks.astype(np.intp)  # numpy converts other types at each use
        offer.left_at = time.time()
        self._offers[offer.request] = offer
        self._held.add(offer.held)
        self._revocable[offer.nonce] = offer
        self._unclaimed.add(offer.held)
        # Keep the newest: its prompt may be longer than the budget.
        while len(self._unclaimed) > self._allowed and len(self._revocable) > 1:
            oldest = next(iter(self._revocable))
            self._count_as_claimed(oldest)
            self._commands.append(events.RevokeOffer(oldest))  # workers keep it if it is claimed

    def _count_as_claimed(self, nonce: Nonce) -> None:
        offer = self._revocable.pop(nonce, None)
        if offer is not None:
            offer.move(OfferEvent.CLAIMED)
            self._unclaimed.remove(offer.held)

    def _forget(self, request: RequestId) -> None:
        offer = self._offers.pop(request, None)
        if offer is not None:
            self._count_as_claimed(offer.nonce)
            offer.move(OfferEvent.ENDED)
            self._held.remove(offer.held)
            self._release(offer)

    def _release(self, offer: _Offer) -> None:
        self._expect(offer, 0)
        self._blocks.unpin(offer.pins)

    def _expect(self, offer: _Offer, num_blocks: int) -> None:
        self._num_expected += num_blocks - offer.expected
        offer.expected = num_blocks

    def _has_room(self, offer: _Offer) -> bool:
        held = len(self._held) + self._num_expected
        # A prompt that is longer than the budget begins alone.
        return not held or held + self._blocks.count(offer.num_tokens) <= self._allowed

    def check(self) -> None:
        """Check that each offer's state fits the tables that have it, between two hooks.

        Raises:
            LocalProtocolError: says what does not hold.
        """
        before = {OfferState.AWAITED, OfferState.PREPARED}
        for offer in self._known():
            name, is_awaited = offer.request, offer.state in before
            rules = {
                "not awaited": is_awaited != (name in self._awaited),
                "without a ticket": is_awaited == (name in self._offers),
                f"nonce {offer.nonce}": (offer.state is OfferState.AWAITED) == bool(offer.nonce),
                "revocable": (offer.state is OfferState.OPEN) != (offer.nonce in self._revocable),
                "readable": name in self._granted and offer.state is not OfferState.PREPARED,
            }
            for rule, is_broken in rules.items():
                if is_broken:
                    raise LocalProtocolError(f"offer of {name!r} is {offer.state.name}: {rule}")

    def _note_progress(self) -> None:
        self._needed, self._still_since = 0, None

    def _pop_needed(self) -> int:
        """At the end of a step: how many blocks to reclaim; 0 until BLOCK_WAIT_S have passed."""
        # Claimed offers delay prefill until they are read, as they should. But if two engines
        # prefill for each other, each may hold the blocks that the other one waits for.
        needed, self._needed = self._needed, 0
        now = self._clock()
        if not needed:
            self._still_since = None
        elif self._still_since is None:
            self._still_since = now
        elif now >= self._still_since + BLOCK_WAIT_S:
            self._still_since = now
            return needed
        return 0


def _ticket(offer: _Offer, address: Address) -> Ticket:
    context, media = offer.hashes
    return Ticket(
        **asdict(address),
        nonce=offer.nonce,
        num_tokens=offer.num_hashed,
        context=context,
        media=media,
    )


class _DistinctBlocks:
    """The blocks of several offers. Its length counts a shared block once."""

    def __init__(self, num_blocks: int) -> None:
        self._counts = np.zeros(num_blocks, dtype=np.int32)
        self._num_used = 0

    def __len__(self) -> int:
        return self._num_used

    def add(self, blocks: _Indices) -> None:
        self._num_used += int(np.count_nonzero(self._counts[blocks] == 0))
        self._counts[blocks] += 1

    def remove(self, blocks: _Indices) -> None:
        self._counts[blocks] -= 1
        self._num_used -= int(np.count_nonzero(self._counts[blocks] == 0))
