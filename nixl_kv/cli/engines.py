"""An engine to compare: one that numbers describe, or one that runs and has described itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from nixl_kv.geometry.layout import CacheLayout, Group
from nixl_kv.geometry.model_layouts import (
    EngineShape,
    ModelShape,
    build_layouts,
)
from nixl_kv.protocol.messages import Description

FIELDS: Final[Mapping[str, str]] = {
    "tp": "tp",
    "pp": "pp",
    "dcp": "dcp",
    "interleave": "interleave",
    "block": "block_size",
    "blocks": "num_blocks",
    "layout": "order",
    "per-entry": "blocks_per_entry",
    "memory": "memory",
}
"""The names of an engine's numbers on the command line, and in an `EngineShape`."""

TEXTS: Final = frozenset(("order", "memory"))


@dataclass(frozen=True)
class Engine:
    """What it is in words, the facts of its model, its ranks' caches; what it has besides."""

    words: str
    model: Mapping[str, str]
    layouts: tuple[CacheLayout, ...]
    extras: Mapping[str, str] = field(default_factory=dict)


def engine_from_numbers(numbers: str, model: ModelShape, *, option: str, blocks: int) -> Engine:
    """An engine that need not exist.

    Args:
        numbers: of the engine, such as "tp=2,block=16".
        model: whose KV it caches.
        option: which option has the numbers, for errors.
        blocks: of each rank's cache, where the numbers have none.

    Raises:
        ValueError: names the option and what is wrong with it.
    """
    try:
        shape = _engine_shape(numbers, blocks)
        layouts = tuple(build_layouts(model, shape))
    except ValueError as error:
        raise ValueError(f"{option} {numbers}: {error}") from error
    divided = f", DCP{shape.dcp}" if shape.dcp > 1 else ""
    words = f"TP{shape.tp}, PP{shape.pp}{divided}, {shape.order}, {cache_words(layouts[0])}"
    return Engine(words, {}, layouts)


def engine_from_description(description: Description) -> Engine:
    """An engine that runs."""
    layouts = tuple(rank.layout for rank in description.ranks)
    shape = description.shape
    words = f"{description.engine}, TP{shape.tp}, PP{shape.pp}, {cache_words(layouts[0])}"
    return Engine(words, description.model, layouts, description.extras)


def kv_groups(layout: CacheLayout) -> list[Group]:
    """Those with KV."""
    return [group for group in layout.groups if not group.keeps_states]


def split_name(name: str) -> tuple[str, str]:
    """Of a region: its layer, and the part of a state; empty for KV."""
    layer, _, part = name.partition(" ")
    return layer, part


def cache_words(layout: CacheLayout) -> str:
    """Blocks and memory, of each group where groups differ; a state is in a block of KV."""
    groups = kv_groups(layout) or layout.groups
    blocks = {(group.entry_size, group.num_entries) for group in groups}
    words = " and ".join(f"{count:,} blocks of {size} tokens" for size, count in sorted(blocks))
    return f"{words} in {layout.memory}"


def _engine_shape(numbers: str, blocks: int) -> EngineShape:
    """What is left out is as in `EngineShape`, except for the blocks."""
    given: dict[str, str | int] = {"num_blocks": blocks}
    for item in filter(None, numbers.split(",")):
        name, _, value = item.partition("=")
        if name not in FIELDS:
            raise ValueError(f"{name!r} is no field; allowed: {', '.join(FIELDS)}")
        field = FIELDS[name]
        if field not in TEXTS and not value.isdecimal():
            raise ValueError(f"{name} is {value!r}; allowed: a number")
        given[field] = value if field in TEXTS else int(value)
    return EngineShape(**given)  # type: ignore[arg-type]
