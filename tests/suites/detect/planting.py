"""Faults planted into what a decode rank has read: after the read has landed, before its news.

A `PlantingTransport` is put around a real transport, a `PlantingCopier` takes the place of what
scatters KV that prefill has packed. A `Planter` knows where the tokens of a load
are on its rank, from the rank's layout and the load's block tables. So each fault is what it says,
in any layout: a wrong byte, blocks that changed places, a layer that was not read.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry import plan as plans
from nixl_kv.geometry.layout import CacheLayout, Memory, Span
from nixl_kv.geometry.plan import ADDRESS, COUNT, LENGTH, STRIDE, Plan
from nixl_kv.ids import RequestId
from nixl_kv.protocol.events import StartLoad
from nixl_kv.transport.base import (
    Indices,
    ListHandle,
    PeerName,
    ReadHandle,
    Rows,
    Transport,
)
from nixl_kv.verify.slices import part_name
from suites.detect.fields import Content, Field, fields_of

Pieces = npt.NDArray[np.int64]
"""(address, length) of what a read writes, shape (n, 2), sorted by address."""

MAX_EXPECTED: Final = 1024
"""Loads that are remembered; the blocks of older ones are used again."""


class Row(NamedTuple):
    """A row of a digest: one part of one head of one layer; heads are counted over the model."""

    layer: str
    part: str
    head: int


class Planted(NamedTuple):
    """What a fault changed: rows in the digest's order, the first and the last token."""

    fault: str
    rows: tuple[Row, ...]
    first: int
    last: int


# --- the faults: each changes fields, where these have what it needs

Contents = Sequence[Sequence[Content]]
"""For each field, for each part."""

Fault = Callable[[Sequence[Field], Contents, np.random.Generator], None]
"""A function of the fields, what was there before the read, and chance."""


def byte(fields: Sequence[Field], stale: Contents, rng: np.random.Generator) -> None:
    """One byte is another one."""
    del stale
    field = _choose(fields, rng)
    part = int(rng.integers(field.num_parts))
    content = field.read(part)
    content[tuple(rng.integers(content.shape))] ^= np.uint8(rng.integers(1, 256))
    field.write(part, content)


def blocks(fields: Sequence[Field], stale: Contents, rng: np.random.Generator) -> None:
    """Two blocks of one group changed places, in all of its layers."""
    del stale
    able = [field for field in fields if len(_whole_blocks(field)) > 1]
    if not able:
        return
    group = _choose(able, rng).group
    layers = [field for field in able if field.group is group]
    size, tokens, starts = group.block_size, layers[0].tokens, _whole_blocks(layers[0])
    pair = rng.choice(len(starts), 2, replace=False)
    one, two = (slice(s, s + size) for s in (starts[n] - tokens.start for n in pair.tolist()))
    for field in layers:
        for content in _edit(field):
            content[:, one], content[:, two] = content[:, two].copy(), content[:, one].copy()


