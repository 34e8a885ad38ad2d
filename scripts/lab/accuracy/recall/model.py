"""Qwen3 in plain torch: tensors have the names and shapes that transformers and vLLM load.

KV is kept apart from the model, so that an answer can be computed over KV that was damaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from harness.cluster.models.qwen3 import TinyModel
from lab.accuracy.recall.task import VOCABULARY_SIZE

KV = tuple[Tensor, Tensor]
"""Keys, already rotated, and values of one layer: (rows, KV heads, tokens, head_dim) each."""
SHARPNESS = 1.5  # of attention at the start: it picks one word of a thousand
EMBEDDING_STD = 0.2
HEAD_STD = 0.02


@dataclass(frozen=True)
class Shape:
    """The sizes of the model, and how its positions are told apart."""

    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    hidden: int = 256
    intermediate: int = 512
    max_positions: int = 2048
    rope_theta: float = 1e6  # so that much of a head hardly turns within a prompt

    def config(self, dtype: str) -> dict[str, object]:
        """What config.json says."""
        sizes = {name: value for name, value in vars(self).items() if name != "rope_theta"}
        rope = {"rope_theta": self.rope_theta, "rope_type": "default"}
        config = TinyModel(**sizes, dtype=dtype).config(VOCABULARY_SIZE)
        return config | {"rope_theta": self.rope_theta, "rope_parameters": rope}


class Norm(nn.RMSNorm):
    """Computed in float32, whatever comes in."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) to the same."""
        normed = functional.rms_norm(
            x.float(), self.normalized_shape, self.weight.float(), self.eps
        )
        return normed.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, shape: Shape) -> None:
        """Random weights."""
        super().__init__()
        self.shape = shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head_dim, eps=1e-6)
        self.k_norm = Norm(shape.head_dim, eps=1e-6)

    def forward(self, hidden: Tensor, turns: KV, past: KV | None) -> tuple[Tensor, KV]:
        """(rows, tokens, hidden) to the same, and the KV of all tokens, past ones first."""
        keys, values = self._heads(self.k_proj(hidden)), self._heads(self.v_proj(hidden))
        queries = rotated(self.q_norm(self._heads(self.q_proj(hidden))), turns)
        keys = rotated(self.k_norm(keys), turns)
        if past is not None:
            keys, values = torch.cat([past[0], keys], 2), torch.cat([past[1], values], 2)
        group = self.shape.heads // self.shape.kv_heads
        seen = functional.scaled_dot_product_attention(
            queries,
            keys.repeat_interleave(group, dim=1),
            values.repeat_interleave(group, dim=1),
            attn_mask=causal_lower_right(queries.shape[2], keys.shape[2]),
        )
        return self.o_proj(seen.transpose(1, 2).flatten(2)), (keys, values)

    def _heads(self, projected: Tensor) -> Tensor:
        rows, tokens, _ = projected.shape
        return projected.view(rows, tokens, -1, self.shape.head_dim).transpose(1, 2)


class GatedMLP(nn.Module):
    """The gated part of a layer."""

    def __init__(self, shape: Shape) -> None:
        """Random weights."""
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, tokens, hidden) to the same."""
        gated: Tensor = self.down_proj(
            functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        )
        return gated


class Layer(nn.Module):
    """Attention and the gated part, each on what its norm gives."""

    def __init__(self, shape: Shape) -> None:
        """Random weights."""
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, eps=1e-6)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, eps=1e-6)
        self.mlp = GatedMLP(shape)

    def forward(self, hidden: Tensor, turns: KV, past: KV | None) -> tuple[Tensor, KV]:
        """(rows, tokens, hidden) to the same, and the KV of all tokens."""
        seen, kv = self.self_attn(self.input_layernorm(hidden), turns, past)
        hidden = hidden + seen
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), kv


class Trunk(nn.Module):
    """Embedding, layers, norm."""

    def __init__(self, shape: Shape) -> None:
        """Random weights."""
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY_SIZE, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, eps=1e-6)


class Recall(nn.Module):
    """The whole model."""

    def __init__(self, shape: Shape) -> None:
        """Random weights, of torch's global generator."""
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.lm_head = nn.Linear(shape.hidden, VOCABULARY_SIZE, bias=False)
        self._init_weights()

    def forward(self, tokens: Tensor, past: Sequence[KV] = ()) -> tuple[Tensor, list[KV]]:
        """Token ids (rows, tokens) to logits (rows, tokens, vocabulary) and the KV of all tokens.

        past: of each layer the KV of the tokens before.
        """
        hidden = self.model.embed_tokens(tokens)
        begin = past[0][0].shape[2] if past else 0
        turns = self._turns(begin, begin + tokens.shape[1])
        kept: list[KV] = []
        for number, layer in enumerate(self.model.layers):
            hidden, kv = layer(hidden, turns, past[number] if past else None)
            kept.append(kv)
        return self.lm_head(self.model.norm(hidden)), kept

    def _turns(self, begin: int, end: int) -> KV:
        """Cosine and sine of each position: (tokens, head_dim / 2) each, in float32."""
        device, half = self.lm_head.weight.device, self.shape.head_dim // 2
        places = torch.arange(begin, end, device=device, dtype=torch.float32)
        steps = torch.arange(half, device=device, dtype=torch.float32) / half
        angles = places[:, None] * self.shape.rope_theta**-steps
        return angles.cos(), angles.sin()

    def _init_weights(self) -> None:
        depth = 2 * self.shape.layers
        for name, weight in self.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                nn.init.constant_(weight, SHARPNESS)
            elif name.endswith("embed_tokens.weight"):
                nn.init.normal_(weight, std=EMBEDDING_STD)
            elif name == "lm_head.weight":
                nn.init.normal_(weight, std=HEAD_STD)
            elif weight.dim() > 1:
                onward = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=(weight.shape[1] * (depth if onward else 1)) ** -0.5)


def rotated(heads: Tensor, turns: KV) -> Tensor:
    """Turn each position's pairs of dimensions by its angles; computed in float32."""
    cosine, sine = turns
    first, second = heads.float().chunk(2, dim=-1)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return torch.cat(turned, dim=-1).to(heads.dtype)
