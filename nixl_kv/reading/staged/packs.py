"""Packing on prefill: copies chunks of granted blocks into slots of this rank's ring.

`protocol` assigns the slots, so the ring bounds the copies in progress. If this rank
cannot pack a chunk, its reader reads it directly.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from nixl_kv.errors import IncompatiblePeer, TransportError
from nixl_kv.geometry.layout import CacheLayout, Group
from nixl_kv.geometry.plan import Plan, plan
from nixl_kv.geometry.staging import entry_bytes, staged_entries, staged_table
from nixl_kv.protocol import events, messages
from nixl_kv.reading.staged.copier import Copy, PreparedCopy, Staging

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


@dataclass(frozen=True)
class _Pack:
    action: events.PackChunk
    copy: Copy
    num_bytes: int
    started_at: float


class PackQueue:
    """Copies in progress. Chunks, their bytes and their seconds are added to `counts`."""

    def __init__(
        self,
        layout: CacheLayout,
        staging: Staging,
        counts: defaultdict[str, float],
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._staging = staging
        self._counts = counts
        self._clock = clock
        self._crops: OrderedDict[_Layers, _Crop | str] = OrderedDict()  # or the refusal
        self._packs: list[_Pack] = []

    def __repr__(self) -> str:
        return f"<PackQueue: {len(self._packs)} copies>"

    def __len__(self) -> int:
        return len(self._packs)

    @property
    def writing(self) -> list[int]:
        return [pack.action.slot for pack in self._packs]

    def add(self, action: events.PackChunk) -> events.ChunkPacked | None:
        try:
            self._packs.append(self._start(action))
        except (TransportError, IncompatiblePeer, ValueError) as error:
            return _packed(action, str(error))
        return None

    def poll(self) -> list[events.ChunkPacked]:
        ended: list[events.ChunkPacked] = []
        for pack in list(self._packs):
            refusal = None
            try:
                if not self._staging.copier.poll(pack.copy):
                    continue
                self._counts["chunks_packed"] += 1
                self._counts["chunk_bytes"] += pack.num_bytes
                self._counts["chunk_seconds"] += self._clock() - pack.started_at
            except TransportError as error:
                refusal = str(error)
            self._packs.remove(pack)
            ended.append(_packed(pack.action, refusal))
        return ended

    def close(self) -> None:
        for pack in self._packs:
            self._staging.copier.end(pack.copy)

    def _start(self, action: events.PackChunk) -> _Pack:
        request = action.pack_request
        crop, ring = self._crop(request.layers), self._staging.ring
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
        copy = self._staging.copier.start(crop.prepared, pieces)
        return _Pack(action, copy, crop.plan.num_bytes(pieces), self._clock())

    def _crop(self, layers: _Layers) -> _Crop:
        """Plan how to pack these heads, once. A refusal is repeated each time."""
        crop = self._crops.get(layers)
        if crop is None:
            try:
                crop = self._plan(layers)
            except (TransportError, IncompatiblePeer, ValueError) as error:
                crop = str(error)
            self._crops[layers] = crop
            if len(self._crops) > MAX_CROPS:
                self._crops.popitem(last=False)
        self._crops.move_to_end(layers)
        if isinstance(crop, str):
            raise ValueError(crop)  # noqa: TRY004 - the request has a wrong value
        return crop

    def _plan(self, layers: _Layers) -> _Crop:
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


def _packed(action: events.PackChunk, refusal: str | None) -> events.ChunkPacked:
    return events.ChunkPacked(action.route, action.pack_request, action.slot, refusal)
