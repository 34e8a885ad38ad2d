"""Reads of what prefill has packed, over real NIXL: ranks and blocks cut differently."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from harness.local.caches import Cache, Sizes
from harness.local.engine import LocalEngine
from nixl_kv.protocol.events import OfferEnd
from support.pair import CONFIG

pytest.importorskip("nixl_kv.reading.staged")

NUM_BLOCKS, TOKENS, NUM_TOKENS, HEADS = 48, 16, 500, 4
SLOT_BYTES = 6 * 4 * 64 * 256 * 3  # three of the largest blocks
WHOLE = Sizes(layers=6, blocks=NUM_BLOCKS, heads=HEADS, tokens=TOKENS, key=128, value=128)


def caches(tp: int, tokens: int, order: str) -> list[Cache]:
    sizes = replace(WHOLE, heads=HEADS // tp, tokens=tokens)
    return [Cache(sizes, order, rank * HEADS // tp) for rank in range(tp)]


def kv_of(cache: Cache, table: list[int]) -> np.ndarray:
    """Shape [layer, head, token, content]."""
    blocks = cache.blocks(table).transpose(0, 2, 1, 3, 4)
    return blocks.reshape(*blocks.shape[:2], -1, blocks.shape[-1])[:, :, :NUM_TOKENS]


@pytest.mark.nixl
@pytest.mark.parametrize("tokens", [(16, 64), (64, 16)], ids=str)
@pytest.mark.parametrize(
    ("tp", "num_slots"), [((1, 2), 16), ((2, 1), 16), ((1, 4), 4)], ids=["1to2", "2to1", "1to4"]
)
def test_chunks_arrive_over_nixl(
    tp: tuple[int, int], tokens: tuple[int, int], num_slots: int
) -> None:
    """Two loads, of several chunks each: four readers share a ring of four slots, as on GPUs."""
    nixl = pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
    sides = [caches(*cut, "LBHNC") for cut in zip(tp, tokens, strict=True)]
    rng = np.random.default_rng(1)
    tables = [rng.permutation(NUM_BLOCKS)[: -(-NUM_TOKENS // size)].tolist() for size in tokens]
    for number, cache in enumerate(sides[0]):
        cache.fill(number)
    whole = np.concatenate([kv_of(cache, tables[0]) for cache in sides[0]], axis=1)
    with contextlib.ExitStack() as stack:
        prefill, decode = (
            LocalEngine(
                name,
                [cache.layout() for cache in side],
                nixl.NixlTransport,
                config=replace(CONFIG, path="staged", verify=1.0),
                roles=name,
                staging_bytes=num_slots * SLOT_BYTES,
                num_ring_slots=num_slots,
            )
            for name, side in zip(("prefill", "decode"), sides, strict=True)
        )
        stack.callback(prefill.close)
        stack.callback(decode.close)
        for request in ("1", "2"):
            decode.prepare_load(
                f"d{request}", prefill.offer(f"p{request}", [tables[0]], NUM_TOKENS)
            )
            decode.start_load(f"d{request}", [tables[1]], range(NUM_TOKENS), verify=True)
            reports = decode.wait_load(f"d{request}")
            assert {(report.failure, report.verified) for report in reports} == {(None, True)}
            reads = [read for report in reports for read in report.reads]
            assert {(read.path, read.direct_bytes) for read in reads} == {("staged", 0)}
            assert set(prefill.wait_offer(f"p{request}")) == {OfferEnd.READ}
            arrived = np.concatenate([kv_of(cache, tables[1]) for cache in sides[1]], axis=1)
            assert np.array_equal(arrived, whole)
            for cache in sides[1]:
                cache.memory[...] = 0
