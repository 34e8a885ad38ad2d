"""Turns vLLM's pages of recurrent state into regions: which bytes of a page TP shards, and how.

A layer's page contains its convolution state, if any, and then its temporal state. The convolution
state has a row for each of the last tokens. A row has the channels of several projections, and vLLM
shards each projection separately over the TP ranks. So each projection is a region of its own. Its
"heads" are the units of sharding: heads of the model, groups of heads, or runs of channels. A block
is one token, and the region has one part for each row.

In vLLM's DS layout, which keeps the rows of a channel together, a part has one piece for each
channel. Speculative decoding adds rows beyond the convolution's window. No peer needs those, so no
region contains them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.kv_cache_interface import MambaSpec

from nixl_kv.connector.vllm_config import dtype_name
from nixl_kv.errors import ConfigError
from nixl_kv.geometry.layout import Part, Region

# Channels per unit where vLLM may shard at any channel. Smaller if 64 ranks (RANKS) could not each
# have whole units.
CHANNELS: Final = 128
RANKS: Final = 64


@dataclass(frozen=True)
class Units:
    """The units of one projection or state that one rank holds."""

    name: str
    number: int
    size: int  # channels of a projection, bytes of a state
    is_copied: bool = False  # whether all ranks hold the same units


@dataclass(frozen=True)
class Place:
    """A worker's TP rank and the TP size."""

    rank: int
    size: int


def state_regions(
    layer: str, page: torch.Tensor, spec: MambaSpec, module: Any, place: Place
) -> Iterator[Region]:
    """The regions of one recurrent layer on a rank.

    `page` is an int8 view of shape [blocks, 1, 1, bytes of all states]. `module` is vLLM's layer,
    for facts that `spec` lacks.

    Raises:
        ConfigError: if the model does not say how its states are sharded.
    """
    kind, device = spec.mamba_type.name, page.device.type
    offset = 0
    for number, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True)):
        # Kernels of different devices store equal shapes differently.
        element = f"{dtype_name(dtype)} state of {kind} on {device}"
        is_convolution = number == 0 and kind != "LINEAR"
        if is_convolution:
            cuts = _convolution(spec, module, place, offset)
        else:
            cuts = iter([_whole(spec, shape, dtype, place, offset)])
        for units, stride, rows in cuts:
            yield Region(
                layer=f"{layer} {units.name}",
                base=page.data_ptr(),
                block_stride=page.stride(0),
                head_stride=stride,
                token_stride=page.stride(0),  # unused: a block is one token
                first_head=0 if units.is_copied else place.rank * units.number,
                num_heads=units.number,
                parts=rows,
                element=element,
            )
        offset += math.prod(shape) * dtype.itemsize


# The units, the bytes from one unit to the next, and the rows of the first unit.
_Cut = tuple[Units, int, tuple[Part, ...]]


def _whole(spec: MambaSpec, shape: Any, dtype: torch.dtype, place: Place, offset: int) -> _Cut:
    """A state sharded along its first axis. Each unit is contiguous."""
    number, size = shape[0], math.prod(shape[1:]) * dtype.itemsize
    if spec.mamba_type.name == "MAMBA1":  # the axis is channels
        run = _channels(number, place)
        number, size = number // run, size * run
    return Units("state", number, size), size, (Part(offset, size),)


def _convolution(spec: MambaSpec, module: Any, place: Place, offset: int) -> Iterator[_Cut]:
    by_channel = is_conv_state_dim_first()
    channels, length = spec.shapes[0] if by_channel else reversed(spec.shapes[0])
    size = spec.dtypes[0].itemsize
    # Rows beyond the convolution's window are for tokens that speculation may reject.
    num_unused = 0 if spec.mamba_type.name == "MAMBA1" else int(spec.num_speculative_blocks)
    rows = range(length - num_unused)
    start = 0
    for units in _projections(spec, module, place, channels):
        if by_channel:
            begin, stride = offset + start * length * size, units.size * length * size
            parts = [Part(begin + row * size, size, units.size, length * size) for row in rows]
        else:
            stride = units.size * size
            parts = [Part(offset + (row * channels + start) * size, stride) for row in rows]
        yield units, stride, tuple(parts)
        start += units.number * units.size


def _projections(spec: MambaSpec, module: Any, place: Place, channels: int) -> list[Units]:
    """The projections of a convolution with `channels` on this rank, in order."""
    match spec.mamba_type.name:
        case "GDN_ATTN":
            heads, value_size, key_size = spec.shapes[1]
            keys = (channels - heads * value_size) // 2 // key_size
            return [
                Units("query", keys, key_size),
                Units("key", keys, key_size),
                Units("value", heads, value_size),
            ]
        case "MAMBA2":
            heads, head_size, state_size = spec.shapes[1]
            groups = (channels - heads * head_size) // 2 // state_size
            is_copied = _has_copies(module, groups, place)
            return [
                Units("x", heads, head_size),
                Units("B", groups, state_size, is_copied),
                Units("C", groups, state_size, is_copied),
            ]
        case _:
            is_copied = spec.tp_replicated
            run = _channels(channels, Place(0, 1) if is_copied else place)
            return [Units("convolution", channels // run, run, is_copied)]


def _has_copies(module: Any, groups: int, place: Place) -> bool:
    """Whether every rank holds the model's only group, instead of its own share of several."""
    if groups > 1 or place.size == 1:
        return False
    number = getattr(getattr(module, "norm", None), "n_groups", None)
    if number not in (1, place.size):
        raise ConfigError(
            f"a recurrent layer has one group of heads on each of {place.size} ranks, and its "
            f"model has {number} groups; allowed: 1 or {place.size}"
        )
    return bool(number == 1)


def _channels(on_rank: int, place: Place) -> int:
    """Channels per unit, by a rule that gives the same result on all engines of the model."""
    total = on_rank * place.size
    run = math.gcd(total // math.gcd(total, RANKS), CHANNELS)
    return run if on_rank % run == 0 else 1
