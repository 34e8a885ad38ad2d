"""Where the states of recurrent layers are, against pages that are filled as vLLM's layers do."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateShapeCalculator,
    is_conv_state_dim_first,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from nixl_kv.connector import kv_layout
from nixl_kv.connector.kv_layout import Place, state_regions
from nixl_kv.errors import ConfigError
from nixl_kv.geometry import match
from nixl_kv.geometry.layout import CacheLayout, Group, Span, Table
from nixl_kv.geometry.match import assign, holdings
from nixl_kv.geometry.plan import plan
from support.oracle import copy_pieces

ROWS, BLOCKS, PADDING = 3, 4, 64
CONV, STATE = torch.bfloat16, torch.float32
"""Their types."""

Truth = dict[str, np.ndarray]
"""For each region its content in the whole model: axes [unit, row, bytes]."""


@dataclass(frozen=True)
class Model:
    kind: str
    projections: Mapping[str, tuple[int, int]]
    """The convolution's projections, in their order: units and channels of each."""
    state: tuple[int, ...] = ()
    """The whole model's temporal state."""
    copied: frozenset[str] = frozenset()
    """Projections that all ranks have."""
    unit: int = 1
    """How many of the state's first axis are one unit."""

    def shapes(self, tp: int, spare: int, by_channel: bool) -> list[tuple[int, ...]]:  # noqa: FBT001
        channels = sum(
            number * size // (1 if name in self.copied else tp)
            for name, (number, size) in self.projections.items()
        )
        rows = ROWS + spare
        conv = (channels, rows) if by_channel else (rows, channels)
        shapes: list[tuple[int, ...]] = [conv] if self.projections else []
        return [*shapes, (self.state[0] // tp, *self.state[1:])] if self.state else shapes

    def truth(self) -> Truth:
        rng = np.random.default_rng(0)
        truth = {
            name: rng.integers(0, 256, (number, ROWS, size * CONV.itemsize), np.uint8)
            for name, (number, size) in self.projections.items()
        }
        if self.state:
            number = self.state[0] // self.unit
            nbytes = int(np.prod(self.state)) * STATE.itemsize // number
            truth["state"] = rng.integers(0, 256, (number, 1, nbytes), np.uint8)
        return truth


MODELS = {
    "gated delta net": Model(
        "GDN_ATTN", {"query": (4, 32), "key": (4, 32), "value": (8, 16)}, (8, 16, 32)
    ),
    "Kimi's delta attention": Model(
        "GDN_ATTN", {"query": (4, 32), "key": (4, 32), "value": (4, 32)}, (4, 32, 32)
    ),
    "Mamba2": Model("MAMBA2", {"x": (8, 16), "B": (4, 32), "C": (4, 32)}, (8, 16, 32)),
    "Mamba2, one group": Model(
        "MAMBA2", {"x": (8, 16), "B": (1, 32), "C": (1, 32)}, (8, 16, 32), copied=frozenset("BC")
    ),
    "Mamba1": Model("MAMBA1", {"convolution": (64, 4)}, (256, 8), unit=4),
    "short convolution": Model("SHORT_CONV", {"convolution": (64, 4)}),
    "linear attention": Model("LINEAR", {}, (8, 16, 16)),
}


def share(content: np.ndarray, place: Place, *, is_copied: bool) -> np.ndarray:
    if is_copied:
        return content
    size = len(content) // place.size
    return content[place.rank * size :][:size]


def page_of(model: Model, truth: Truth, place: Place, *, spare: int, by_channel: bool) -> bytes:
    """A page as vLLM's layers write it."""
    page = b""
    if model.projections:
        projections = [
            share(truth[name], place, is_copied=name in model.copied) for name in model.projections
        ]
        # [rows, channels, bytes of a channel]
        rows = np.concatenate(
            [p.swapaxes(0, 1).reshape(ROWS, -1, CONV.itemsize) for p in projections], axis=1
        )
        rows = np.concatenate([rows, np.full((spare, *rows.shape[1:]), 255, np.uint8)])
        page += (rows.swapaxes(0, 1) if by_channel else rows).tobytes()
    if model.state:
        page += share(truth["state"], place, is_copied=False).tobytes()
    return page


def spec_of(model: Model, tp: int, *, spare: int, by_channel: bool) -> MambaSpec:
    shapes = model.shapes(tp, spare, by_channel)
    return MambaSpec(
        block_size=16,
        shapes=tuple(shapes),
        dtypes=(CONV, STATE)[-len(shapes) :] if model.state else (CONV,),
        mamba_type=MambaAttentionBackendEnum[model.kind],
        num_speculative_blocks=spare,
    )


def layer_of(model: Model) -> Any:
    groups = model.projections.get("B", (0, 0))[0]
    return SimpleNamespace(norm=SimpleNamespace(n_groups=groups))


@pytest.mark.parametrize("tp", [1, 2])
def test_the_shapes_here_are_vllms(tp: int) -> None:
    """In whichever order this process keeps a convolution's state."""
    by_channel = is_conv_state_dim_first()
    calculate = MambaStateShapeCalculator
    model = MODELS["gated delta net"]
    vllms = calculate.gated_delta_net_state_shape(tp, 4, 8, 32, 16, ROWS + 1, 2)
    assert list(vllms) == model.shapes(tp, 2, by_channel)
    model = MODELS["Mamba2"]
    vllms = calculate.mamba2_state_shape(tp, 128, 4, 8, 16, 32, ROWS + 1, 2)
    assert list(vllms) == model.shapes(tp, 2, by_channel)


def test_copies_and_groups_that_ranks_divide_are_told_apart() -> None:
    model = MODELS["Mamba2, one group"]
    spec = spec_of(model, 4, spare=0, by_channel=is_conv_state_dim_first())
    view = torch.zeros(1, 1, 1, spec.state_content_size_bytes, dtype=torch.int8)

    def groups(number: int | None) -> list[int]:
        layer = SimpleNamespace(norm=SimpleNamespace(n_groups=number))
        regions = state_regions("layers.0", view, spec, layer, Place(3, 4))
        return [one.first_head for one in regions if one.layer.endswith(("B", "C"))]

    assert groups(1) == [0, 0]
    assert groups(4) == [3, 3]
    with pytest.raises(ConfigError, match="its model has None groups; allowed: 1 or 4"):
        groups(None)


# --- two engines


@dataclass(frozen=True)
class Side:
    """How one of two engines keeps the states of a layer."""

    tp: int
    spare: int
    by_channel: bool
    block: int
    """Which of its blocks has the state."""


class Rank:
    """One rank of it, with a page in its block, or with other bytes there."""

    def __init__(self, model: Model, side: Side, rank: int, truth: Truth | None) -> None:
        self.model, self.side, self.place = model, side, Place(rank, side.tp)
        self.spec = spec_of(model, side.tp, spare=side.spare, by_channel=side.by_channel)
        size = self.spec.state_content_size_bytes
        self.memory = torch.full((BLOCKS, size + PADDING), 77, dtype=torch.int8)
        if truth is not None:
            self.memory[side.block, :size] = torch.frombuffer(
                bytearray(self.page(truth)), dtype=torch.int8
            )
        with patch.object(kv_layout, "is_conv_state_dim_first", lambda: side.by_channel):
            view = self.memory[:, None, None, :size]
            regions = state_regions("layers.0", view, self.spec, layer_of(model), self.place)
            group = Group(1, BLOCKS, 1, tuple(regions), window=1)
        span = Span(self.memory.data_ptr(), self.memory.nbytes)
        self.layout = CacheLayout((group,), "DRAM", 0, (span,))

    def page(self, truth: Truth) -> bytes:
        side = self.side
        return page_of(self.model, truth, self.place, spare=side.spare, by_channel=side.by_channel)

    def check(self, truth: Truth) -> None:
        """It has the model's state, and nothing else has changed."""
        expected = np.full(self.memory.shape, 77, np.uint8)
        page = np.frombuffer(self.page(truth), np.uint8)
        spare = self._spare()
        expected[self.side.block, : len(page)] = np.where(spare, 77, page)
        assert np.array_equal(self.memory.view(torch.uint8).numpy(), expected)

    def _spare(self) -> np.ndarray:
        """Which bytes of a page belong to no row of the convolution that is looked back at."""
        nothing = {name: np.zeros_like(content) for name, content in self.model.truth().items()}
        return np.frombuffer(self.page(nothing), np.uint8) == 255


def sides(model: Model) -> st.SearchStrategy[Side]:
    spare = st.just(0) if model.kind == "MAMBA1" else st.integers(0, 3)
    return st.builds(
        Side, st.sampled_from([1, 2, 4]), spare, st.booleans(), st.integers(1, BLOCKS - 1)
    )


@settings(max_examples=40)
@given(st.data())
def test_any_two_engines_exchange_a_state(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from([*MODELS.values()]))
    prefill, decode = data.draw(sides(model)), data.draw(sides(model))
    local = data.draw(st.integers(0, 40))
    tokens = range(local, data.draw(st.integers(local + 1, 60)))
    truth = model.truth()
    remotes = [Rank(model, prefill, rank, truth) for rank in range(prefill.tp)]
    readers = [Rank(model, decode, rank, None) for rank in range(decode.tp)]
    layouts = [[rank.layout for rank in side] for side in (readers, remotes)]
    assert match.layout_mismatches(*layouts) == []
    shares = assign(*([holdings(layout) for layout in side] for side in layouts))
    tables = [Table.of([side.block], first=tokens.stop - 1) for side in (decode, prefill)]
    for reader, share in zip(readers, shares, strict=True):
        for number, heads in share.items():
            planned = plan(reader.layout, remotes[number].layout, heads)
            copy_pieces(planned, planned.reads(tables[:1], tables[1:], tokens))
        reader.check(truth)
