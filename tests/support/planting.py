"""Faults that are planted into the bytes that decode has read, before their digest sees them.

`load_fields` finds a load's tokens by itself, so these faults also show mistakes of slices and
plans.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from harness.cluster.engines import Engine, EngineSpec, python_path
from harness.local.engine import LocalRank, part_of
from nixl_kv.errors import get_logger
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.protocol.events import StartLoad
from nixl_kv.verify.digest import Digester, Steps
from nixl_kv.verify.queue import DigestQueue
from nixl_kv.verify.slices import LocalSlice, part_name
from support.load_fields import Bytes, Field, Places, fields_of, memory_of

TESTS = Path(__file__).resolve().parents[1]

logger = get_logger("nixl_kv.planted")

FOUND = re.compile(
    r"the bytes from prefill rank \d+ are wrong: (?P<row>.+?)(?: and (?P<more>\d+) more heads)? "
    r"differs in tokens (?P<first>\d+) to (?P<last>\d+) \(blocks \d+ to \d+ of the request; "
    r"\d+ of \d+ columns of 64 tokens\)"
)


# --- the faults

FAULTS = ("byte", "blocks", "head", "layer", "parts")


@dataclass(frozen=True)
class Fault:
    """A fault for one layer of a load; `stale` are its bytes before the load."""

    name: str
    load: StartLoad
    field: Field
    stale: Sequence[Bytes]

    def plant(self, memory: Bytes, heads: range, rng: np.random.Generator) -> None:
        """Change bytes of these heads, numbered within the rank: those that have landed."""
        field, first = self.field, heads.start
        parts = [places[first : heads.stop] for places in field.parts]
        match self.name:
            case "byte":  # is another one
                places = parts[rng.integers(len(parts))]
                memory[places[tuple(rng.integers(places.shape))]] ^= rng.integers(1, 256)
            case "blocks":  # two changed places
                starts = np.array(field.whole_blocks) - field.tokens[0]
                pair = rng.choice(starts, 2, replace=False).tolist()
                one, two = (slice(start, start + field.group.block_size) for start in pair)
                for places in parts:
                    _swap(memory, places[:, one], places[:, two])
            case "head":  # has what belongs to a neighbour
                for places in field.parts:
                    memory[places[first]] = memory[places[first - 1 if first else 1]]
            case "layer":  # was not read
                for places, stale in zip(parts, self.stale, strict=True):
                    memory[places] = stale[first : heads.stop]
            case "parts":  # K and V are exchanged, or two rows of a state
                length = min(places.shape[-1] for places in parts[:2])
                _swap(memory, parts[0][..., :length], parts[1][..., :length])


def _swap(memory: Bytes, one: Places, two: Places) -> None:
    memory[one], memory[two] = memory[two], memory[one]


# --- the planter


@dataclass(frozen=True)
class Planted:
    """The effect of a fault: rows of the digest, by their names and in its order, and tokens."""

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
        self._expected: Fault | None = None

    def expect(self, load: StartLoad, fault: str, where: str = "") -> bool:
        """Plant a fault into a layer that has `where` in its name; False if none can have it."""
        fields = fields_of(self._layout, load)
        able = [one for one in fields if where in one.region.layer and one.can_have(fault)]
        if able:
            field = able[self._rng.integers(len(able))]
            stale = [self._memory[places] for places in field.parts]
            self._expected = Fault(fault, load, field, stale)
        return bool(able)

    def __call__(self, secret: str, local_slices: Sequence[LocalSlice]) -> Steps:
        """Plant the fault after the first step, which comes before the bytes land."""
        steps = super().__call__(secret, local_slices)
        yield next(steps)
        for one in local_slices:
            if self._expected and one.region.layer == self._expected.field.region.layer:
                heads = range(*(number - one.region.first_head for number in one.heads))
                self._plant(self._expected, heads)
        return (yield from steps)

    def _plant(self, fault: Fault, heads: range) -> None:
        field = fault.field
        parts = [places[heads.start : heads.stop] for places in field.parts]
        landed = [self._memory[places] for places in parts]
        fault.plant(self._memory, heads, self._rng)
        rows, tokens = [], []
        for number, (places, before) in enumerate(zip(parts, landed, strict=True)):
            differs = (self._memory[places] != before).any(axis=-1)
            name = part_name(field.group, field.region, number)
            for row in np.flatnonzero(differs.any(axis=1)).tolist():
                head = field.region.first_head + heads[row]
                rows.append(f"{name} of head {head} of layer {field.region.layer}")
            tokens += np.flatnonzero(differs.any(axis=0)).tolist()
        if rows:  # none if the bytes were equal by chance
            self._expected = None
            edges = field.tokens[[min(tokens), max(tokens)]].tolist()
            self.planted.append(Planted(fault.load.request, rows, *edges))
            logger.warning("planted %s", json.dumps(asdict(self.planted[-1])))


def plant_on(rank: LocalRank, seed: int) -> Planter:
    """Give a rank a digester that plants faults."""
    planter = Planter(rank.description.layout, seed)
    part_of(rank.parts, DigestQueue)._digester = planter
    return planter


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
