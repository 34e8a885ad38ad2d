"""The figures are the planner's, whatever the engines look like."""

import numpy as np
import pytest

from nixl_kv.cli.engines import Engine
from nixl_kv.cli.figures import Request, compare, run_lengths
from nixl_kv.cli.tables import human, layers_of, ranges
from nixl_kv.geometry.shapes import EngineShape, ModelShape, layouts

MODEL = ModelShape(6, 4, (8, 8), "bfloat16")
ORDERS = ("LBHNC", "LBNHC", "BHLNC", "LB2HNC")
WINDOWS = ModelShape(6, 4, (8, 8), "bfloat16", 24, (0, 1, 3, 4))


def engine(model: ModelShape, shape: EngineShape) -> Engine:
    return Engine("", {}, tuple(layouts(model, shape)))


@pytest.mark.parametrize("model", [MODEL, WINDOWS], ids=["alike", "windows"])
@pytest.mark.parametrize("here", ORDERS)
@pytest.mark.parametrize("there", ORDERS)
@pytest.mark.parametrize("cut", [((1, 4), (1, 4)), ((2, 4), (1, 12)), ((1, 8), (4, 12))], ids=str)
def test_runs_add_up(
    model: ModelShape, here: str, there: str, cut: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    decode, prefill = (
        engine(model, EngineShape(tp=tp, block_size=block, num_blocks=300, order=order))
        for (tp, block), order in zip(cut, (here, there), strict=True)
    )
    found = compare(decode, prefill, 96)
    assert found.links
    for link in found.links:
        for request in (Request(96), Request(96, scattered=False), Request(96, windows=False)):
            reads = request.reads(link.plan)
            lengths = run_lengths(link.plan, reads)
            assert len(lengths) == reads.num_runs
            assert lengths.sum() == reads.num_bytes
        figures = link.figures
        whole = Request(96, windows=False).reads(link.plan)
        assert whole.num_runs == figures.runs_per_period * 96 // figures.period
        assert whole.num_bytes == figures.bytes_per_token * 96
        assert figures.descriptors_in_a_row <= figures.descriptors


def test_all_of_the_model_is_read_once_by_each_that_holds_it() -> None:
    decode, prefill = (
        engine(MODEL, EngineShape(tp=tp, pp=pp, num_blocks=300)) for tp, pp in ((8, 2), (2, 3))
    )
    found = compare(decode, prefill, None)
    read = sum(link.figures.bytes_per_token for link in found.links)
    assert read == 2 * 6 * 4 * 16  # eight ranks hold two copies of four heads


def test_scattered_blocks_are_never_neighbours() -> None:
    one = engine(MODEL, EngineShape(num_blocks=100))
    (link,) = compare(one, one, 50 * 16).links
    reads = Request(50 * 16).reads(link.plan)
    assert reads.num_runs == 50 * 6
    assert (np.diff(reads.local[:50]) == 2).all()
    assert (np.diff(reads.remote[:50]) == -2).all()


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1179648, "1.12 MiB"),
        (2**30, "1 GiB"),
        (5 * 2**40, "5.00 TiB"),
        (2**50, "1,024.00 TiB"),
        (0.5, "0.5 B"),
    ],
)
def test_human(count: float, words: str) -> None:
    assert human(count) == words


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([3], "3"),
        (range(4), "0-3"),
        ([5, 0, 1, 2], "0-2, 5"),
        ([0, 2, 4], "0, 2, 4"),
        ([0, 2, 4, 6], "4 of 0-6"),
    ],
)
def test_ranges(numbers: list[int], words: str) -> None:
    assert ranges(numbers) == words


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["model.layers.0.self_attn", "model.layers.1.self_attn"], "0-1"),
        (["a.0", "b.0"], "2"),
        (["a.0.1", "a.0.2"], "2"),
        (["a"], "1"),
    ],
)
def test_layers(names: list[str], words: str) -> None:
    assert layers_of(names) == words
