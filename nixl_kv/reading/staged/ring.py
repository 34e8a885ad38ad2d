"""Packed chunks in the protocol: prefill's staging ring, and the chunks that decode asks for.

A load whose read is staged asks a rank to pack chunks of its blocks. The rank packs each chunk into
a slot of its ring as soon as one is free, and answers with the slot's number.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Nonce, Rank
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.events import Actions
from nixl_kv.protocol.load import ASK_AGAIN_S, Load, LoadPart, RankRead, ReadState
from nixl_kv.protocol.prefill import Offer, PrefillPart, reader_name

Holder: TypeAlias = tuple[Nonce, Rank]  # one reader of one offer
WaitingChunk: TypeAlias = tuple[bytes, messages.PackRequest]  # with the route to its reader


@dataclass
class _Slot:
    holder: Holder | None  # the reader; None: it has left, and the chunk is still being packed
    chunk: int
    is_packed: bool = False  # the reader may read it


def may_take(held: int, free: int) -> bool:
    """Whether a reader that holds `held` slots of a ring may take one of the `free` ones.

    One reader gets two thirds of the ring, two get two fifths each, and some room always remains
    for another. These are dynamic thresholds with a factor of 2, after Choudhury and Hahne,
    "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998.
    """
    return held < 2 * free


def most_slots(num_slots: int) -> int:
    """How many slots of a ring `may_take` gives to a single reader."""
    return -(-2 * num_slots // 3)


class RingBook:
    """The slots of the staging ring into which this rank packs, and the chunks that wait for one.

    A slot is free again when its reader has read it, or when its offer has ended: then the fence
    slot is clear, so a reader that still reads finds out. All loops are over a few slots.
    """

    def __init__(self, num_slots: int) -> None:
        self.slots: list[_Slot | None] = [None] * num_slots  # None: free
        self.waiting: OrderedDict[tuple[Holder, int], WaitingChunk] = OrderedDict()

    def check(self) -> None:
        """Check that no chunk waits for a slot that its reader may take.

        Raises:
            LocalProtocolError: says what does not hold.
        """
        free = self.slots.count(None)
        for holder, _ in self.waiting:
            if may_take(len(self._held(holder)), free):
                raise LocalProtocolError(f"a chunk of {holder} waits beside {free} free slots")

    def find(self, holder: Holder, chunk: int) -> tuple[int, bool] | None:
        """The slot that a reader has for a chunk, and whether the chunk is in it."""
        held = self._held(holder)
        return next(((n, slot.is_packed) for n, slot in held if slot.chunk == chunk), None)

    def wait(self, holder: Holder, route: bytes, request: messages.PackRequest) -> bool:
        """Queue a chunk, once; False if its reader already has or awaits all slots."""
        num_waiting = sum(each == holder for each, _ in self.waiting)
        key = holder, request.chunk
        if key not in self.waiting and len(self._held(holder)) + num_waiting >= len(self.slots):
            return False
        self.waiting[key] = route, request
        return True

    def pop_packable(self) -> list[tuple[WaitingChunk, int]]:
        """Give free slots to waiting chunks, in order: pack each into its slot."""
        packable: list[tuple[WaitingChunk, int]] = []
        for (holder, chunk), waiting in list(self.waiting.items()):
            if may_take(len(self._held(holder)), self.slots.count(None)):
                slot = self.slots.index(None)
                self.slots[slot] = _Slot(holder, chunk)
                del self.waiting[holder, chunk]
                packable.append((waiting, slot))
        return packable

    def on_packed(self, slot: int, *, is_packed: bool) -> bool:
        """The write to a slot has ended. Whether a reader waits for it."""
        entry = self.slots[slot]
        if entry is None:
            return False
        entry.is_packed = is_packed
        if entry.holder is None or not is_packed:
            self.slots[slot] = None
        return entry.holder is not None

    def release(self, holder: Holder, holds: Collection[int] = ()) -> None:
        """Free the slots of a reader's other chunks, which it neither waits for nor reads."""
        for key in [key for key in self.waiting if key[0] == holder and key[1] not in holds]:
            del self.waiting[key]
        for number, slot in self._held(holder):
            if slot.chunk not in holds:
                slot.holder = None
                if slot.is_packed:
                    self.slots[number] = None

    def clear(self, writing: Collection[int]) -> None:
        """Forget all readers. The slots in `writing` are still being written."""
        self.waiting.clear()
        numbers = range(len(self.slots))
        self.slots = [_Slot(None, 0) if slot in writing else None for slot in numbers]

    def _held(self, holder: Holder) -> list[tuple[int, _Slot]]:
        return [(n, slot) for n, slot in enumerate(self.slots) if slot and slot.holder == holder]


