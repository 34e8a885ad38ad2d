"""Lets vLLM serve MiniMax-M3 on a CPU: PyTorch stands in for its CUDA operations.

Python imports this file at its start if PYTHONPATH names its folder. vLLM has no kernels of this
model for CPUs, and Triton's interpreter takes minutes for a prompt. The caches, their shapes and
their contents are vLLM's own.
"""

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

BLOCK = 128  # tokens of a block of the caches, and of one that attention takes or leaves
SIZE = 128  # of a head, and of an index key

FOLDER = Path(__file__).resolve().parent.parent

# The model's module also imports code for pictures.
runpy.run_path(str(FOLDER / "no_torchvision" / "sitecustomize.py"))


def normalized(x: Any, weight: Any, epsilon: float) -> Any:
    wide = x.float()
    scale = (wide.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * scale * (1 + weight.float())).to(x.dtype)


class Inserted(NamedTuple):
    """The parameters of vLLM's operation behind the first, in its order."""

    q: Any  # weights of norms, as the next and those of the index
    k: Any
    cos_sin: Any
    positions: Any
    heads: int
    kv_heads: int
    rotary_dim: int
    epsilon: float
    index_q: Any = None
    index_k: Any = None
    index_heads: int = 0
    slots: Any = None
    index_slots: Any = None
    kv_cache: Any = None
    index_cache: Any = None
    block_size: int = BLOCK
    q_out: Any = None
    index_q_out: Any = None
    cache_dtype: str = "auto"


