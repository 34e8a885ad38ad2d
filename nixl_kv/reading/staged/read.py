"""A read by chunks, which prefill packs: asked for, read in one run each, scattered.

Several chunks are under way at a time, each in a slot of this rank's ring while it is read and
scattered. A read has one such slot from its first question to its end, so what prefill has packed
can always be fetched, and more where there are more; while something packed waits for one, nothing
is asked for. A chunk that prefill does not pack is read as it is, when no other one is under way:
until then slots may come free.

A slot is written by NIXL, and a copy writes into the cache: both may go on when nobody wants the
read any more. So slots come back, and the read ends, when both have ended.
"""

import enum
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from nixl_kv.errors import IncompatiblePeer, PeerLost, TransportError
from nixl_kv.geometry.layout import CacheLayout, Group, Memory, Span
from nixl_kv.geometry.plan import MAX_INDEX, Plan, Rows, Share, plan
from nixl_kv.geometry.staging import (
    LEAST_CHUNK,
    LEAST_CHUNKS,
    Crop,
    Ring,
    crops,
    entry_bytes,
    may_take,
    most_slots,
    split_tokens,
    staged_entries,
    staged_layout,
    staged_table,
)
from nixl_kv.protocol import events, messages
from nixl_kv.reading.staged.copier import PreparedCopy, Staging
from nixl_kv.transport.base import ListHandle, PeerName, Transport

STOPPED: Final = "it is not wanted any more"


class State(enum.Enum):
    """Of a chunk that is under way."""

    ASKED = enum.auto()
    PACKED = enum.auto()
    READING = enum.auto()
    SCATTERING = enum.auto()


class FreeSlots:
    """The slots of decode's ring that nothing writes into."""

    def __init__(self, ring: Ring) -> None:
        """All of them."""
        self.ring = ring
        self._free = deque(range(ring.num_slots))

    def __len__(self) -> int:
        return len(self._free)

    def pop(self, held: int) -> int | None:
        """One of them, no longer free, for a read that has so many; None if it gets none."""
        return self._free.popleft() if may_take(held, len(self._free)) else None

    def add(self, slot: int) -> None:
        """Nothing writes into it any more."""
        self._free.append(slot)


class HeldSlots:
    """The slots of decode's ring that one read has."""

    def __init__(self, free: FreeSlots) -> None:
        """None yet."""
        self._free = free
        self._num_held = 0
        self._spare: int | None = None  # the only one it has, while nothing is in it

    def open(self) -> bool:
        """Whether it has one, or gets one now."""
        if not self._num_held:
            self._spare = self._free.pop(0)
            self._num_held = int(self._spare is not None)
        return self._num_held > 0

    def take(self) -> int | None:
        """One with nothing in it, if it has or gets one."""
        slot, self._spare = self._spare, None
        if slot is None:
            slot = self._free.pop(self._num_held)
            self._num_held += slot is not None
        return slot

    def put(self, slot: int) -> None:
        """Nothing writes into this one any more. It goes, unless it is the only one."""
        if self._num_held == 1:
            self._spare = slot
        else:
            self._num_held -= 1
            self._free.add(slot)

    def close(self) -> None:
        """No more is needed than what is written into."""
        if self._spare is not None:
            self._num_held = 0
            self._free.add(self._spare)
            self._spare = None


@dataclass(frozen=True)
class StagedCrop:
    """How one crop of a prefill rank's cache comes here."""

    number: int  # of the rank's crops
    crop: Crop
    groups: tuple[Group, Group]
    entry_bytes: int
    max_entries: int  # of a chunk
    least_entries: int  # likewise, where there are more
    rows: tuple[Rows, Rows]  # of the entries in both rings
    scatter: Plan
    prepared: PreparedCopy
    direct: Plan  # the part of the rank's plan that reads just this
    layers: tuple[messages.LayerHeads, ...]  # as prefill is asked for them


@dataclass
class _Chunk:
    number: int
    crop: StagedCrop
    tokens: range
    entries: range
    state: State = State.ASKED
    slot: int | None = None  # of this side's ring
    packed_in: int = 0  # of prefill's
    handle: Any = None  # of its READ, then of its copy