class RingPart(PrefillPart):
    """Assigns the slots of this rank's ring."""

    def __init__(self, num_slots: int, writing: Callable[[], Collection[int]]) -> None:
        """`writing`: the slots into which copies are in progress."""
        self.ring = RingBook(num_slots)
        self._writing = writing
        self.message_handlers = {messages.PackRequest: self._on_request}
        self.event_handlers = {events.ChunkPacked: self._on_packed}

    def _on_request(self, request: messages.PackRequest, route: bytes, _now: float) -> Actions:
        """Pack a chunk once it has a ring slot. A repeated request gets the same answer."""
        machine, ring, rank = self.machine, self.ring, Rank(request.reader.rank)
        offer = machine.granted_to(request)
        # An early offer may be pinned while its last step is still written: earlier parts stay
        # granted.
        if offer is None or offer.binding is None or not offer.written:
            return machine.deny(request, route, "a chunk of blocks that are not granted to it")
        if request.end > offer.written:
            reason = f"a chunk up to token {request.end} of {offer.written}"
            return machine.deny(request, route, reason)
        if request.number < offer.binding.numbers[rank]:
            return []
        offer.binding.numbers[rank] = request.number
        holder = offer.nonce, rank
        ring.release(holder, request.holds)
        if request.chunk not in request.holds:
            return []  # it only tells which chunks the reader still holds
        slot, is_packed = ring.find(holder, request.chunk) or (None, False)
        if slot is None:
            is_waiting = ring.wait(holder, route, request)
            return [] if is_waiting else self._reply(request, route, None)
        return self._reply(request, route, slot) if is_packed else []

    def _on_packed(self, event: events.ChunkPacked, _now: float) -> Actions:
        request = event.pack_request
        is_wanted = self.ring.on_packed(event.slot, is_packed=event.refusal is None)
        offer = self.machine.granted_to(request)
        if not is_wanted or offer is None:
            return []
        if event.refusal is not None:
            offer.note(reader_name(request.reader), f"PackRequest denied: {event.refusal}")
            return self._reply(request, event.route, None)
        return self._reply(request, event.route, event.slot)

    def _reply(self, request: messages.PackRequest, route: bytes, slot: int | None) -> Actions:
        fields = self.machine.fields(request)
        reply = messages.PackReply(**fields, chunk=request.chunk, slot=slot)
        return [events.Reply(route, reply)]

    def on_reader_ended(self, offer: Offer, rank: Rank) -> None:
        self.ring.release((offer.nonce, rank))

    def pop_actions(self) -> Actions:
        """Slots that the event has freed take waiting chunks."""
        actions: Actions = []
        for (route, request), slot in self.ring.pop_packable() if self.ring.waiting else ():
            tables = self.machine.offers[Nonce(request.nonce)].prepared.tables
            actions.append(events.PackChunk(route, request, tables, slot))
        return actions

    def clear(self) -> Actions:
        self.ring.clear(self._writing())
        return []

    def check(self) -> None:
        self.ring.check()


class PackedChunk(NamedTuple):
    number: int
    slot: int | None  # of prefill's ring; None: read the chunk directly


@dataclass
class _Asked:
    chunks: dict[int, events.Chunk] = field(default_factory=dict)  # without an answer
    holds: tuple[int, ...] = ()  # see `messages.PackRequest`


class ChunkPart(LoadPart):
    """Asks prefill for the chunks that a staged read wants, until each has an answer."""

    def __init__(self) -> None:
        self.handlers = {
            events.ChunksWanted: self._on_wanted,
            messages.PackReply: self._on_reply,
        }

    def _of(self, read: RankRead) -> _Asked:
        return read.keep(self, _Asked)

    def _on_wanted(
        self, load: Load, read: RankRead, event: events.ChunksWanted, now: float
    ) -> Actions:
        asked = self._of(read)
        asked.holds = event.holds
        load.note_progress(read, now)
        if read.state is not ReadState.READING:
            return [events.StopRead(load.request, read.rank)] if event.chunks else []
        asked.chunks |= {each.number: each for each in event.chunks if each.number in event.holds}
        return self._request(load, read, event.chunks, now)

    def _on_reply(
        self, load: Load, read: RankRead, reply: messages.PackReply, now: float
    ) -> Actions:
        is_read = read.state is ReadState.READING
        if not is_read or self._of(read).chunks.pop(reply.chunk, None) is None:
            return []
        load.note_progress(read, now)
        packed = PackedChunk(reply.chunk, reply.slot)
        return [events.TellRead(load.request, read.rank, packed)]

    def is_awaiting(self, read: RankRead) -> bool:
        return read.state is ReadState.READING and bool(self._of(read).chunks)

    def ask(self, load: Load, read: RankRead, now: float) -> Actions:
        if read.state is not ReadState.READING:
            return []
        return self._request(load, read, self._of(read).chunks.values(), now)

    def _request(
        self, load: Load, read: RankRead, chunks: Collection[events.Chunk], now: float
    ) -> Actions:
        if not chunks:
            return []
        read.ask_again_at = now + ASK_AGAIN_S
        number = load.numbers.next()
        requests = [
            messages.PackRequest(
                **load.fields(read),
                number=number,
                chunk=chunk.number,
                begin=chunk.begin,
                end=chunk.end,
                layers=chunk.layers,
                holds=self._of(read).holds,
            )
            for chunk in chunks
        ]
        return [events.Send(read.endpoint, request) for request in requests]
