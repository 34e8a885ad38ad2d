"""Packing on prefill: copies chunks of granted blocks into slots of this rank's ring.

The ring's slots bound how many copies are in progress. A chunk that cannot be packed is read
directly by its reader.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from nixl_kv.errors import IncompatiblePeer, TransportError
from nixl_kv.geometry.layout import CacheLayout, Group
from nixl_kv.geometry.plan import Plan, plan
from nixl_kv.geometry.staging import entry_bytes, staged_entries, staged_layout, staged_table
from nixl_kv.protocol import events, messages
from nixl_kv.reading.staged.copier import Copy, PreparedCopy, Staging

MAX_CROPS: Final = 256
"""That are kept: a decode engine has one for each pair of its ranks and groups, for ever."""

_Layers: TypeAlias = tuple[messages.LayerHeads, ...]


@dataclass(frozen=True)
class _Crop:
    """How one share of a group is packed."""

    number: int  # of the group
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
    """See `Packer`."""

    def __init__(
        self,
        layout: CacheLayout,
        staging: Staging,
        counts: defaultdict[str, float],
        clock: Callable[[], float],
    ) -> None:
        """Pack from this cache; chunks, their bytes and seconds are added to `counts`."""
        self._layout = layout
        self._staging = staging
        self._counts = counts
        self._clock = clock
        self._crops: OrderedDict[_Layers, _Crop | str] = OrderedDict()  # or why there is none
        self._packs: list[_Pack] = []

    def __repr__(self) -> str:
        return f"<PackQueue: {len(self._packs)} under way>"

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
        """Raise ValueError if the chunk does not fit into the slot."""
        request = action.pack_request
        crop, ring = self._crop(request.layers), self._staging.ring
        table = action.tables[crop.number]
        entries = staged_entries(table, crop.group, range(request.begin, request.end))
        if not 0 < len(entries) <= ring.capacity(crop.entry_bytes):
            raise ValueError(f"a chunk has {len(entries)} entries")
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
        """How these heads are packed; planned once, or the reason why it is impossible."""
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
            raise ValueError(crop)  # noqa: TRY004 - a value of the request
        return crop

    def _plan(self, layers: _Layers) -> _Crop:
        layer, wanted = layers[0].layer, {each.layer: (each.first, each.end) for each in layers}
        if len(wanted) < len(layers):
            raise ValueError("a layer occurs twice in a chunk; allowed: once")
        regions = self._layout.regions
        if layer not in regions:
            raise ValueError(f"layer {layer!r} is not on this rank")
        number, _ = regions[layer]
        group = self._layout.groups[number]
        staged = staged_layout(
            group,
            wanted,
            self._staging.ring.span,
            memory=self._staging.memory,
            device=self._staging.device,
        )
        planned = plan(staged, self._layout, wanted)
        prepared = self._staging.copier.prepare(planned)
        return _Crop(number, group, entry_bytes(staged), planned, prepared)


def _packed(action: events.PackChunk, refusal: str | None) -> events.ChunkPacked:
    return events.ChunkPacked(action.route, action.pack_request, action.slot, refusal)