def replace_norm_and_insert(module: Any) -> None:
    """FlashInfer's norm, and vLLM's operation before attention."""
    torch = module.torch

    def forward(self: Any, x: Any, residual: Any = None) -> Any:
        if residual is None:
            return normalized(x, self.weight, self.variance_epsilon)
        total = residual + x
        return normalized(total, self.weight, self.variance_epsilon), total

    def rotated(x: Any, cos: Any, sin: Any) -> Any:
        width = cos.shape[-1]
        first, second = x[..., :width].float(), x[..., width : 2 * width].float()
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat([*(part.to(x.dtype) for part in turned), x[..., 2 * width :]], dim=-1)

    def insert(qkv: Any, *arguments: Any, **_: Any) -> None:
        """Normalize and rotate Q, K and the index keys in place, and store them."""
        given = Inserted(*arguments)
        heads, index_heads = given.kv_heads, given.index_heads
        counts = [given.heads, heads, heads, *([index_heads, 1] if index_heads else [])]
        weights = [given.q, given.k, None, given.index_q, given.index_k]
        angles = given.cos_sin[given.positions].float()
        cos, sin = (part[:, None] for part in angles.chunk(2, dim=-1))
        parts = [
            part.unflatten(-1, (-1, SIZE)) for part in qkv.split([SIZE * n for n in counts], -1)
        ]
        for part, weight in zip(parts, weights, strict=False):
            if weight is not None:
                part.copy_(rotated(normalized(part, weight, given.epsilon), cos, sin))
        if given.kv_cache is None:
            return
        given.q_out.copy_(parts[0].flatten(1))
        given.index_q_out.copy_(parts[3].flatten(1))
        stored = given.slots >= 0
        cache, at = given.kv_cache, given.slots[stored]
        pairs = torch.cat([parts[1], parts[2]], dim=-1)[stored]
        cache[at // BLOCK, :, at % BLOCK] = pairs.to(cache.dtype)
        cache, at = given.index_cache, given.index_slots[stored]
        cache[at // BLOCK, at % BLOCK] = parts[4][stored, 0].to(cache.dtype)

    module.MiniMAXGemmaRMSNorm.forward = forward
    operations = ModuleType("operations")
    operations.fused_minimax_m3_qknorm_rope_kv_insert = insert  # type: ignore[attr-defined]
    module.ops = operations


class Rows(NamedTuple):
    """A request's part of a step."""

    span: slice  # among the step's queries
    positions: Any  # of these queries in the request
    length: int  # of the request, with this step's tokens
    blocks: Any  # its blocks, of `length` tokens


def rows_of(metadata: Any, torch: Any) -> Iterator[Rows]:
    decode, prefill, found = metadata.decode, metadata.prefill, []
    if decode is not None:
        starts = [decode.decode_query_len * number for number in range(len(decode.seq_lens) + 1)]
        found.append((starts, decode))
    if prefill is not None:
        found.append(((prefill.cu_seqlens_q + metadata.num_decode_tokens).tolist(), prefill))
    for starts, part in found:
        for number, length in enumerate(part.seq_lens.tolist()):
            span = slice(starts[number], starts[number + 1])
            positions = torch.arange(length - span.stop + span.start, length)
            blocks = part.block_table[number][: -(-length // BLOCK)].long()
            yield Rows(span, positions, length, blocks)


def replace_indexer(module: Any) -> None:
    """Choose each query's own block, and the others with the largest scores."""
    torch = module.torch

    def forward(self: Any, index_query: Any, **_: Any) -> tuple[None, None]:
        metadata = module.get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return None, None
        cache, chosen = self.index_cache.kv_cache, self.topk_indices_buffer
        queries = index_query.view(len(index_query), -1, SIZE).float()
        for rows in rows_of(metadata[self.index_cache.prefix], torch):
            keys = cache[rows.blocks].flatten(0, 1).float()
            score = torch.einsum("qhd,sd->qhs", queries[rows.span], keys)
            later = torch.arange(len(keys)) > rows.positions[:, None, None]
            best = score.masked_fill(later, -torch.inf).unflatten(-1, (-1, BLOCK)).amax(-1)
            own = (rows.positions // BLOCK)[:, None, None].expand(-1, best.shape[1], 1)
            best = best.scatter(-1, own, torch.inf)
            values, numbers = best.topk(min(chosen.shape[-1], best.shape[-1]), dim=-1)
            chosen[rows.span] = -1
            numbers = numbers.masked_fill(values == -torch.inf, -1)
            chosen[rows.span, :, : numbers.shape[-1]] = numbers.to(chosen.dtype)
        return None, None

    module.MiniMaxM3IndexerTritonImpl.forward = forward


def replace_attention(module: Any) -> None:
    """Attention to the tokens of the chosen blocks."""
    torch = module.torch

    def forward(self: Any, layer: Any, query: Any, kv_cache: Any, output: Any, **_: Any) -> Any:
        metadata = module.get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return output
        for rows in rows_of(metadata[layer.layer_name], torch):
            kv = kv_cache[rows.blocks].transpose(0, 1).flatten(1, 2).float()
            key, value = kv.split(SIZE, dim=-1)  # each of shape [heads, tokens, SIZE]
            tokens = torch.arange(kv.shape[1])
            # Slots behind the last token may hold anything.
            value = value.masked_fill((tokens >= rows.length)[None, :, None], 0)
            chosen = layer.topk_indices_buffer[rows.span].long()
            is_chosen = torch.zeros(*chosen.shape[:2], len(rows.blocks) + 1, dtype=torch.bool)
            is_chosen.scatter_(-1, chosen % (len(rows.blocks) + 1), True)  # noqa: FBT003 - torch's
            seen = is_chosen[..., :-1].repeat_interleave(BLOCK, dim=-1)
            seen &= tokens <= rows.positions[:, None, None]
            groups = query[rows.span].view(len(rows.positions), self.num_kv_heads, -1, SIZE).float()
            score = torch.einsum("qhgd,hsd->qhgs", groups, key) * self.scale
            weight = score.masked_fill(~seen[:, :, None], -torch.inf).softmax(-1)
            found = torch.einsum("qhgs,hsd->qhgd", weight, value)
            output[rows.span] = found.flatten(1).to(output.dtype)
        return output

    module.MiniMaxM3SparseTritonImpl.forward = forward


MODEL = "vllm.models.minimax_m3"
CHANGES: dict[str, Callable[[Any], None]] = {
    f"{MODEL}.nvidia.model": replace_norm_and_insert,
    f"{MODEL}.common.indexer": replace_indexer,
    f"{MODEL}.common.sparse_attention": replace_attention,
}

runpy.run_path(str(FOLDER / "after_import.py"))["change"](CHANGES)
