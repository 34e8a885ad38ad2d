"""The figures of `nixl-kv plan` are the planner's, whatever the engines look like."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from nixl_kv.cli.comparison import compare, example_reads, run_lengths
from nixl_kv.cli.engines import Engine, engine_from_description
from nixl_kv.geometry.model_layouts import EngineShape, ModelShape, build_layouts
from support.records import description

MODEL = ModelShape(6, 4, (8, 8), "bfloat16")
ORDERS = ("LBHNC", "LBNHC", "BHLNC", "LB2HNC")
CUTS = (((1, 4), (1, 4)), ((2, 4), (1, 12)), ((1, 8), (4, 12)))
WINDOWS = ModelShape(6, 4, (8, 8), "bfloat16", 24, (0, 1, 3, 4))


def engine(model: ModelShape, shape: EngineShape) -> Engine:
    return Engine("", {}, tuple(build_layouts(model, shape)))


@pytest.mark.parametrize(
    ("model", "here", "there", "cut"),
    [
        *[(MODEL, "LBHNC", "BHLNC", cut) for cut in CUTS],
        *[(WINDOWS, here, there, CUTS[-1]) for here in ORDERS for there in ORDERS],
    ],
    ids=str,
)
def test_run_lengths_add_up_to_what_the_planner_reads(
    model: ModelShape, here: str, there: str, cut: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    decode, prefill = (
        engine(model, EngineShape(tp=tp, block_size=block, num_blocks=300, order=order))
        for (tp, block), order in zip(cut, (here, there), strict=True)
    )
    comparison = compare(decode, prefill, 96)
    assert comparison.pairs
    for pair in comparison.pairs:
        for reads in (
            example_reads(pair.plan, 96),
            example_reads(pair.plan, 96, scattered=False),
            example_reads(pair.plan, 96, windows=False),
        ):
            lengths = run_lengths(pair.plan, reads)
            assert len(lengths) == reads.num_runs
            assert lengths.sum() == reads.num_bytes
        figures = pair.figures
        whole = example_reads(pair.plan, 96, windows=False)
        assert whole.num_runs == figures.runs_per_period * 96 // figures.period
        assert whole.num_bytes == figures.bytes_per_token * 96
        assert figures.descriptors_in_a_row <= figures.descriptors


def test_every_rank_reads_each_of_its_heads_once() -> None:
    decode, prefill = (
        engine(MODEL, EngineShape(tp=tp, pp=pp, num_blocks=300)) for tp, pp in ((8, 2), (2, 3))
    )
    comparison = compare(decode, prefill, None)
    read = sum(pair.figures.bytes_per_token for pair in comparison.pairs)
    assert read == 2 * 6 * 4 * 16  # eight ranks hold two copies of four heads


def test_scattered_blocks_are_never_neighbours() -> None:
    one = engine(MODEL, EngineShape(num_blocks=100))
    (pair,) = compare(one, one, 50 * 16).pairs
    reads = example_reads(pair.plan, 50 * 16)
    assert reads.num_runs == 50 * 6
    assert (np.diff(reads.local[:50]) == 2).all()
    assert (np.diff(reads.remote[:50]) == -2).all()


def test_a_prefill_may_have_more_than_decode_but_not_less() -> None:
    plain = engine(MODEL, EngineShape())
    described = msgspec.structs.replace(description(), extras={"draft": "one"})
    drafting = replace(plain, extras=engine_from_description(described).extras)
    assert compare(plain, drafting, 100).mismatches == ()
    assert compare(drafting, drafting, 100).mismatches == ()
    (mismatch,) = compare(drafting, plain, 100).mismatches
    assert str(mismatch) == "draft is 'one' here and None there"
