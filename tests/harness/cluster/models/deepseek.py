"""A tiny DeepSeek-V2: latent attention, and no experts."""

from dataclasses import dataclass

from harness.cluster.models.recipe import (
    ATTENTION_GAIN,
    LOGIT_GAIN,
    Family,
    RandomMatrices,
    Tensors,
    vector,
)


@dataclass(frozen=True)
class DeepseekV2(Family):
    """Multi-head latent attention without experts: one latent head, which every rank holds.

    The latent sizes are DeepSeek's own: kernels know no others.
    """

    family = "deepseek-v2"
    architecture = "DeepseekV2ForCausalLM"
    model_type = "deepseek_v2"

    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    latent: int = 512
    rope_dim: int = 64

    def config(self, vocab_size: int) -> dict[str, object]:
        """What config.json says."""
        return super().config(vocab_size) | {
            "hidden_act": "silu",
            "kv_lora_rank": self.latent,
            "q_lora_rank": None,
            "qk_nope_head_dim": self.head_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.head_dim,
            "first_k_dense_replace": self.layers,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        }

    def layer_weights(self, random: RandomMatrices, layer: int) -> Tensors:
        """All layers are of one kind."""
        del layer
        hidden, values = self.hidden, self.heads * self.head_dim
        queries = self.heads * (self.head_dim + self.rope_dim)
        return {
            "input_layernorm.weight": vector(hidden),
            "post_attention_layernorm.weight": vector(hidden),
            "self_attn.q_proj.weight": random.matrix(queries, hidden, LOGIT_GAIN),
            "self_attn.kv_a_proj_with_mqa.weight": random.matrix(
                self.latent + self.rope_dim, hidden
            ),
            "self_attn.kv_a_layernorm.weight": vector(self.latent),
            "self_attn.kv_b_proj.weight": random.matrix(2 * values, self.latent),
            "self_attn.o_proj.weight": random.matrix(hidden, values, ATTENTION_GAIN),
            **self.mlp(random),
        }