@dataclass(frozen=True)
class StagedPlan:
    """How a prefill rank's cache comes here, for any agent."""

    staging: Staging
    ring: Ring  # prefill's
    crops: tuple[StagedCrop, ...]


@dataclass(frozen=True)
class StagedRank:
    """One rank of a peer that packs, for one agent. Lists are (local, remote)."""

    planned: StagedPlan
    slots: FreeSlots
    transport: Transport
    lists: tuple[tuple[ListHandle, ListHandle], ...]  # of each crop
    direct: tuple[ListHandle, ListHandle]  # of what is read as it is


def plan_staged(
    staging: Staging,
    layout: CacheLayout,
    remote: messages.RankDescription,
    share: Share,
    direct: Plan,
) -> StagedPlan:
    """Plan how a rank's cache is packed and scattered: some milliseconds; runs on any thread.

    `direct` is how the same share is read as it is.

    Raises:
        TransportError: if something of it is too large, or the rank packs nothing.
    """
    if remote.ring is None:
        raise TransportError("it packs nothing")
    span, memory, device = staging.ring.span, staging.memory, staging.device
    found: list[StagedCrop] = []
    try:
        ring = Ring(Span(remote.ring.address, remote.ring.length), remote.ring.num_slots)
        for crop in crops(layout, remote.layout, share):
            groups = layout.groups[crop.groups[0]], remote.layout.groups[crop.groups[1]]
            staged = staged_layout(groups[1], crop.share, span, memory=memory, device=device)
            size, scatter = entry_bytes(staged), plan(layout, staged, crop.share)
            rows = (
                _entry_rows(staging.ring, size, device),
                _entry_rows(ring, size, remote.layout.device),
            )
            paged = tuple(each for each in direct.paged_rows if each.groups == crop.groups)
            found.append(
                StagedCrop(
                    len(found),
                    crop,
                    groups,
                    size,
                    min(ring.capacity(size), staging.ring.capacity(size)),
                    _least_entries(groups, size, memory),
                    rows,
                    scatter,
                    staging.copier.prepare(scatter),
                    replace(direct, paged_rows=paged),
                    tuple(
                        messages.LayerHeads(layer=layer, first=heads[0], end=heads[1])
                        for layer, heads in crop.share.items()
                    ),
                )
            )
    except (IncompatiblePeer, ValueError) as error:
        raise TransportError(f"what it packs cannot be used: {error}") from error
    return StagedPlan(staging, ring, tuple(found))


def prepare_staged(
    planned: StagedPlan,
    slots: FreeSlots,
    transport: Transport,
    peer: PeerName,
    direct: tuple[ListHandle, ListHandle],
) -> StagedRank:
    """Make the lists of one agent; `direct` are those of the rank's own plan.

    Raises:
        TransportError: if one cannot be made.
    """
    memory = planned.staging.memory
    lists = [
        (transport.prepare(here, memory, None), transport.prepare(there, memory, peer))
        for here, there in (crop.rows for crop in planned.crops)
    ]
    return StagedRank(planned, slots, transport, tuple(lists), direct)


