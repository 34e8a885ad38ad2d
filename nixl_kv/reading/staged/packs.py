"""Packing on prefill: copies chunks of granted blocks into slots of this rank's ring.

`protocol` assigns the slots, so the ring bounds the chunks in progress. If this rank cannot pack a
chunk, its reader reads it directly. A background thread plans each crop once.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final, TypeAlias

from nixl_kv.errors import NixlKVError, TransportError
from nixl_kv.geometry.layout import CacheLayout, Group
from nixl_kv.geometry.plan import Plan, plan
from nixl_kv.protocol import events, messages
from nixl_kv.reading.staged.copier import Copy, PreparedCopy, Staging
from nixl_kv.reading.staged.layout import entry_bytes, staged_entries, staged_table

# Plans that are kept. A decode engine uses one per pair of ranks and groups.
MAX_CROPS: Final = 256

_Layers: TypeAlias = tuple[messages.LayerHeads, ...]


@dataclass(frozen=True)
class _Crop:
    """How this rank packs one share of a group."""

    number: int  # the group's
    group: Group
    entry_bytes: int
    plan: Plan
    prepared: PreparedCopy


@dataclass(eq=False)
class _Pack:
    action: events.PackChunk
    started_at: float
    copy: Copy = None  # set when its crop is planned
    num_bytes: int = 0


class PackQueue:
    """Chunks in progress. Chunks, their bytes and their seconds are added to `counts`."""

    def __init__(
        self,
        layout: CacheLayout,
        staging: Staging,
        background: Executor,
        counts: defaultdict[str, float],
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._staging = staging
        self._background = background
        self._counts = counts
        self._clock = clock
        self._crops: OrderedDict[_Layers, Future[_Crop]] = OrderedDict()  # also those that failed
        self._packs: list[_Pack] = []

    def __len__(self) -> int:
        return len(self._packs)

    @property
    def writing(self) -> list[int]:
        return [pack.action.slot for pack in self._packs]

    def add(self, action: events.PackChunk) -> None:
        self._packs.append(_Pack(action, self._clock()))

    def poll(self) -> list[events.ChunkPacked]:
        ended: list[events.ChunkPacked] = []
        for pack in list(self._packs):
            action, refusal = pack.action, None
            try:
                if not self._has_ended(pack):
                    continue
                self._counts["chunks_packed"] += 1
                self._counts["chunk_bytes"] += pack.num_bytes
                self._counts["chunk_seconds"] += self._clock() - pack.started_at
            except (NixlKVError, ValueError) as error:
                refusal = str(error)
            self._packs.remove(pack)
            request = action.pack_request
            ended.append(events.ChunkPacked(action.route, request, action.slot, refusal))
        return ended

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

    def _start(self, pack: _Pack, crop: _Crop) -> None:
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
        pack.num_bytes = crop.plan.num_bytes(pieces)
        pack.copy = self._staging.copier.start(crop.prepared, pieces)

    def _crop(self, layers: _Layers) -> "Future[_Crop]":
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

    def _plan(self, layers: _Layers) -> _Crop:
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
        return _Crop(number, group, entry_bytes(staged), planned, prepared)