def _whole_blocks(field: Field) -> range:
    """The first token of each."""
    size, tokens = field.group.block_size, field.tokens
    return range(-(-tokens.start // size) * size, tokens.stop - size + 1, size)


def head(fields: Sequence[Field], stale: Contents, rng: np.random.Generator) -> None:
    """One head has what belongs to its neighbour."""
    del stale
    able = [field for field in fields if len(field.heads) > 1]
    if able:
        field = _choose(able, rng)
        number = int(rng.integers(len(field.heads)))
        neighbour = number + 1 if number + 1 < len(field.heads) else number - 1
        for content in _edit(field):
            content[number] = content[neighbour]


def shift(fields: Sequence[Field], stale: Contents, rng: np.random.Generator) -> None:
    """The tokens of one head are one place too far."""
    del stale
    able = [field for field in fields if len(field.tokens) > 1]
    if able:
        field = _choose(able, rng)
        number = int(rng.integers(len(field.heads)))
        for content in _edit(field):
            content[number, 1:] = content[number, :-1].copy()


def layer(fields: Sequence[Field], stale: Contents, rng: np.random.Generator) -> None:
    """One layer was not read: what was there before is still there."""
    number = int(rng.integers(len(fields)))
    for part, content in enumerate(stale[number]):
        fields[number].write(part, content)


def token(fields: Sequence[Field], stale: Contents, rng: np.random.Generator) -> None:
    """One token of one layer is zero."""
    del stale
    field = _choose(fields, rng)
    place = int(rng.integers(len(field.tokens)))
    for content in _edit(field):
        content[:, place] = 0


def parts(fields: Sequence[Field], stale: Contents, rng: np.random.Generator) -> None:
    """K and V of one layer are exchanged, or two rows of a state."""
    del stale
    able = [field for field in fields if field.num_parts > 1]
    if able:
        field = _choose(able, rng)
        key, value = field.read(0), field.read(1)
        length = min(key.shape[-1], value.shape[-1])
        exchanged = key[..., :length].copy()
        key[..., :length], value[..., :length] = value[..., :length], exchanged
        field.write(0, key)
        field.write(1, value)


def _choose(fields: Sequence[Field], rng: np.random.Generator) -> Field:
    return fields[int(rng.integers(len(fields)))]


def _edit(field: Field) -> Iterator[Content]:
    """The content of each part; what is changed in it is written back."""
    for part in range(field.num_parts):
        content = field.read(part)
        yield content
        field.write(part, content)


FAULTS: Final[Mapping[str, Fault]] = {
    fault.__name__: fault for fault in (byte, blocks, head, shift, layer, token, parts)
}


def check_fault(text: str) -> tuple[str, str]:
    """A fault, and what the names of layers contain that may have it: empty for all.

    Raises:
        ValueError: if there is no such fault.
    """
    fault, _, where = text.partition("@")
    if fault not in FAULTS:
        raise ValueError(f"fault is {fault!r}; allowed: {', '.join(FAULTS)}")
    return fault, where


# --- the planter


class Expected(NamedTuple):
    """A load, its fault, where it goes, and the first address of each head of each field."""

    load: StartLoad
    fault: str
    fields: Sequence[Field]
    addresses: Sequence[npt.NDArray[np.int64]]


class Planting(NamedTuple):
    """What is to be done when a read has landed."""

    load: StartLoad
    fault: str
    fields: Sequence[Field]
    stale: Contents


class Planter:
    """Plants each expected load's fault once, into the first of its reads that can have it.

    `expect` is for any thread, the rest for the transfer thread.
    """

    def __init__(self, layout: CacheLayout, rng: np.random.Generator) -> None:
        """Start with nothing to plant."""
        self.planted: dict[RequestId, Planted] = {}
        self._layout = layout
        self._rng = rng
        self._expected: OrderedDict[RequestId, Expected] = OrderedDict()

    def expect(self, load: StartLoad, fault: str) -> None:
        """This load will be read, and is to have a fault.

        `fault` may have an `@` and then what the names of layers contain that may have it, such as
        "byte@query": a state's names end with its part.

        Raises:
            ValueError: if there is no such fault.
        """
        fault, where = check_fault(fault)
        fields = [
            field
            for field in fields_of(self._layout, load.tables, range(load.begin, load.end))
            if where in field.region.layer
        ]
        addresses = [np.array([f.first_address(n) for n in f.heads]) for f in fields]
        self._expected[load.request] = Expected(load, fault, fields, addresses)
        while len(self._expected) > MAX_EXPECTED:
            self._expected.popitem(last=False)

    def before_read(self, pieces: Pieces) -> Planting | None:
        """A read is about to start: what to plant when it has landed, if anything."""
        for expected in reversed(list(self._expected.values())):
            fields = list(_fields_written(expected, pieces))
            if fields:
                return Planting(expected.load, expected.fault, fields, _read_all(fields))
        return None

    def after_read(self, planting: Planting) -> Planted | None:
        """Plant it; None if that changed nothing, or another read has the fault already."""
        request, fields = planting.load.request, planting.fields
        if request not in self._expected:
            return None
        landed = _read_all(fields)
        FAULTS[planting.fault](fields, planting.stale, self._rng)
        planted = _compare(planting.fault, fields, landed)
        if planted is not None:
            del self._expected[request]
            self.planted[request] = planted
        return planted


def _fields_written(expected: Expected, pieces: Pieces) -> Iterator[Field]:
    """The fields that a read writes into, with the heads that it writes."""
    for field, addresses in zip(expected.fields, expected.addresses, strict=True):
        places = np.searchsorted(pieces[:, 0], addresses, side="right") - 1
        written = (places >= 0) & (addresses < pieces[places].sum(axis=1))
        heads = np.flatnonzero(written)
        if len(heads):
            both = range(int(heads[0]), int(heads[-1]) + 1)
            yield Field(field.region, field.group, both, field.tokens, field.blocks)


def _read_all(fields: Sequence[Field]) -> Contents:
    return [[field.read(part) for part in range(field.num_parts)] for field in fields]


def _compare(fault: str, fields: Sequence[Field], landed: Contents) -> Planted | None:
    """What differs now from what landed."""
    rows: list[Row] = []
    tokens: list[int] = []
    for field, contents in zip(fields, landed, strict=True):
        for number, content in enumerate(contents):
            differs = (field.read(number) != content).any(axis=-1)
            for one in np.flatnonzero(differs.any(axis=1)).tolist():
                model_head = field.region.first_head + field.heads[one]
                part = part_name(field.group, field.region, number)
                rows.append(Row(field.region.layer, part, model_head))
            tokens += (field.tokens.start + np.flatnonzero(differs.any(axis=0))).tolist()
    return Planted(fault, tuple(rows), min(tokens), max(tokens)) if rows else None


# --- the transport


class _List(NamedTuple):
    handle: ListHandle
    rows: Rows


class _Read(NamedTuple):
    handle: ReadHandle
    planting: Planting | None


class PlantingTransport:
    """A real transport, whose reads end as the planter says. See `Transport`."""

    def __init__(self, inner: Transport, planter: Planter) -> None:
        """The inner transport belongs to this one from now on."""
        self._inner = inner
        self._planter = planter

    def warm_up_pieces(self, peer: PeerName) -> int:
        """Unchanged."""
        return self._inner.warm_up_pieces(peer)

    def register(self, span: Span, memory: Memory, device: int) -> None:
        """Unchanged."""
        self._inner.register(span, memory, device)

    def rehearse(self, span: Span, memory: Memory, device: int) -> None:
        """Unchanged."""
        self._inner.rehearse(span, memory, device)

    def metadata(self) -> bytes:
        """Unchanged."""
        return self._inner.metadata()

    def add_peer(self, metadata: bytes) -> PeerName:
        """Unchanged."""
        return self._inner.add_peer(metadata)

    def drop_peer(self, peer: PeerName) -> None:
        """Unchanged."""
        self._inner.drop_peer(peer)

    def prepare(self, rows: Rows, memory: Memory, peer: PeerName | None) -> _List:
        """Remember the rows."""
        return _List(self._inner.prepare(rows, memory, peer), rows)

    def read(self, local: _List, remote: _List, indices: tuple[Indices, Indices]) -> _Read:
        """Look at what will be written, before it is."""
        planting = self._planter.before_read(pieces_of(local.rows, indices[0]))
        return _Read(self._inner.read(local.handle, remote.handle, indices), planting)

    def poll(self, read: _Read) -> bool:
        """Plant what is to be planted after the landing, before anybody knows of it."""
        ended = self._inner.poll(read.handle)
        if ended and read.planting is not None:
            self._planter.after_read(read.planting)
        return ended

    def stop(self, read: _Read) -> bool:
        """Unchanged."""
        return self._inner.stop(read.handle)

    def progress(self) -> None:
        """Unchanged."""
        self._inner.progress()

    def close(self) -> None:
        """Unchanged."""
        self._inner.close()


class PlantingCopier:
    """Scatters what was packed; a copy into the cache ends as the planter says.

    It is a copier of the path that packs, and has `inner` copy.
    """

    def __init__(self, inner: Any, planter: Planter) -> None:
        """Nothing is planted yet."""
        self.num_started = 0
        self._inner = inner
        self._planter = planter
        self._plantings: dict[int, Planting | None] = {}

    def prepare(self, plan: Plan) -> Any:
        """Remember the plan."""
        return plan, self._inner.prepare(plan)

    def start(self, prepared: Any, pieces: Sequence[plans.Pieces]) -> Any:
        """Look at what will be written, before it is."""
        plan, rows = prepared
        local, _ = plan.indices(pieces)
        planting = self._planter.before_read(pieces_of(plan.local, local))
        copy = self._inner.start(rows, pieces)
        self.num_started += 1
        self._plantings[id(copy)] = planting
        return copy

    def poll(self, copy: Any) -> bool:
        """Plant what is to be planted, before anybody knows that it has ended."""
        ended: bool = self._inner.poll(copy)
        planting = self._plantings.pop(id(copy), None) if ended else None
        if planting is not None:
            self._planter.after_read(planting)
        return ended

    def end(self, copy: Any) -> None:
        """Wait for it."""
        self._inner.end(copy)


def pieces_of(rows: Rows, indices: Indices) -> Pieces:
    """The pieces of a list with these numbers."""
    table = rows.astype(np.int64)
    ends = np.cumsum(table[:, COUNT])
    row = np.searchsorted(ends, indices, side="right")
    within = indices - (ends - table[:, COUNT])[row]
    addresses = table[row, ADDRESS] + within * table[row, STRIDE]
    pieces = np.stack([addresses, table[row, LENGTH]], axis=1)
    return pieces[np.argsort(pieces[:, 0])]
