"""Staged reads: prefill packs short runs into a ring, NIXL reads slots of it, decode scatters them.

`StagedPath` and `StagedOp` are decode's half, `PackQueue` is prefill's.

Decode cuts a read into chunks that fit into a slot of either ring. It requests each chunk, and
prefill packs the chunk into a slot of its ring. Decode reads that slot into a slot of its own ring
and copies it from there into the cache. Several chunks of a read are in progress at a time.

A read holds one slot of decode's ring from its first request to its last copy. So decode can always
read a packed chunk, and slots of prefill's ring always become free. On both sides reads wait for
free slots in order. Decode reads chunks directly that prefill cannot pack.

NIXL writes into a slot and a copy writes into the cache even after the load was cancelled. So a
slot is free, and the operation has ended, only when both have ended.

On prefill, `protocol` assigns the slots, so the ring bounds the chunks in progress. A background
thread plans each crop once.
"""

import enum
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np

from nixl_kv.errors import (
    REQUEST_LINES,
    IncompatiblePeer,
    LimitedLog,
    NixlKVError,
    PeerLost,
    TransportError,
    get_logger,
    shown_id,
)
from nixl_kv.feature import Worker
from nixl_kv.geometry.layout import CacheLayout, Group, Memory, Span
from nixl_kv.geometry.plan import MAX_INDEX, Plan, Rows, Share, plan
from nixl_kv.protocol import events, messages
from nixl_kv.reading.agent import READING_PAUSE_S
from nixl_kv.reading.paths import STOPPED, DirectOp, PreparedRank, Read, ReadOp, ReadPath, Source
from nixl_kv.reading.staged.copier import Copy, PreparedCopy, Staging
from nixl_kv.reading.staged.layout import (
    LEAST_CHUNK,
    LEAST_CHUNKS,
    Crop,
    Ring,
    crops,
    entry_bytes,
    split_tokens,
    staged_entries,
    staged_table,
)
from nixl_kv.reading.staged.ring import PackedChunk, may_take, most_slots
from nixl_kv.transport.base import ListHandle

logger = get_logger(__name__)

# Bytes per run from which a direct read takes less time than a staged one. Between two H200 a
# descriptor costs 3.3 us, and a staged read moves 40 to 58 GB/s with 256 MiB of staging memory.
# Both are equal at 130 to 190 KB. In host memory, 1.5 us per run at 8 GB/s equals 0.3 GB/s at 470
# bytes. See docs/benchmarks.md.
LONG_RUN: Final[dict[Memory, int]] = {"VRAM": 128 << 10, "DRAM": 512}
# The same over TCP, where 129,024 runs of a host cache took 58 s directly and 0.2 s staged.
LONG_TCP_RUN: Final = 64 << 10
# Up to this number of runs, a direct read ends before a staged one has its first byte. That takes
# 0.5 ms between GPUs, and 2 ms in host memory.
FEW_RUNS: Final[dict[Memory, int]] = {"VRAM": 150, "DRAM": 1300}


class State(enum.Enum):
    """States of a chunk in progress."""

    ASKED = enum.auto()  # prefill packs it, or waits for a slot to do so
    PACKED = enum.auto()  # waits for a slot of decode's ring
    READING = enum.auto()  # NIXL reads prefill's slot
    SCATTERING = enum.auto()  # a copy moves it into the cache


_ON_PREFILL: Final = (State.ASKED, State.PACKED, State.READING)
_WRITING: Final = (State.READING, State.SCATTERING)


class HeldSlots:
    """The slots of decode's ring that one read holds. Nothing writes into those in `free`."""

    def __init__(self, free: deque[int]) -> None:
        self._free = free
        self._num_held = 0
        self._spare: int | None = None  # the last one that it holds, while it is empty

    def open(self) -> bool:
        if not self._num_held:
            self._spare = self.take()
        return self._num_held > 0

    def take(self) -> int | None:
        slot, self._spare = self._spare, None
        if slot is None and may_take(self._num_held, len(self._free)):
            slot = self._free.popleft()
            self._num_held += 1
        return slot

    def put(self, slot: int) -> None:
        """Return a slot, unless it is the last one. Nothing writes into it."""
        if self._num_held == 1:
            self._spare = slot
        else:
            self._num_held -= 1
            self._free.append(slot)

    def close(self) -> None:
        if self._spare is not None:
            self._num_held = 0
            self._free.append(self._spare)
            self._spare = None


