"""A tiny DeepSeek-V4, which transformers does not know: configuration and weights of its own."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from harness.cluster.models.recipe import Family, FloatArray, Tensors

ALL: Final = 0
"""The ratio that published files give a layer without compression."""
OVERLAPPING: Final = 4
"""The ratio of layers that have an indexer, and whose windows overlap."""
EXPERT: Final = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


@dataclass(frozen=True)
class DeepseekV4(Family):
    """Latent attention to a window and, in most layers, to states for 4 or 128 tokens each.

    The sizes of heads, the ratios and the numbers of experts are those that vLLM's kernels know.
    All experts are alike: their choice, which rounding may change, does not matter.
    """

    family = "deepseek-v4"
    architecture = "DeepseekV4ForCausalLM"
    model_type = "deepseek_v4"
    gains: ClassVar = {"embed": 16.0, "head": 4.0, "attn.wo_b": 0.25}
    constants: ClassVar = {
        "hc_head_base": 0.1,
        "hc_attn_base": 0.1,
        "hc_ffn_base": 0.1,
        "attn_sink": 0.0,
        "gate.bias": 0.0,
        "kv_norm": 4.0,
        "compressor.norm": 4.0,
    }
    ratios: ClassVar = (ALL, 4, 128, 4)  # by layer
    # It quantizes KV and mixes streams. Log probabilities at TP 1 and 2 differ by up to 0.8, also
    # without a connector.
    tie: ClassVar = 1.0
    experts: ClassVar = 64
    latent: ClassVar = 512
    index_dim: ClassVar = 128
    query_rank: ClassVar = 128
    output_rank: ClassVar = 64
    streams: ClassVar = 4  # of hidden states, which a layer mixes

    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 512
    intermediate: int = 64
    window: int = 128
    index_heads: int = 8  # GPUs: 64, and as many of attention
    output_groups: int = 2
    dtype: str = "bfloat16"  # vLLM's kernels know no other

    def config(self, vocab_size: int) -> dict[str, object]:
        return super().config(vocab_size) | {
            "compress_ratios": list(self.ratios),
            "qk_rope_head_dim": 64,
            "q_lora_rank": self.query_rank,
            "o_lora_rank": self.output_rank,
            "o_groups": self.output_groups,
            "sliding_window": self.window,
            "index_head_dim": self.index_dim,
            "index_n_heads": self.index_heads,
            "index_topk": 512,
            "hc_mult": self.streams,
            "hc_sinkhorn_iters": 4,
            "hc_eps": 1e-6,
            "hidden_act": "silu",
            "swiglu_limit": 10.0,
            "moe_intermediate_size": self.intermediate,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": 6,
            "num_hash_layers": 0,
            "norm_topk_prob": True,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 1.0,
            "rope_theta": 10000.0,
            "compress_rope_theta": 40000.0,
            "rope_scaling": {"rope_type": "default"},
            "expert_dtype": "fp8",
            "bos_token_id": 0,
        }

    def weights(self, vocab_size: int) -> Tensors:
        random = np.random.Generator(np.random.PCG64(self.seed))
        weights: Tensors = {}
        for name, shape in self._shapes(vocab_size):
            like = EXPERT.sub("0", name)
            weights[name] = weights.get(like, self.values(name, shape, random))
        return weights

    def values(self, name: str, shape: tuple[int, ...], random: np.random.Generator) -> FloatArray:
        return super().values(name.removesuffix(".weight"), shape, random)

    def _shapes(self, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, streams = self.hidden, self.streams
        yield "embed.weight", (vocab_size, hidden)
        yield "head.weight", (vocab_size, hidden)
        yield "norm.weight", (hidden,)
        yield "hc_head_fn", (streams, streams * hidden)
        yield "hc_head_base", (streams,)
        yield "hc_head_scale", (1,)
        for layer, ratio in enumerate(self.ratios):
            for name, shape in self._layer(ratio).items():
                yield f"layers.{layer}.{name}", shape

    def _layer(self, ratio: int) -> Mapping[str, tuple[int, ...]]:
        hidden, rank, latent = self.hidden, self.query_rank, self.latent
        output = self.output_groups * self.output_rank
        mixed = (2 + self.streams) * self.streams
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,),
            "ffn_norm.weight": (hidden,),
            "attn.wq_a.weight": (rank, hidden),
            "attn.wkv.weight": (latent, hidden),
            "attn.q_norm.weight": (rank,),
            "attn.kv_norm.weight": (latent,),
            "attn.wq_b.weight": (self.heads * latent, rank),
            "attn.wo_a.weight": (output, self.heads * latent // self.output_groups),
            "attn.wo_b.weight": (hidden, output),
            "attn.attn_sink": (self.heads,),
            "ffn.gate.weight": (self.experts, hidden),
            "ffn.gate.bias": (self.experts,),
        }
        for part in ("attn", "ffn"):
            shapes[f"hc_{part}_fn"] = mixed, self.streams * hidden
            shapes[f"hc_{part}_base"] = (mixed,)
            shapes[f"hc_{part}_scale"] = (3,)
        for expert in (*(f"experts.{n}" for n in range(self.experts)), "shared_experts"):
            shapes[f"ffn.{expert}.w1.weight"] = self.intermediate, hidden
            shapes[f"ffn.{expert}.w2.weight"] = hidden, self.intermediate
            shapes[f"ffn.{expert}.w3.weight"] = self.intermediate, hidden
        sizes = {"attn.compressor": latent} if ratio else {}
        if ratio == OVERLAPPING:
            sizes["attn.indexer.compressor"] = self.index_dim
            shapes["attn.indexer.wq_b.weight"] = self.index_heads * self.index_dim, rank
            shapes["attn.indexer.weights_proj.weight"] = self.index_heads, hidden
        for name, size in sizes.items():
            width = size * (2 if ratio == OVERLAPPING else 1)
            shapes[f"{name}.ape"] = ratio, width
            shapes[f"{name}.wkv.weight"] = width, hidden
            shapes[f"{name}.wgate.weight"] = width, hidden
            shapes[f"{name}.norm.weight"] = (size,)
        return shapes
