"""Faults planted into what a decode rank has read: when all has landed, and before anyone is told.

`PlantedTransport` stands around a real transport. A `Planter` knows where the tokens of a load
stand on its rank, from the rank's layout and the load's block tables; so each fault is what it
says, in any layout: a wrong byte, blocks that changed places, a layer that was not read.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry.excerpts import PARTS
from nixl_kv.geometry.layout import CacheLayout, Memory, Span
from nixl_kv.ids import RequestId
from nixl_kv.protocol.events import Load
from nixl_kv.transport.base import (
    Indices,
    ListHandle,
    PeerName,
    ReadHandle,
    Rows,
    Transport,
)
from pd.detect_fields import Content, Field, fields_of

Pieces = npt.NDArray[np.int64]
"""(address, length) of what a read writes, shape (n, 2), by address."""

VARIABLE: Final = "NIXL_KV_PLANT"
"""Of the environment of an engine with `pd.planted`."""

REMEMBERED: Final = 1024
"""Loads: the blocks of older ones are others' by now."""


class Row(NamedTuple):
    """Of a digest: which part of which head of which layer; heads are counted over the model."""

    layer: str
    part: str
    head: int


class Planted(NamedTuple):
    """What a fault changed: rows in the digest's order, the first and the last token."""

    fault: str
    rows: tuple[Row, ...]
    first: int
    last: int


# --- the faults: each changes fields, if these have what it takes

Stale = Sequence[Sequence[Content]]
"""For each field, for each part: what stood there before the read."""

Fault = Callable[[Sequence[Field], Stale, np.random.Generator], None]


def byte(fields: Sequence[Field], stale: Stale, rng: np.random.Generator) -> None:
    """One byte is another one."""
    del stale
    field = fields[rng.integers(len(fields))]
    part = int(rng.integers(len(field.region.parts)))
    content = field.get(part)
    content[tuple(rng.integers(content.shape))] ^= np.uint8(rng.integers(1, 256))
    field.put(part, content)


