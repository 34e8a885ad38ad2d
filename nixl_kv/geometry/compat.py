"""Why two engines cannot exchange KV, in words.

Nothing is guessed and nothing is hashed together: each differing field is named with both values,
so that the person who reads the log knows which flag to change. How the engines are cut (tensor
and pipeline parallel sizes, block sizes, physical orders, how layers are grouped) may differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from nixl_kv.geometry.blocks import num_stretches
from nixl_kv.geometry.layout import WINDOW_EDGE, CacheLayout, Group, Region
from nixl_kv.geometry.runs import Heads

MAX_STRETCHES: Final = 512
"""Into how many stretches two block sizes may cut tokens before the edges of both meet again."""

_Ranges: TypeAlias = tuple[Heads, ...]


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


def mismatches(local: Sequence[CacheLayout], remote: Sequence[CacheLayout]) -> list[Mismatch]:
    """Every reason why an engine cannot read another, in the order of what explains most.

    Args:
        local: the caches of all ranks of this engine.
        remote: the caches of all ranks of the other one.
    """
    mine, theirs = _layers(local), _layers(remote)
    found = _differing("KV cache dtype", _elements(local), _elements(remote))
    only = [sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())]
    if any(only):
        found.append(Mismatch("what only one side has of the layers", _few(only[0]), _few(only[1])))
    by_words: dict[Mismatch, list[str]] = {}
    for layer in sorted(mine.keys() & theirs.keys()):
        for mismatch in _layer_mismatches(mine[layer], theirs[layer]):
            by_words.setdefault(mismatch, []).append(layer)
    for mismatch, names in sorted(by_words.items(), key=lambda item: min(item[1])):
        words = f"{mismatch.field} of {_few(sorted(names))}"
        found.append(Mismatch(words, mismatch.local, mismatch.remote))
    return found


@dataclass(frozen=True)
class _Kind:
    """What a layer is on one rank; the ranks of an engine should agree, but need not."""

    lengths: tuple[int, ...]
    block_size: int
    entry_size: int
    window: int


@dataclass
class _Layer:
    """A layer in one engine: what all its ranks hold of it."""

    kinds: set[_Kind]
    heads: _Ranges

    def add(self, region: Region, group: Group) -> None:
        """Another rank holds this."""
        lengths = tuple(part.content for part in region.parts)
        self.kinds.add(_Kind(lengths, group.block_size, group.entry_size, group.window))
        merged: list[Heads] = []
        for first, last in sorted({*self.heads, region.heads}):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        self.heads = tuple(merged)


def _layers(layouts: Sequence[CacheLayout]) -> dict[str, _Layer]:
    found: dict[str, _Layer] = {}
    for layout in layouts:
        for group in layout.groups:
            for region in group.regions:
                found.setdefault(region.layer, _Layer(set(), ())).add(region, group)
    return found


def _layer_mismatches(mine: _Layer, theirs: _Layer) -> list[Mismatch]:
    pairs = [(here, there) for here in mine.kinds for there in theirs.kinds]
    return [
        *(
            m
            for here, there in pairs
            for m in _differing("bytes per head", here.lengths, there.lengths)
        ),
        *_differing("number of KV heads", _number(mine.heads), _number(theirs.heads)),
        *(m for pair in pairs for m in (*_windows(*pair), *_block_sizes(*pair))),
    ]


def _differing(field: str, mine: object, theirs: object) -> list[Mismatch]:
    return [] if mine == theirs else [Mismatch(field, mine, theirs)]


def _windows(mine: _Kind, theirs: _Kind) -> list[Mismatch]:
    """Prefill must keep at least what decode looks at."""
    enough = not theirs.window or 0 < mine.window <= theirs.window
    return [] if enough else [Mismatch("sliding window", mine.window or None, theirs.window)]


def _block_sizes(mine: _Kind, theirs: _Kind) -> list[Mismatch]:
    found = []
    if num_stretches(mine.block_size, theirs.block_size) > MAX_STRETCHES:
        words = "block size, whose edges hardly ever meet,"
        found.append(Mismatch(words, mine.block_size, theirs.block_size))
    # Decode fills its blocks from their first token on: prefill must have kept that.
    if theirs.window and WINDOW_EDGE % mine.entry_size and theirs.entry_size % mine.entry_size:
        words = f"block size, which must divide {WINDOW_EDGE} or prefill's for a sliding window,"
        found.append(Mismatch(words, mine.entry_size, theirs.entry_size))
    return found


def _elements(layouts: Sequence[CacheLayout]) -> str:
    return ", ".join(sorted({name for layout in layouts for name in layout.element.split(", ")}))


def _number(heads: _Ranges) -> object:
    """Where some are missing, which there are: half-open ranges."""
    return heads[0][1] if len(heads) == 1 and heads[0][0] == 0 else heads


def _few(layers: Sequence[str]) -> str:
    """The first of them by name, the others by number."""
    more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
    return f"{layers[0]}{more}" if layers else "nothing"
