"""Faults that are planted into the bytes that decode has read, after they landed.

A `Planter` replaces the digester of a decode rank, which is called when the bytes of a prefill rank
have landed: the digest is the first to see a fault. This module works out by itself where a load's
tokens are, so that it also sees mistakes of the product's slices and plans.
"""

import ctypes
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from harness.cluster.engines import Engine, EngineSpec, python_path
from nixl_kv.errors import get_logger
from nixl_kv.geometry.layout import ABSENT, CacheLayout, Group, Region
from nixl_kv.protocol.events import StartLoad
from nixl_kv.verify.digest import Digester, Steps
from nixl_kv.verify.slices import LocalSlice, part_name

TESTS = Path(__file__).resolve().parents[1]

logger = get_logger("nixl_kv.planted")

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]

FOUND = re.compile(
    r"the bytes from prefill rank \d+ are wrong: (?P<row>.+?)(?: and (?P<more>\d+) more heads)? "
    r"differs in tokens (?P<first>\d+) to (?P<last>\d+) \(blocks \d+ to \d+ of the request; "
    r"\d+ of \d+ columns of 64 tokens\)"
)


@dataclass(frozen=True)
class Field:
    """The tokens that a load fills in one layer: where each byte is, in the memory of a rank."""

    group: Group
    region: Region
    tokens: range
    parts: tuple[Places, ...]  # shape (heads, tokens, bytes) each

    @property
    def whole_blocks(self) -> range:
        """The first token of each block that has all of its tokens here."""
        size, tokens = self.group.block_size, self.tokens
        return range(-(-tokens.start // size) * size, tokens.stop - size + 1, size)


def memory_of(layout: CacheLayout) -> Bytes:
    """A rank's memory, from its first span to the last."""
    begin = min(span.address for span in layout.spans)
    end = max(span.address + span.length for span in layout.spans)
    return np.ctypeslib.as_array((ctypes.c_uint8 * (end - begin)).from_address(begin))


def fields_of(layout: CacheLayout, load: StartLoad) -> Iterator[Field]:
    """All that a load fills on a rank: in each table, what comes after the last absent block."""
    start = min(span.address for span in layout.spans)
    for group, table in zip(layout.groups, load.tables, strict=True):
        absent = np.flatnonzero(table.block_ids == ABSENT)
        skipped = int(absent[-1]) + 1 if len(absent) else 0
        begin = max(load.begin, (table.first + skipped) * group.entry_size)
        tokens = np.arange(begin, load.end)
        if not len(tokens):
            continue
        entries = table.block_ids[tokens // group.entry_size - table.first].astype(np.int64)
        within, slots = np.divmod(tokens % group.entry_size, group.block_size)
        blocks = entries * group.blocks_per_entry + within
        for region in group.regions:
            heads = np.arange(region.num_heads)[:, None, None] * region.head_stride
            parts = []
            for part in region.parts:
                token_places = blocks * region.block_stride + slots * region.token_stride_of(part)
                pieces = np.arange(part.count)[:, None] * part.stride + np.arange(part.length)
                places = heads + token_places[:, None] + pieces.ravel()
                parts.append(places + region.base + part.offset - start)
            yield Field(group, region, range(begin, load.end), tuple(parts))


# --- the faults


@dataclass(frozen=True)
class Target:
    """A layer that gets a fault; the bytes of `heads`, numbered within the rank, have landed."""

    memory: Bytes
    field: Field
    heads: range
    stale: Sequence[Bytes]  # what was in the layer before the load
    rng: np.random.Generator

    @property
    def parts(self) -> list[Places]:
        """Of these heads."""
        return [places[self.heads.start : self.heads.stop] for places in self.field.parts]


def byte(target: Target) -> None:
    """One byte is another one."""
    places = target.parts[target.rng.integers(len(target.parts))]
    target.memory[places[tuple(target.rng.integers(places.shape))]] ^= target.rng.integers(1, 256)


def blocks(target: Target) -> None:
    """Two blocks of a layer changed places."""
    field, size = target.field, target.field.group.block_size
    pair = target.rng.choice(np.array(field.whole_blocks) - field.tokens.start, 2, replace=False)
    one, two = (slice(start, start + size) for start in pair.tolist())
    for places in target.parts:
        _swap(target.memory, places[:, one], places[:, two])


def head(target: Target) -> None:
    """One head has what belongs to a neighbour."""
    first = target.heads.start
    for places in target.field.parts:
        target.memory[places[first]] = target.memory[places[first - 1 if first else 1]]


def layer(target: Target) -> None:
    """One layer was not read: what was there before is still there."""
    for places, stale in zip(target.parts, target.stale, strict=True):
        target.memory[places] = stale[target.heads.start : target.heads.stop]


def parts(target: Target) -> None:
    """K and V of a layer are exchanged, or two rows of a state."""
    key, value = target.parts[:2]
    length = min(key.shape[-1], value.shape[-1])
    _swap(target.memory, key[..., :length], value[..., :length])


def _swap(memory: Bytes, one: Places, two: Places) -> None:
    memory[one], memory[two] = memory[two], memory[one]


FAULTS: dict[str, tuple[Callable[[Target], None], Callable[[Field], bool]]] = {
    "byte": (byte, lambda _: True),
    "blocks": (blocks, lambda field: len(field.whole_blocks) > 1),
    "head": (head, lambda field: field.region.num_heads > 1),
    "layer": (layer, lambda _: True),
    "parts": (parts, lambda field: len(field.parts) > 1),
}
"""Each with which fields can have it."""


# --- the planter


@dataclass(frozen=True)
class Planted:
    """What a fault changed: the rows of the digest, by their names and in its order, and tokens."""

    request: str
    rows: Sequence[str]
    first: int
    last: int

    def is_named_in(self, detail: str) -> bool:
        """Whether an error names the first row, how many more there are, and the right tokens."""
        found = FOUND.search(detail)
        if found is None:
            return False
        tokens = range(int(found["first"]), int(found["last"]) + 1)
        rows_named = found["row"], int(found["more"] or 0)
        is_right = rows_named == (self.rows[0], len(self.rows) - 1)
        return is_right and self.first in tokens and self.last in tokens


class Planter(Digester):
    """A digester that plants one fault first. Call `expect` before the load starts."""

    def __init__(self, layout: CacheLayout, seed: int | None = None) -> None:
        self.planted: list[Planted] = []
        self._layout = layout
        self._memory = memory_of(layout)
        self._rng = np.random.default_rng(seed)
        self._expected: tuple[StartLoad, str, Field, list[Bytes]] | None = None

    def expect(self, load: StartLoad, fault: str, where: str = "") -> bool:
        """Plant a fault into a layer that has `where` in its name; False if none can have it."""
        able = [
            field
            for field in fields_of(self._layout, load)
            if where in field.region.layer and FAULTS[fault][1](field)
        ]
        if able:
            field = able[self._rng.integers(len(able))]
            stale = [self._memory[places] for places in field.parts]
            self._expected = load, fault, field, stale
        return bool(able)

    def __call__(self, secret: str, local_slices: Sequence[LocalSlice]) -> Steps:
        """Digest what has landed, and has a fault by now if it was to have one."""
        if self._expected is not None:
            load, fault, field, stale = self._expected
            for one in local_slices:
                if one.region.layer == field.region.layer and self._expected is not None:
                    heads = range(*(n - field.region.first_head for n in one.heads))
                    target = Target(self._memory, field, heads, stale, self._rng)
                    self._plant(load.request, fault, target)
        return super().__call__(secret, local_slices)

    def _plant(self, request: str, fault: str, target: Target) -> None:
        field, heads = target.field, target.heads
        landed = [self._memory[places] for places in target.parts]
        FAULTS[fault][0](target)
        rows, tokens = [], []
        for number, (places, before) in enumerate(zip(target.parts, landed, strict=True)):
            differs = (self._memory[places] != before).any(axis=-1)
            name = part_name(field.group, field.region, number)
            for row in np.flatnonzero(differs.any(axis=1)).tolist():
                at = field.region.first_head + heads[row]
                rows.append(f"{name} of head {at} of layer {field.region.layer}")
            tokens += np.flatnonzero(differs.any(axis=0)).tolist()
        if rows:  # where a byte was right by chance, there is none
            self._expected = None
            edges = (field.tokens.start + edge for edge in (min(tokens), max(tokens)))
            self.planted.append(Planted(request, rows, *edges))
            logger.warning("planted %s", json.dumps(asdict(self.planted[-1])))


# --- engines of vLLM that plant faults


def planted_spec(spec: EngineSpec, plan: Path) -> EngineSpec:
    """The same decode engine with the faults that the file `plan` names."""
    env = {"NIXL_KV_PLANT": str(plan), "PYTHONPATH": python_path(TESTS)}
    return replace(
        spec,
        name=f"{spec.name}-planted",
        module="support.planted_connector",
        extra_env={**spec.extra_env, **env},
    )


def expect_named(engine: Engine, start: int = 0) -> list[str]:
    """Each fault in the log was found, by its layer, part, head and tokens; their first rows."""
    log = engine.log_text(start)
    faults = [Planted(**json.loads(text)) for text in re.findall(r"planted (\{.*\})", log)]
    reasons = dict(re.findall(r"request (\S+): KV not loaded: (.*\(corrupt.*)", log))
    assert [fault.request for fault in faults] == list(reasons)
    for fault in faults:
        assert fault.is_named_in(reasons[fault.request]), (fault, reasons)
    return [fault.rows[0] for fault in faults]