def _least_entries(groups: tuple[Group, Group], size: int, memory: Memory) -> int:
    """Fewer are not worth a chunk; and it has to have room for one local entry."""
    mine, theirs = (group.entry_size for group in groups)
    return max(LEAST_CHUNK[memory] // size, -(-mine // theirs) + 1)


def _entry_rows(ring: Ring, size: int, device: int) -> Rows:
    """One row, a piece for each entry.

    Raises:
        ValueError: if there are more than can be numbered.
    """
    count = ring.span.length // size
    if count > MAX_INDEX:
        raise ValueError(f"a ring has {count} entries; allowed: at most {MAX_INDEX}")
    return np.array([[ring.span.address, size, device, size, count]], dtype=np.uint64)


class StagedRead:
    """One load's read of one rank. See the module's head."""

    def __init__(self, rank: StagedRank, action: events.StartRead) -> None:
        """Cut it into chunks; nothing is asked for yet.

        Raises:
            ValueError: if it cannot be cut so that chunks fit into slots.
        """
        self.failure: str | None = None
        self.is_lost = False  # the peer, since a read of it has ended badly
        self._is_stopped = False
        self._is_direct = False  # nothing more is asked for
        self._rank = rank
        self._action = action
        self._load = action.load
        self._tables = action.grant.tables
        self._slots = HeldSlots(rank.slots)
        self._depth = self._most = most_slots(rank.planned.ring.num_slots)  # of prefill's ring
        self._num_packed = 0
        self._waiting = deque(
            _Chunk(number, crop, tokens, entries)
            for number, (crop, tokens, entries) in enumerate(self._cut())
        )
        self._num_chunks = len(self._waiting)  # those that were counted anew, too
        self._active: dict[int, _Chunk] = {}  # from when they are asked for, or read directly

    def advance(self) -> list[events.DataEvent]:
        """Look after what is under way, and ask for more.

        Raises:
            TransportError: if it cannot be told what becomes of a read.
        """
        for chunk in list(self._active.values()):
            if chunk.number in self._active:  # a failure of one ends others
                self._poll(chunk)
        if self._is_stopped:
            return []
        wanted = self._ask()
        if not self._active:
            self._read_directly()
        if not wanted:
            return []
        holds = tuple(chunk.number for chunk in self._on_prefill)
        return [events.ChunksWanted(self._load.request, self._action.rank, wanted, holds)]

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it is under way, and nothing will be."""
        if any(chunk.state in _WRITING for chunk in self._active.values()):
            return False
        return self._is_stopped or not (self._active or self._waiting)

    def on_packed(self, action: events.ReadChunk) -> None:
        """A chunk can be read, or will not be packed."""
        chunk = self._active.get(action.chunk)
        if chunk is None or chunk.state is not State.ASKED:
            return
        if action.slot is not None:
            chunk.state, chunk.packed_in = State.PACKED, action.slot
            self._num_packed += 1
            if not self._num_packed % max(1, self._depth):  # others may have left prefill's ring
                self._depth = min(self._depth + 1, self._most)
            return
        self._end(chunk)
        # Its next number is another: an answer to what was asked before may still be on its way,
        # with a slot that is somebody else's by then.
        chunk.number, self._num_chunks = self._num_chunks, self._num_chunks + 1
        self._waiting.appendleft(chunk)
        self._depth = len(self._on_prefill)
        self._is_direct |= not self._active or self._num_chunks == messages.MAX_CHUNKS

    def stop(self, why: str = STOPPED) -> None:
        """Ask for no more; it ends when what is under way has ended."""
        self._is_stopped, self.failure = True, self.failure or why
        for chunk in list(self._active.values()):
            if chunk.state not in _WRITING:
                self._end(chunk)
        self._slots.close()

    def end_copies(self) -> None:
        """Return when no copy writes into the cache any more; may run on any thread."""
        for chunk in self._active.values():
            if chunk.state is State.SCATTERING:
                self._rank.planned.staging.copier.end(chunk.handle)

    def release(self) -> None:
        """Nothing writes any more, whatever became of it."""
        for chunk in list(self._active.values()):
            self._end(chunk)
        self._slots.close()

    # --- chunks

    @property
    def _on_prefill(self) -> list[_Chunk]:
        """Those that have a slot of prefill's ring, or have asked for one."""
        return [chunk for chunk in self._active.values() if chunk.state in _ON_PREFILL]

    def _cut(self) -> "list[tuple[StagedCrop, range, range]]":
        cut = []
        for crop in self._rank.planned.crops:
            mine, theirs = crop.crop.groups
            tokens = range(self._load.begin, self._load.end)
            num_entries = len(staged_entries(self._tables[theirs], crop.groups[1], tokens))
            most = min(crop.max_entries, max(crop.least_entries, -(-num_entries // LEAST_CHUNKS)))
            for part in split_tokens(crop.groups, self._load.tables[mine], tokens, most):
                entries = staged_entries(self._tables[theirs], crop.groups[1], part)
                if len(entries):
                    cut.append((crop, part, entries))
        return cut

    def _ask(self) -> tuple[events.Chunk, ...]:
        """Those whose turn it is, if what is packed can be fetched."""
        wanted: list[events.Chunk] = []
        is_backed_up = any(chunk.state is State.PACKED for chunk in self._active.values())
        if is_backed_up or self._is_direct or not self._waiting or not self._slots.open():
            return ()
        for _ in range(min(self._depth - len(self._on_prefill), len(self._waiting))):
            chunk = self._waiting.popleft()
            chunk.state = State.ASKED
            self._active[chunk.number] = chunk
            wanted.append(
                events.Chunk(chunk.number, chunk.tokens.start, chunk.tokens.stop, chunk.crop.layers)
            )
        return tuple(wanted)

    def _read_directly(self) -> None:
        """What is left; nothing of it is under way."""
        self._is_direct = True
        self._slots.close()
        while self._waiting:
            chunk = self._waiting.popleft()
            direct = chunk.crop.direct
            try:
                pieces = direct.pieces(self._load.tables, self._tables, chunk.tokens)
                indices = direct.indices(pieces)
                if len(indices[0]):
                    chunk.handle = self._rank.transport.read(*self._rank.direct, indices)
                    chunk.state = State.READING
                    self._active[chunk.number] = chunk
            except (TransportError, ValueError) as error:
                self.is_lost |= isinstance(error, PeerLost)
                self.stop(str(error))
                return

    def _fetch(self, chunk: _Chunk) -> None:
        """Read what is packed, if there is a slot for it."""
        if chunk.slot is None:  # else the thread has died here
            chunk.slot = self._slots.take()
        if chunk.slot is None:
            return
        try:
            chunk.handle, chunk.state = self._post(chunk, chunk.slot), State.READING
        except TransportError as error:
            self.is_lost |= isinstance(error, PeerLost)
            self.stop(str(error))

    def _post(self, chunk: _Chunk, slot: int) -> Any:
        """One READ, from a slot of prefill's ring into this one of this side's."""
        size, count = chunk.crop.entry_bytes, len(chunk.entries)
        if chunk.packed_in >= self._rank.planned.ring.num_slots:
            raise TransportError(f"prefill has no slot {chunk.packed_in}")
        starts = (
            self._rank.planned.staging.ring.first_entry(slot, size),
            self._rank.planned.ring.first_entry(chunk.packed_in, size),
        )
        local, remote = (np.arange(start, start + count, dtype=np.int32) for start in starts)
        return self._rank.transport.read(*self._rank.lists[chunk.crop.number], (local, remote))

    def _poll(self, chunk: _Chunk) -> None:
        if chunk.state is State.PACKED:
            self._fetch(chunk)
        elif chunk.state is State.READING:
            try:
                if not self._rank.transport.poll(chunk.handle):
                    return
            except PeerLost as error:
                self._end(chunk, str(error))
                self.is_lost = True
                return
            if chunk.slot is None or self._is_stopped:
                self._end(chunk)
            else:
                self._scatter(chunk)
        elif chunk.state is State.SCATTERING:
            try:
                if self._rank.planned.staging.copier.poll(chunk.handle):
                    self._end(chunk)
            except TransportError as error:
                self._end(chunk, str(error))

    def _scatter(self, chunk: _Chunk) -> None:
        """All of it has landed in the slot: copy it from there into the blocks."""
        crop, slot = chunk.crop, chunk.slot or 0
        first = self._rank.planned.staging.ring.first_entry(slot, crop.entry_bytes)
        table = staged_table(self._tables[crop.crop.groups[1]], chunk.entries, first)
        try:
            pieces = crop.scatter.pieces(self._load.tables, [table], chunk.tokens)
            chunk.handle = self._rank.planned.staging.copier.start(crop.prepared, pieces)
            chunk.state = State.SCATTERING
        except (TransportError, ValueError) as error:
            self._end(chunk, str(error))

    def _end(self, chunk: _Chunk, failure: str | None = None) -> None:
        """It is not under way any more."""
        del self._active[chunk.number]
        if chunk.slot is not None:
            self._slots.put(chunk.slot)
            chunk.slot = None
        if self._is_stopped or not (self._active or self._waiting):
            self._slots.close()
        self._depth = max(1, self._depth)
        if failure is not None:
            self.stop(failure)


_ON_PREFILL: Final = (State.ASKED, State.PACKED, State.READING)
_WRITING: Final = (State.READING, State.SCATTERING)