@dataclass(frozen=True)
class _Crop:
    """How decode reads some layers and heads of a prefill rank's cache."""

    number: int  # among the rank's crops
    crop: Crop
    groups: tuple[Group, Group]
    entry_bytes: int
    max_entries: int  # of a chunk
    least_entries: int  # of a chunk, unless fewer are left
    rows: tuple[Rows, Rows]  # of the entries in both rings
    scatter: Plan
    prepared: PreparedCopy
    direct: Plan  # the part of the rank's plan that reads this crop
    layers: tuple[messages.LayerHeads, ...]  # as a request names them


@dataclass
class _Chunk:
    number: int
    crop: _Crop
    tokens: range
    entries: range
    state: State = State.ASKED
    slot: int | None = None  # of decode's ring
    packed_in: int = 0  # of prefill's
    handle: Any = None  # of the READ, later of the copy


class StagedRank(PreparedRank):
    """A remote rank that packs, for one agent. `ring` is prefill's."""

    def __init__(self, ring: Ring, rank_crops: tuple[_Crop, ...]) -> None:
        self.ring = ring
        self.crops = rank_crops
        self._lists: list[tuple[ListHandle, ListHandle]] | None = None

    def lists(self, source: Source, memory: Memory) -> list[tuple[ListHandle, ListHandle]]:
        """Lists of the entries in both rings, per crop: (local, remote)."""
        if self._lists is None:
            prepare = source.transport.prepare
            self._lists = [
                (prepare(here, memory, None), prepare(there, memory, source.name))
                for here, there in (crop.rows for crop in self.crops)
            ]
        return self._lists


