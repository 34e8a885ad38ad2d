"""KV that FlashInfer wrote on one rank, moved to the ranks of another cut, means the same there."""

from typing import Any

import pytest

from support import documented

torch = pytest.importorskip("torch")
flashinfer = pytest.importorskip("flashinfer")
pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)

pytestmark = pytest.mark.gpu

LAYERS, BLOCKS, PAGE, SIZE = 3, 64, 16, 128
HEADS, QUERIES = 8, 32
DTYPE = torch.bfloat16
TOKENS = 5 * PAGE + 3


def pages(order: list[int]) -> tuple[Any, Any, Any]:
    """One request's block table as FlashInfer takes it: (indptr, indices, last page's length)."""
    device = {"device": "cuda", "dtype": torch.int32}
    return (
        torch.tensor([0, len(order)], **device),
        torch.tensor(order, **device),
        torch.tensor([(TOKENS - 1) % PAGE + 1], **device),
    )


def cache(heads: int) -> Any:
    return torch.zeros(LAYERS, BLOCKS, 2, heads, PAGE, SIZE, dtype=DTYPE, device="cuda")


def append(to: Any, order: list[int]) -> None:
    """Let FlashInfer write a prompt's K and V into its blocks."""
    indptr, indices, last = pages(order)
    lengths = flashinfer.get_seq_lens(indptr, last, PAGE)
    starts = torch.tensor([0, TOKENS], device="cuda", dtype=torch.int32)
    batch, positions = flashinfer.get_batch_indices_positions(starts, lengths, TOKENS)
    for layer in to:
        key, value = torch.randn(2, TOKENS, HEADS, SIZE, dtype=DTYPE, device="cuda")
        flashinfer.append_paged_kv_cache(
            key, value, batch, positions, layer, indices, indptr, last, kv_layout="HND"
        )


def attention(of: Any, order: list[int], queries: Any) -> Any:
    """The decode kernel's output for the cache, [layers, query heads, head size]."""
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
    heads = (queries.shape[1], of.shape[3])
    wrapper.plan(*pages(order), *heads, SIZE, PAGE, q_data_type=DTYPE, kv_data_type=DTYPE)
    return torch.cat([wrapper.run(q[None], layer) for q, layer in zip(queries, of, strict=True)])


@pytest.mark.parametrize("tp", [1, 2, 4], ids="TP1 to TP{}".format)
def test_attention_is_the_same_on_both_sides(tp: int) -> None:
    library = documented.library()
    torch.manual_seed(0)
    whole, prefill_table = cache(HEADS), [9, 3, 4, 40, 41, 7]
    table = [1, 2, 30, 29, 8, 50]
    append(whole, prefill_table)
    queries = torch.randn(LAYERS, QUERIES, SIZE, dtype=DTYPE, device="cuda")
    expected = attention(whole, prefill_table, queries)
    torch.cuda.synchronize()
    prefill = (library.agent(library.describe(whole)), library.describe(whole))
    for rank in range(tp):
        first, count = rank * HEADS // tp, HEADS // tp
        part = cache(count)
        layout = library.describe(part, first)
        decode = (library.agent(layout), layout)
        library.read(decode, prefill, (table, prefill_table), TOKENS)
        heads = slice(rank * QUERIES // tp, (rank + 1) * QUERIES // tp)
        assert torch.equal(part[:, table], whole[:, prefill_table, :, first : first + count])
        assert torch.equal(attention(part, table, queries[:, heads]), expected[:, heads])
        decode[0].close()
    prefill[0].close()


def test_two_ranks_of_prefill_are_read_by_one_of_decode() -> None:
    library = documented.library()
    torch.manual_seed(1)
    whole, prefill_table = cache(HEADS), [9, 3, 4, 40, 41, 7]
    table = [1, 2, 30, 29, 8, 50]
    append(whole, prefill_table)
    halves = [half.contiguous() for half in whole.chunk(2, dim=3)]
    joined = cache(HEADS)
    torch.cuda.synchronize()
    layout = library.describe(joined)
    decode = (library.agent(layout), layout)
    for rank, half in enumerate(halves):
        remote = library.describe(half, rank * HEADS // 2)
        library.read(decode, (library.agent(remote), remote), (table, prefill_table), TOKENS)
    queries = torch.randn(LAYERS, QUERIES, SIZE, dtype=DTYPE, device="cuda")
    assert torch.equal(attention(joined, table, queries), attention(whole, prefill_table, queries))
