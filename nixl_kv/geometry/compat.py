"""Why two engines cannot exchange KV, in words.

Nothing is guessed and nothing is hashed together: each differing field is named with both values,
so that the person who reads the log knows which flag to change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nixl_kv.geometry.layout import CacheLayout, Group, Region
from nixl_kv.geometry.ranks import Shape


@dataclass(frozen=True)
class Mismatch:
    """One field that differs."""

    field: str
    local: object
    remote: object

    def __str__(self) -> str:
        """As it stands in a log line."""
        return f"{self.field} is {self.local!r} here and {self.remote!r} there"


def model_mismatches(local: Mapping[str, str], remote: Mapping[str, str]) -> list[Mismatch]:
    """Compare what the engines say of their models, field by field."""
    names = sorted(set(local) | set(remote))
    return [
        Mismatch(name, local.get(name), remote.get(name))
        for name in names
        if local.get(name) != remote.get(name)
    ]


def shape_mismatches(local: Shape, remote: Shape) -> list[Mismatch]:
    """Compare how the engines are cut."""
    found = []
    if local.tp != remote.tp:
        found.append(Mismatch("tensor_parallel_size", local.tp, remote.tp))
    if local.pp != remote.pp:
        found.append(Mismatch("pipeline_parallel_size", local.pp, remote.pp))
    return found


def mismatches(local: CacheLayout, remote: CacheLayout) -> list[Mismatch]:
    """Every reason why one rank cannot read another, in the order of what explains most."""
    found = _scalars(
        ("KV cache dtype", local.element, remote.element),
        ("number of cache groups", len(local.groups), len(remote.groups)),
        ("number of layers", _num_layers(local.groups), _num_layers(remote.groups)),
    )
    if found:
        return found
    for mine, theirs in zip(local.groups, remote.groups, strict=True):
        found += _group_mismatches(mine, theirs)
    return found


def _num_layers(groups: Sequence[Group]) -> int:
    return sum(len(group.regions) for group in groups)


def _scalars(*fields: tuple[str, object, object]) -> list[Mismatch]:
    return [Mismatch(name, mine, theirs) for name, mine, theirs in fields if mine != theirs]


def _group_mismatches(local: Group, remote: Group) -> list[Mismatch]:
    found = _scalars(
        ("block_size", local.block_size, remote.block_size),
        ("tokens per block table entry", local.entry_size, remote.entry_size),
        ("layers", _layers(local), _layers(remote)),
    )
    if found:
        return found
    there = {region.layer: region for region in remote.regions}
    for region in local.regions:
        found += _region_mismatches(region, there[region.layer])
    return found


def _layers(group: Group) -> list[str]:
    return sorted(region.layer for region in group.regions)


def _region_mismatches(local: Region, remote: Region) -> list[Mismatch]:
    return _scalars(
        (f"KV heads of {local.layer}", _heads(local), _heads(remote)),
        (f"bytes per head of {local.layer}", _lengths(local), _lengths(remote)),
    )


def _heads(region: Region) -> tuple[int, int]:
    return (region.first_head, region.first_head + region.num_heads)


def _lengths(region: Region) -> tuple[int, ...]:
    return tuple(part.length for part in region.parts)