def blocks(fields: Sequence[Field], stale: Stale, rng: np.random.Generator) -> None:
    """Two blocks of one group changed places, in all of its layers."""
    del stale
    group = fields[rng.integers(len(fields))].group
    chosen = [field for field in fields if field.group is group]
    size, tokens = group.block_size, chosen[0].tokens
    starts = range(-(-tokens.start // size) * size, tokens.stop - size + 1, size)
    if len(starts) < 2:  # noqa: PLR2004 - it takes two
        return
    pair = rng.choice(len(starts), 2, replace=False)
    one, two = (slice(s, s + size) for s in (starts[n] - tokens.start for n in pair.tolist()))
    for field in chosen:
        for part in range(len(field.region.parts)):
            content = field.get(part)
            content[:, one], content[:, two] = content[:, two].copy(), content[:, one].copy()
            field.put(part, content)


def head(fields: Sequence[Field], stale: Stale, rng: np.random.Generator) -> None:
    """One head holds what belongs to its neighbour."""
    del stale
    able = [field for field in fields if len(field.heads) > 1]
    if able:
        field = able[rng.integers(len(able))]
        number = int(rng.integers(len(field.heads)))
        neighbour = number + 1 if number + 1 < len(field.heads) else number - 1
        for part in range(len(field.region.parts)):
            content = field.get(part)
            content[number] = content[neighbour]
            field.put(part, content)


def shift(fields: Sequence[Field], stale: Stale, rng: np.random.Generator) -> None:
    """The tokens of one head stand one place too far."""
    del stale
    field = fields[rng.integers(len(fields))]
    number = int(rng.integers(len(field.heads)))
    for part in range(len(field.region.parts)):
        content = field.get(part)
        content[number, 1:] = content[number, :-1].copy()
        field.put(part, content)


def layer(fields: Sequence[Field], stale: Stale, rng: np.random.Generator) -> None:
    """One layer was not read: what stood there still stands."""
    number = int(rng.integers(len(fields)))
    for part, content in enumerate(stale[number]):
        fields[number].put(part, content)


def token(fields: Sequence[Field], stale: Stale, rng: np.random.Generator) -> None:
    """One token of one layer is zero."""
    del stale
    field = fields[rng.integers(len(fields))]
    place = int(rng.integers(len(field.tokens)))
    for part in range(len(field.region.parts)):
        content = field.get(part)
        content[:, place] = 0
        field.put(part, content)


def parts(fields: Sequence[Field], stale: Stale, rng: np.random.Generator) -> None:
    """K and V of one layer are exchanged."""
    del stale
    able = [field for field in fields if len(field.region.parts) > 1]
    if able:
        field = able[rng.integers(len(able))]
        key, value = field.get(0), field.get(1)
        length = min(key.shape[-1], value.shape[-1])
        swapped = key[..., :length].copy()
        key[..., :length], value[..., :length] = value[..., :length], swapped
        field.put(0, key)
        field.put(1, value)


FAULTS: Final[Mapping[str, Fault]] = {
    "byte": byte,
    "blocks": blocks,
    "head": head,
    "shift": shift,
    "layer": layer,
    "token": token,
    "parts": parts,
}


class Planting(NamedTuple):
    """What is to be done when a read has landed."""

    load: Load
    fault: str
    fields: Sequence[Field]
    stale: Stale


class Expected(NamedTuple):
    """A load, its fault, where it stands, and the first address of each head of each field."""

    load: Load
    fault: str
    fields: Sequence[Field]
    addresses: Sequence[npt.NDArray[np.int64]]


class Planter:
    """Plants each expected load's fault once, into the first of its reads that can have it.

    `expect` is for any thread, the rest for the transfer thread.
    """

    def __init__(self, layout: CacheLayout, rng: np.random.Generator) -> None:
        """Begin with nothing to plant."""
        self._layout = layout
        self._rng = rng
        self._expected: OrderedDict[RequestId, Expected] = OrderedDict()
        self.planted: dict[RequestId, Planted] = {}

    def expect(self, load: Load, fault: str) -> None:
        """This load will be read, and is to have a fault.

        Raises:
            ValueError: if there is no such fault.
        """
        if fault not in FAULTS:
            raise ValueError(f"fault is {fault!r}; allowed: {', '.join(FAULTS)}")
        fields = list(fields_of(self._layout, load))
        addresses = [np.array([f.first_address(n) for n in f.heads]) for f in fields]
        self._expected[load.request] = Expected(load, fault, fields, addresses)
        while len(self._expected) > REMEMBERED:
            self._expected.popitem(last=False)

    def begun(self, pieces: Pieces) -> Planting | None:
        """A read is about to begin: what to plant when it has landed, if anything."""
        for expected in reversed(list(self._expected.values())):
            fields = list(_written(expected, pieces))
            if fields:
                return Planting(expected.load, expected.fault, fields, _contents(fields))
        return None

    def landed(self, planting: Planting) -> Planted | None:
        """Plant it; None if nothing changed by that, or another read has it."""
        request, fields = planting.load.request, planting.fields
        if request not in self._expected:
            return None
        before = _contents(fields)
        FAULTS[planting.fault](fields, planting.stale, self._rng)
        found = _changed(planting.fault, fields, before)
        if found is not None:
            del self._expected[request]
            self.planted[request] = found
        return found


def _written(expected: Expected, pieces: Pieces) -> Iterator[Field]:
    """The fields that these pieces are of, with the heads that they are of."""
    for field, addresses in zip(expected.fields, expected.addresses, strict=True):
        held = np.flatnonzero(_covers(pieces, addresses))
        if len(held):
            heads = range(int(held[0]), int(held[-1]) + 1)
            yield Field(field.region, field.group, heads, field.tokens, field.blocks)


def _contents(fields: Sequence[Field]) -> Stale:
    return [[field.get(part) for part in range(len(field.region.parts))] for field in fields]


def _covers(pieces: Pieces, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    places = np.searchsorted(pieces[:, 0], addresses, side="right") - 1
    found: npt.NDArray[np.bool_] = (places >= 0) & (addresses < pieces[places].sum(axis=1))
    return found


def _changed(fault: str, fields: Sequence[Field], before: Stale) -> Planted | None:
    """Compare with what landed."""
    rows: list[Row] = []
    places: list[int] = []
    for field, was in zip(fields, before, strict=True):
        names = PARTS[len(was)]
        for number, content in enumerate(was):
            differs = (field.get(number) != content).any(axis=-1)
            for one in np.flatnonzero(differs.any(axis=1)).tolist():
                model_head = field.region.first_head + field.heads[one]
                rows.append(Row(field.region.layer, names[number], model_head))
            places += (field.tokens.start + np.flatnonzero(differs.any(axis=0))).tolist()
    return Planted(fault, tuple(rows), min(places), max(places)) if rows else None


# --- the transport


class _List(NamedTuple):
    handle: ListHandle
    rows: Rows


class _Read(NamedTuple):
    handle: ReadHandle
    planting: Planting | None


class PlantedTransport:
    """A real transport, whose reads end as the planter says. See `Transport`."""

    def __init__(self, inner: Transport, planter: Planter) -> None:
        """Takes the inner transport over."""
        self._inner = inner
        self._planter = planter

    def register(self, span: Span, memory: Memory, device: int) -> None:
        """As it is."""
        self._inner.register(span, memory, device)

    def metadata(self) -> bytes:
        """As it is."""
        return self._inner.metadata()

    def add_peer(self, metadata: bytes) -> PeerName:
        """As it is."""
        return self._inner.add_peer(metadata)

    def drop_peer(self, peer: PeerName) -> None:
        """As it is."""
        self._inner.drop_peer(peer)

    def prepare(self, rows: Rows, memory: Memory, peer: PeerName | None) -> _List:
        """Remember the rows."""
        return _List(self._inner.prepare(rows, memory, peer), rows)

    def read(self, local: _List, remote: _List, indices: tuple[Indices, Indices]) -> _Read:
        """See what will be written, before it is."""
        planting = self._planter.begun(pieces_of(local.rows, indices[0]))
        return _Read(self._inner.read(local.handle, remote.handle, indices), planting)

    def poll(self, read: _Read) -> bool:
        """Plant what is to be planted between the landing and its news."""
        ended = self._inner.poll(read.handle)
        if ended and read.planting is not None:
            self._planter.landed(read.planting)
        return ended

    def progress(self) -> None:
        """As it is."""
        self._inner.progress()

    def close(self) -> None:
        """As it is."""
        self._inner.close()


def pieces_of(rows: Rows, indices: Indices) -> Pieces:
    """The pieces of a list with these numbers."""
    table = rows.astype(np.int64)
    ends = np.cumsum(table[:, 4])
    row = np.searchsorted(ends, indices, side="right")
    within = indices - (ends - table[:, 4])[row]
    found = np.stack([table[row, 0] + within * table[row, 3], table[row, 1]], axis=1)
    return found[np.argsort(found[:, 0])]
