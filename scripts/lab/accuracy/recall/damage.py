"""What can be wrong with KV that came from elsewhere, done to the KV of a prompt on purpose."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from lab.accuracy.recall.model import KV

BLOCK = 16  # tokens, as vLLM's
Damage = Callable[[Tensor], Tensor]
"""From keys or values, (rows, KV heads, tokens, head_dim), to what arrived instead."""


def zeroed(part: Tensor) -> Tensor:
    """Nothing arrived."""
    return torch.zeros_like(part)


def stale(part: Tensor) -> Tensor:
    """What arrived is another prompt's: the next row's."""
    return part.roll(-1, dims=0)


def shifted(part: Tensor) -> Tensor:
    """Every head holds what belongs to the next one."""
    return part.roll(-1, dims=1)


def moved(part: Tensor) -> Tensor:
    """All blocks arrived, one place too far."""
    return part.roll(BLOCK, dims=2)


def partly_stale(part: Tensor) -> Tensor:
    """One block in ten is another prompt's."""
    block = torch.arange(part.shape[2], device=part.device) // BLOCK
    return torch.where((block % 10 == 0)[:, None], stale(part), part)


DAMAGES: Final[Mapping[str, Damage]] = {
    "zeroed": zeroed,
    "stale": stale,
    "shifted": shifted,
    "moved": moved,
    "partly stale": partly_stale,
}


def damaged(
    kv: Sequence[KV], damage: Damage, *, layer: int | None = None, head: int | None = None
) -> list[KV]:
    """KV of all layers, one of them or all damaged, in one head or all; the given one stays."""
    return [
        (_in_head(keys, damage, head), _in_head(values, damage, head))
        if layer in {None, number}
        else (keys, values)
        for number, (keys, values) in enumerate(kv)
    ]


def _in_head(part: Tensor, damage: Damage, head: int | None) -> Tensor:
    if head is None:
        return damage(part)
    mine = torch.arange(part.shape[1], device=part.device) == head
    return torch.where(mine[:, None, None], damage(part), part)
