"""From vLLM's pages of recurrent state to regions: which bytes of a page TP cuts, and how.

A layer's page has its states one behind the other: that of the convolution, if there is one, then
the temporal one. The convolution's has a row for each of the last tokens, and in it the channels of
several projections, each of which vLLM cuts by itself among the tensor-parallel ranks. So each
projection is a region of its own, whose heads are the units that are cut: heads of the model, or
groups of them, or runs of channels. A block has one token, for which the region has one part for
each row.

Where vLLM keeps the rows of each channel together (its DS layout), a part has a piece for each
channel. Rows that speculation needs beyond those that the convolution looks back at are of no use
to a peer, and are left out.
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

CHANNELS: Final = 128
"""That make a unit, where each channel could be cut off: fewer where a rank would not have whole
units, if there were up to RANKS of them."""
RANKS: Final = 64


@dataclass(frozen=True)
class Units:
    """What is cut among ranks: `number` of `size` channels (or bytes) each, on one rank."""

    name: str
    number: int
    size: int
    is_copied: bool = False
    """Whether all ranks have the same."""


@dataclass(frozen=True)
class Place:
    """Of a worker among the tensor-parallel ranks."""

    rank: int
    size: int


def state_regions(
    layer: str, page: torch.Tensor, spec: MambaSpec, module: Any, place: Place
) -> Iterator[Region]:
    """What a rank keeps of one recurrent layer.

    Args:
        layer: its name.
        page: an int8 view of shape [blocks, 1, 1, bytes of all states].
        spec: vLLM's MambaSpec.
        module: the layer itself, which knows what the spec does not say.
        place: of this rank.

    Raises:
        ConfigError: if it cannot be told how the states are cut.
    """
    kind, device = spec.mamba_type.name, page.device.type
    offset = 0
    for number, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True)):
        # Kernels of different devices read equal shapes in different ways.
        element = f"{dtype_name(dtype)} state of {kind} on {device}"
        is_convolution = number == 0 and kind != "LINEAR"
        if is_convolution:
            parts = _convolution(spec, module, place, offset)
        else:
            parts = iter([_whole(spec, shape, dtype, place, offset)])
        for units, stride, rows in parts:
            first = 0 if units.is_copied else place.rank * units.number
            yield Region(
                layer=f"{layer} {units.name}",
                base=page.data_ptr(),
                block_stride=page.stride(0),
                head_stride=stride,
                token_stride=page.stride(0),  # there is one
                first_head=first,
                num_heads=units.number,
                parts=rows,
                element=element,
            )
        offset += math.prod(shape) * dtype.itemsize


_Cut = tuple[Units, int, tuple[Part, ...]]
"""Units, the bytes from one to the next, and where the first one's rows are."""


def _whole(spec: MambaSpec, shape: Any, dtype: torch.dtype, place: Place, offset: int) -> _Cut:
    """A state whose first axis is cut; all of a unit is in one piece."""
    number, size = shape[0], math.prod(shape[1:]) * dtype.itemsize
    if spec.mamba_type.name == "MAMBA1":  # the axis has channels
        run = _channels(number, place)
        number, size = number // run, size * run
    return Units("state", number, size), size, (Part(offset, size),)


def _convolution(spec: MambaSpec, module: Any, place: Place, offset: int) -> Iterator[_Cut]:
    by_channel = is_conv_state_dim_first()
    channels, length = spec.shapes[0] if by_channel else reversed(spec.shapes[0])
    size = spec.dtypes[0].itemsize
    rows = range(length - _num_unused(spec))
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


def _num_unused(spec: MambaSpec) -> int:
    """Rows behind those that are looked back at, for tokens that speculation may reject."""
    return 0 if spec.mamba_type.name == "MAMBA1" else int(spec.num_speculative_blocks)


def _projections(spec: MambaSpec, module: Any, place: Place, channels: int) -> list[Units]:
    """Of a convolution with so many channels on this rank, in their order."""
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
    """Whether each rank has the model's only group; else each has others of several."""
    if groups > 1 or place.size == 1:
        return False
    number = getattr(getattr(module, "norm", None), "n_groups", None)
    if number not in (1, place.size):
        raise ConfigError(
            f"a layer has one group of heads on each of {place.size} ranks, and its model "
            f"{number}; allowed: 1, or {place.size}"
        )
    return bool(number == 1)


def _channels(on_rank: int, place: Place) -> int:
    """How many channels a unit has, by a rule that all engines of the model agree on."""
    total = on_rank * place.size
    run = math.gcd(total // math.gcd(total, RANKS), CHANNELS)
    return run if on_rank % run == 0 else 1