class StagedPath(ReadPath):
    """Shared by all agents of a rank. `is_forced`: even where direct reads are faster."""

    def __init__(self, layout: CacheLayout, staging: Staging, *, is_forced: bool = False) -> None:
        self.staging = staging
        self.slots = deque(range(staging.ring.num_slots))  # free ones
        self._next_chunk = 0
        self._layout = layout
        self._is_forced = is_forced
        self._log = LimitedLog(logger, time.monotonic, lines=REQUEST_LINES)

    def number_chunks(self, count: int) -> range:
        """Numbers that no earlier read uses: a load may have several, of parts of a prompt.

        Otherwise prefill might answer with a former part's chunk, after a lost message.
        """
        if self._next_chunk + count > messages.MAX_CHUNKS:
            self._next_chunk = 0
        first, self._next_chunk = self._next_chunk, self._next_chunk + count
        return range(first, first + count)

    def prepare(
        self, description: messages.RankDescription, share: Share, plan: Plan
    ) -> StagedRank | None:
        if description.ring is None:
            return None
        ring = description.ring
        try:
            theirs = Ring(Span(ring.address, ring.length), ring.num_slots)
            return StagedRank(theirs, tuple(self._crops(description.layout, theirs, share, plan)))
        except (IncompatiblePeer, TransportError, ValueError) as error:
            logger.info("cannot stage reads of %s: %s", description.endpoint, error)
            return None

    def start(self, prepared: StagedRank, read: Read) -> ReadOp | None:
        memory, is_tcp = self._layout.memory, read.source.is_tcp
        long_run = max(LONG_RUN[memory], LONG_TCP_RUN if is_tcp else 0)
        are_few = read.num_runs <= FEW_RUNS[memory] and not is_tcp
        if not self._is_forced and (are_few or read.num_bytes >= read.num_runs * long_run):
            return None
        try:
            return StagedOp(self, prepared, read)
        except (TransportError, ValueError) as error:
            request = shown_id(read.action.load.request)
            self._log.info("cannot stage the read of request %s: %s", request, error)
            return None

    def _crops(self, remote: CacheLayout, ring: Ring, share: Share, direct: Plan) -> list[_Crop]:
        """Plan how each crop is packed and scattered; takes milliseconds."""
        layout, staging, found = self._layout, self.staging, list[_Crop]()
        for crop in crops(layout, remote, share):
            groups = layout.groups[crop.groups[0]], remote.groups[crop.groups[1]]
            staged = staging.layout(groups[1], crop.share)
            size, scatter = entry_bytes(staged), plan(layout, staged, crop.share)
            layers = tuple(
                messages.LayerHeads(layer=layer, first=heads[0], end=heads[1])
                for layer, heads in crop.share.items()
            )
            paged = tuple(each for each in direct.paged_rows if each.groups == crop.groups)
            per_local = -(-groups[0].entry_size // groups[1].entry_size)  # remote entries
            found.append(
                _Crop(
                    number=len(found),
                    crop=crop,
                    groups=groups,
                    entry_bytes=size,
                    max_entries=min(ring.capacity(size), staging.ring.capacity(size)),
                    least_entries=max(LEAST_CHUNK[staging.memory] // size, per_local + 1),
                    rows=(
                        _entry_rows(staging.ring, size, staging.device),
                        _entry_rows(ring, size, remote.device),
                    ),
                    scatter=scatter,
                    prepared=staging.copier.prepare(scatter),
                    direct=replace(direct, paged_rows=paged),
                    layers=layers,
                )
            )
        return found


def _entry_rows(ring: Ring, size: int, device: int) -> Rows:
    """One row, with a piece per entry."""
    count = ring.span.length // size
    if count > MAX_INDEX:
        raise ValueError(f"a ring has {count} entries; allowed: at most {MAX_INDEX}")
    return np.array([[ring.span.address, size, device, size, count]], dtype=np.uint64)


class StagedOp(ReadOp):
    """One load's staged read of one rank."""

    path = "staged"

    def __init__(self, path: StagedPath, rank: StagedRank, read: Read) -> None:
        """Cut the read into chunks. The first `poll` requests some of them."""
        self._staging = path.staging
        self._rank = rank
        self._read = read
        self._load = read.action.load
        self._tables = read.action.grant.tables
        self._lists = rank.lists(read.source, path.staging.memory)
        self._slots = HeldSlots(path.slots)
        self._most_asked = most_slots(rank.ring.num_slots)
        cut = self._cut()
        if len(cut) > messages.MAX_CHUNKS:
            raise ValueError(f"it has {len(cut)} chunks; allowed: at most {messages.MAX_CHUNKS}")
        self._waiting = deque(
            _Chunk(number, crop, tokens, entries)
            for number, (crop, tokens, entries) in zip(
                path.number_chunks(len(cut)), cut, strict=True
            )
        )
        self._active: dict[int, _Chunk] = {}  # from the request to the end of the copy
        self._direct: list[DirectOp] = []  # for chunks that prefill cannot pack
        self._is_stopped = False
        self._news: list[events.ReadEvent] = []

    @property
    def has_ended(self) -> bool:  # type: ignore[override]
        if any(chunk.state in _WRITING for chunk in self._active.values()) or self._direct:
            return False
        return self._is_stopped or not (self._active or self._waiting)

    def poll(self) -> list[events.ReadEvent]:
        for chunk in list(self._active.values()):
            if chunk.number in self._active:  # the failure of one chunk ends others
                self._poll(chunk)
        for op in list(self._direct):
            self._poll_direct(op)
        if not self._is_stopped:
            self._ask()
        news, self._news = self._news, []
        return news

    def on_message(self, message: PackedChunk) -> None:
        """Prefill has packed a chunk, or cannot pack it."""
        chunk = self._active.get(message.number)
        if chunk is None or chunk.state is not State.ASKED:
            return
        if message.slot is not None:
            chunk.state, chunk.packed_in = State.PACKED, message.slot
            return
        self._end(chunk)
        for each in (chunk, *self._waiting):  # nor can it pack the others
            self._read_directly(each)
        self._waiting.clear()

    def stop(self) -> None:
        self._stop(STOPPED)

    def end_copies(self) -> None:
        for chunk in self._active.values():
            if chunk.state is State.SCATTERING:
                self._staging.copier.end(chunk.handle)

    def release(self) -> None:
        for chunk in list(self._active.values()):
            self._end(chunk)
        self._slots.close()

    # --- chunks

    def _cut(self) -> list[tuple[_Crop, range, range]]:
        cut = []
        for crop in self._rank.crops:
            mine, theirs = crop.crop.groups
            tokens = range(self._load.begin, self._load.end)
            num_entries = len(staged_entries(self._tables[theirs], crop.groups[1], tokens))
            most = min(crop.max_entries, max(crop.least_entries, -(-num_entries // LEAST_CHUNKS)))
            for part in split_tokens(crop.groups, self._load.tables[mine], tokens, most):
                entries = staged_entries(self._tables[theirs], crop.groups[1], part)
                if len(entries):
                    cut.append((crop, part, entries))
        return cut

    def _ask(self) -> None:
        """Request the next chunks, unless packed ones already wait for slots of decode's ring."""
        is_backed_up = any(chunk.state is State.PACKED for chunk in self._active.values())
        if is_backed_up or not self._waiting or not self._slots.open():
            return
        num_asked = sum(chunk.state in _ON_PREFILL for chunk in self._active.values())
        wanted: list[_Chunk] = []
        for _ in range(min(self._most_asked - num_asked, len(self._waiting))):
            chunk = self._waiting.popleft()
            self._active[chunk.number] = chunk
            wanted.append(chunk)
        if wanted:
            self._tell(wanted)

    def _tell(self, chunks: Sequence[_Chunk] = ()) -> None:
        """Report progress and request chunks.

        Prefill frees the slots of chunks that `holds` lacks.
        """
        asked = tuple(
            events.Chunk(chunk.number, chunk.tokens.start, chunk.tokens.stop, chunk.crop.layers)
            for chunk in chunks
        )
        active = self._active.values()
        holds = tuple([chunk.number for chunk in active if chunk.state in _ON_PREFILL])
        self._news.append(
            events.ChunksWanted(self._load.request, self._read.action.rank, asked, holds)
        )

    def _poll(self, chunk: _Chunk) -> None:
        if chunk.state is State.PACKED:
            self._fetch(chunk)
        elif chunk.state is State.READING:
            try:
                if not self._read.source.transport.poll(chunk.handle):
                    return
            except PeerLost as error:
                self._end(chunk)
                self._stop(error)
                return
            self._on_landed(chunk)
        elif chunk.state is State.SCATTERING:
            try:
                if self._staging.copier.poll(chunk.handle):
                    self._end(chunk)
                    self._tell()
            except TransportError as error:
                self._end(chunk)
                self._stop(error)

    def _fetch(self, chunk: _Chunk) -> None:
        """Read prefill's slot, if decode's ring has a free one."""
        if chunk.slot is None:  # else the thread died here and was restarted
            chunk.slot = self._slots.take()
        if chunk.slot is None:
            return
        try:
            chunk.handle, chunk.state = self._post(chunk, chunk.slot), State.READING
        except TransportError as error:
            self._stop(error)

    def _post(self, chunk: _Chunk, slot: int) -> Any:
        """Post one READ from a slot of prefill's ring into a slot of decode's."""
        size, count = chunk.crop.entry_bytes, len(chunk.entries)
        if chunk.packed_in >= self._rank.ring.num_slots:
            raise TransportError(
                f"prefill packed into slot {chunk.packed_in}; its ring has "
                f"{self._rank.ring.num_slots} slots"
            )
        starts = (
            self._staging.ring.first_entry(slot, size),
            self._rank.ring.first_entry(chunk.packed_in, size),
        )
        local, remote = (np.arange(start, start + count, dtype=np.int32) for start in starts)
        return self._read.source.transport.read(*self._lists[chunk.crop.number], (local, remote))

    def _on_landed(self, chunk: _Chunk) -> None:
        """Copy a slot that has landed into the cache, and give prefill's slot back."""
        if chunk.slot is None or self._is_stopped:
            self._end(chunk)
            return
        crop = chunk.crop
        first = self._staging.ring.first_entry(chunk.slot, crop.entry_bytes)
        table = staged_table(self._tables[crop.crop.groups[1]], chunk.entries, first)
        try:
            pieces = crop.scatter.pieces(self._load.tables, [table], chunk.tokens)
            chunk.handle = self._staging.copier.start(crop.prepared, pieces)
            chunk.state = State.SCATTERING
        except (TransportError, ValueError) as error:
            self._end(chunk)
            self._stop(error)
            return
        # The next request would tell prefill that its slot is free. After the last one, tell it
        # with a request for the chunk that has landed: `holds` lacks it, so prefill packs nothing.
        self._tell(() if self._waiting else [chunk])

    # --- chunks that prefill cannot pack

    def _read_directly(self, chunk: _Chunk) -> None:
        direct = chunk.crop.direct
        try:
            pieces = direct.pieces(self._load.tables, self._tables, chunk.tokens)
            part = self._read.part(direct, pieces)
            if part.num_bytes:
                self._direct.append(DirectOp(part, self._staging.memory, plan=direct))
        except ValueError as error:
            self._stop(error)

    def _poll_direct(self, op: DirectOp) -> None:
        if op.poll():
            self._tell()
        if not op.has_ended:
            return
        self._direct.remove(op)
        if op.failure is None:
            self.num_direct_bytes += op.num_bytes
            self._tell()
            return
        self.is_connection_lost |= op.is_connection_lost
        self._stop(op.failure)

    # --- the end

    def _stop(self, why: str | Exception) -> None:
        """Request nothing more. The operation ends when its reads and copies have ended."""
        self.is_connection_lost |= isinstance(why, PeerLost)
        self._is_stopped, self.failure = True, self.failure or str(why)
        for chunk in list(self._active.values()):
            if chunk.state not in _WRITING:
                self._end(chunk)
        for op in self._direct:
            op.stop()
        self._slots.close()

    def _end(self, chunk: _Chunk) -> None:
        del self._active[chunk.number]
        if chunk.slot is not None:
            self._slots.put(chunk.slot)
            chunk.slot = None
        if self._is_stopped or not (self._active or self._waiting):
            self._slots.close()


# --- prefill's half

# Plans that are kept. A decode engine uses one per pair of ranks and groups.
MAX_CROPS: Final = 256

_Layers: TypeAlias = tuple[messages.LayerHeads, ...]


@dataclass(frozen=True)
class _PackCrop:
    """How this rank packs one share of a group."""

    number: int  # the group's
    group: Group
    entry_bytes: int
    plan: Plan
    prepared: PreparedCopy


@dataclass(eq=False)
class _Pack:
    action: events.PackChunk
    copy: Copy = None  # set when its crop is planned


class PackQueue(Worker):
    """The chunks that prefill packs now; `RingPart` assigns their slots."""

    name = "packs"
    actions = frozenset({events.PackChunk})

    def __init__(self, layout: CacheLayout, staging: Staging, background: Executor) -> None:
        self._layout = layout
        self._staging = staging
        self._background = background
        self._crops: OrderedDict[_Layers, Future[_PackCrop]] = (
            OrderedDict()
        )  # also those that failed
        self._packs: list[_Pack] = []

    def __len__(self) -> int:
        return len(self._packs)

    @property
    def wait_s(self) -> float | None:
        return READING_PAUSE_S if self._packs else None

    def writing(self) -> list[int]:
        """The slots into which copies are in progress."""
        return [pack.action.slot for pack in self._packs]

    def add(self, action: events.PackChunk) -> None:  # type: ignore[override] # see `actions`
        self._packs.append(_Pack(action))

    def poll(self) -> list[events.ChunkPacked]:
        ended: list[events.ChunkPacked] = []
        for pack in list(self._packs):
            action, refusal = pack.action, None
            try:
                if not self._has_ended(pack):
                    continue
            except (NixlKVError, ValueError) as error:
                refusal = str(error)
            self._packs.remove(pack)
            request = action.pack_request
            ended.append(events.ChunkPacked(action.route, request, action.slot, refusal))
        return ended

    def clear(self) -> None:
        """Copies in progress go on."""

    def close(self) -> None:
        for pack in self._packs:
            if pack.copy is not None:
                self._staging.copier.end(pack.copy)
        self._background.shutdown(wait=False)

    def _has_ended(self, pack: _Pack) -> bool:
        if pack.copy is None:
            planning = self._crop(pack.action.pack_request.layers)
            if not planning.done():
                return False
            failure = planning.exception()  # of the background thread; it fails the chunk alone
            if failure is not None:
                raise TransportError(str(failure) or type(failure).__name__) from failure
            self._start(pack, planning.result())
        return self._staging.copier.poll(pack.copy)

    def _start(self, pack: _Pack, crop: _PackCrop) -> None:
        action, request, ring = pack.action, pack.action.pack_request, self._staging.ring
        table = action.tables[crop.number]
        entries = staged_entries(table, crop.group, range(request.begin, request.end))
        capacity = ring.capacity(crop.entry_bytes)
        if not 0 < len(entries) <= capacity:
            raise ValueError(f"a chunk has {len(entries)} entries; allowed: 1 to {capacity}")
        first = ring.first_entry(action.slot, crop.entry_bytes)
        size = crop.group.entry_size
        pieces = crop.plan.pieces(
            [staged_table(table, entries, first)],
            action.tables,
            range(entries.start * size, entries.stop * size),
        )
        pack.copy = self._staging.copier.start(crop.prepared, pieces)

    def _crop(self, layers: _Layers) -> "Future[_PackCrop]":
        """How to pack these heads. A refusal is repeated each time."""
        if layers not in self._crops:
            try:
                self._crops[layers] = self._background.submit(self._plan, layers)
            except RuntimeError as error:  # the process exits
                raise TransportError(f"planning a chunk: {error}") from error
            if len(self._crops) > MAX_CROPS:
                self._crops.popitem(last=False)
        self._crops.move_to_end(layers)
        return self._crops[layers]

    def _plan(self, layers: _Layers) -> _PackCrop:
        """Plan a crop; on a background thread."""
        layer, wanted = layers[0].layer, {each.layer: (each.first, each.end) for each in layers}
        if len(wanted) < len(layers):
            raise ValueError("a chunk names a layer twice; allowed: once")
        regions = self._layout.regions
        if layer not in regions:
            raise ValueError(f"layer {layer!r} is not on this rank")
        number, _ = regions[layer]
        group = self._layout.groups[number]
        staged = self._staging.layout(group, wanted)
        planned = plan(staged, self._layout, wanted)
        prepared = self._staging.copier.prepare(planned)
        return _PackCrop(number, group, entry_bytes(staged), planned, prepared)
