"""The families of tiny models, each as small as vLLM's kernels and its cuts over ranks allow."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from harness.cluster.models.deepseek_v4 import DeepseekV4
from harness.cluster.models.recipe import (
    ATTENTION_GAIN,
    FULL,
    LOGIT_GAIN,
    SHARP_ATTENTION,
    SHARPNESS,
    Family,
    FloatArray,
    Tensors,
    layer_types,
)

VOCABULARY_UNIT: Final = 3 * 64
SLIDING: Final = "sliding_attention"
QUIET: Final = 1 / 256  # how much less a layer adds that shall not matter much


@dataclass(frozen=True)
class TinyModel(Family):
    """A Qwen3: full attention in all layers."""

    family = "qwen3"
    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"
    gains = SHARP_ATTENTION
    constants: ClassVar = {"q_norm": SHARPNESS, "k_norm": SHARPNESS}

    def config(self, vocab_size: int) -> dict[str, object]:
        return super().config(vocab_size) | {"hidden_act": "silu", "rope_theta": 10000.0}


@dataclass(frozen=True)
class PaddedQwen3(TinyModel):
    """A TinyModel with a vocabulary that three ranks can share: vLLM pads to 64 only.

    The words more have no name; their scores are 0, and so they are never the best.
    """

    family = "qwen3-padded"

    def config(self, vocab_size: int) -> dict[str, object]:
        return super().config(-(-vocab_size // VOCABULARY_UNIT) * VOCABULARY_UNIT)

    def weights(self, vocab_size: int) -> Tensors:
        weights = super().weights(vocab_size)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name][vocab_size:] = 0
        return weights


@dataclass(frozen=True)
class Gemma3(Family):
    """Sliding windows, and full attention in the last layer of each `period`."""

    family = "gemma3"
    architecture = "Gemma3ForCausalLM"
    model_type = "gemma3_text"
    # A norm stores its factor less 1.
    neutral_norm = 0.0
    constants: ClassVar = {
        "post_attention_layernorm": ATTENTION_GAIN - 1.0,
        "q_norm": SHARPNESS - 1.0,
        "k_norm": SHARPNESS - 1.0,
    }

    layers: int = 6
    window: int = 200
    period: int = 6

    def config(self, vocab_size: int) -> dict[str, object]:
        return super().config(vocab_size) | {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": self.head_dim,
            "sliding_window": self.window,
            "layer_types": layer_types(self.layers, self.period, SLIDING),
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        }


@dataclass(frozen=True)
class Gemma4(Family):
    """A Gemma whose last layers read the cache of earlier ones.

    Layers of full attention may have KV heads of another number and size than the others.
    """

    family = "gemma4"
    architecture = "Gemma4ForCausalLM"
    model_type = "gemma4_text"
    constants: ClassVar = {"post_attention_layernorm": ATTENTION_GAIN}

    layers: int = 8
    window: int = 200
    period: int = 4
    full_kv_heads: int = 4
    full_head_dim: int = 64

    def config(self, vocab_size: int) -> dict[str, object]:
        return super().config(vocab_size) | {
            "global_head_dim": self.full_head_dim,
            "num_global_key_value_heads": self.full_kv_heads,
            # The only way in which this family may have fewer KV heads in some layers.
            "attention_k_eq_v": self.full_kv_heads != self.kv_heads,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 4,
            "sliding_window": self.window,
            "layer_types": layer_types(self.layers, self.period, SLIDING),
        }

    def values(self, name: str, shape: tuple[int, ...], random: np.random.Generator) -> FloatArray:
        """Scores of attention are not scaled by the model."""
        if name.endswith(("q_norm", "k_norm")):
            return np.full(shape, LOGIT_GAIN**0.5 / shape[0] ** 0.25, np.float32)
        return super().values(name, shape, random)


@dataclass(frozen=True)
class DeepseekV2(Family):
    """Multi-head latent attention without experts: one latent head, which every rank holds.

    The latent sizes are DeepSeek's own: kernels know no others.
    """

    family = "deepseek-v2"
    architecture = "DeepseekV2ForCausalLM"
    model_type = "deepseek_v2"
    gains: ClassVar = {**SHARP_ATTENTION, "q_proj": LOGIT_GAIN}

    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128

    def config(self, vocab_size: int) -> dict[str, object]:
        config = super().config(vocab_size) | {
            "hidden_act": "silu",
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": self.head_dim,
            "qk_rope_head_dim": 64,
            "v_head_dim": self.head_dim,
            "first_k_dense_replace": self.layers,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        }
        del config["head_dim"]  # it is that of the part with rotary embedding here
        return config


@dataclass(frozen=True)
class KimiLinear(DeepseekV2):
    """Latent attention in the last layer of each `period`, delta nets elsewhere, and no experts."""

    family = "kimi-linear"
    architecture = "KimiLinearForCausalLM"
    model_type = "kimi_linear"

    period: int = 4
    state_heads: ClassVar = 4
    state_dim: ClassVar = 128  # the size of keys and values in a state

    def config(self, vocab_size: int) -> dict[str, object]:
        layers = range(1, self.layers + 1)
        return super().config(vocab_size) | {
            "mla_use_nope": True,
            "num_experts": None,
            "linear_attn_config": {
                "full_attn_layers": [n for n in layers if n % self.period == 0],
                "kda_layers": [n for n in layers if n % self.period],
                "num_heads": self.state_heads,
                "head_dim": self.state_dim,
                "short_conv_kernel_size": 4,
            },
        }

    def values(self, name: str, shape: tuple[int, ...], random: np.random.Generator) -> FloatArray:
        """A delta net normalizes its queries: they need no gain."""
        if name.endswith("q_proj") and shape[0] == self.state_heads * self.state_dim:
            return super().values("", shape, random)
        return super().values(name, shape, random)

    def weights(self, vocab_size: int) -> Tensors:
        """transformers writes the name that layers with experts have in vLLM."""
        weights = super().weights(vocab_size)
        return {name.replace("block_sparse_moe", "mlp"): part for name, part in weights.items()}


@dataclass(frozen=True)
class Qwen3Next(Family):
    """Full attention in the last layer of each `period`, experts in the first of `sparse_step`.

    All experts compute each token: a choice would turn a rounding into another answer. vLLM wants
    experts and attention in each pipeline stage.
    """

    family = "qwen3-next"
    architecture = "Qwen3NextForCausalLM"
    model_type = "qwen3_next"
    gains = SHARP_ATTENTION
    # A norm stores its factor less 1, except within a delta net.
    neutral_norm = 0.0
    constants: ClassVar = {
        "q_norm": SHARPNESS - 1.0,
        "k_norm": SHARPNESS - 1.0,
        "linear_attn.norm": 1.0,
        "dt_bias": 1.0,
    }

    dtype: str = "bfloat16"
    period: int = 4
    sparse_step: int = 4

    def config(self, vocab_size: int) -> dict[str, object]:
        return super().config(vocab_size) | {
            "hidden_act": "silu",
            "attn_output_gate": True,
            "layer_types": layer_types(self.layers, self.period, "linear_attention"),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [n for n in range(self.layers) if n % self.sparse_step],
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "norm_topk_prob": True,
        }


@dataclass(frozen=True)
class Qwen3NextMtp(Qwen3Next):
    """A Qwen3-Next that predicts its own words, and is mostly right.

    Its last layer says almost all, and the predictor is that layer once more, for the word after.
    So a word that is predicted is right where the predictor has its KV of the whole prompt.
    """

    family = "qwen3-next-mtp"

    layers: int = 2
    period: int = 2
    sparse_step: int = 1  # vLLM's predictor has experts

    def config(self, vocab_size: int) -> dict[str, object]:
        return super().config(vocab_size) | {"num_nextn_predict_layers": 1}

    def weights(self, vocab_size: int) -> Tensors:
        """The predictor is given a word and what the model makes of it; this one sees the word.

        transformers knows no predictor.
        """
        weights = super().weights(vocab_size)
        last = f"model.layers.{self.layers - 1}."
        predictor = {
            name.replace(last, "mtp.layers.0."): part
            for name, part in weights.items()
            if name.startswith(last)
        }
        norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        predictor |= {f"mtp.{norm}.weight": np.zeros(self.hidden, np.float32) for norm in norms}
        predictor["mtp.fc.weight"] = np.eye(self.hidden, 2 * self.hidden, dtype=np.float32)
        return weights | predictor

    def values(self, name: str, shape: tuple[int, ...], random: np.random.Generator) -> FloatArray:
        """The layers before the last one add little."""
        values = super().values(name, shape, random)
        is_last = f".{self.layers - 1}." in name
        is_added = name.endswith(("out_proj", "down_proj"))
        return values * np.float32(QUIET) if is_added and not is_last else values


@dataclass(frozen=True)
class Granite4(Family):
    """Full attention in the last layer of each `period`, and no experts.

    All heads of a Mamba2 share one group of B and C: each tensor-parallel rank has a copy.
    """

    family = "granite4"
    architecture = "GraniteMoeHybridForCausalLM"
    model_type = "granitemoehybrid"
    gains: ClassVar = {**SHARP_ATTENTION, "q_proj": LOGIT_GAIN}
    constants: ClassVar = {"conv1d.bias": 0.0}

    hidden: int = 512
    period: int = 4

    def config(self, vocab_size: int) -> dict[str, object]:
        return super().config(vocab_size) | {
            "hidden_act": "silu",
            "layer_types": layer_types(self.layers, self.period, "linear_attention"),
            "position_embedding_type": "rope",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attention_multiplier": self.head_dim**-0.5,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": self.intermediate,
            "mamba_expand": 2,
            "mamba_n_heads": 2 * self.hidden // 64,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
            "mamba_conv_bias": True,  # without it vLLM cannot cut the model
            "mamba_proj_bias": False,
        }


@dataclass(frozen=True)
class MiniMaxM3(Family):
    """Full attention in the first layer, chosen blocks in the others; no experts.

    An indexer keeps a key in bfloat16 for each token and chooses blocks of 128 tokens, so prompts
    of more than `chosen` blocks depend on it. Sizes of heads and keys are the real model's: kernels
    know no others.
    """

    family = "minimax-m3"
    architecture = "MiniMaxM3SparseForCausalLM"
    model_type = "minimax_m3_text"
    neutral_norm = 0.0  # a norm stores its factor less 1
    gains = SHARP_ATTENTION
    constants: ClassVar = {"q_norm": SHARPNESS - 1.0, "k_norm": SHARPNESS - 1.0}
    tie: ClassVar = 0.2  # keys are in bfloat16, also on CPU: rounding chooses blocks

    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 128
    chosen: int = 8  # blocks that a token attends to

    def config(self, vocab_size: int) -> dict[str, object]:
        text = super().config(vocab_size)
        is_sparse = [int(layer > 0) for layer in range(self.layers)]
        text |= {
            "hidden_act": "swigluoai",
            "swiglu_alpha": 1.702,
            "swiglu_beta": 1.0,
            "swiglu_limit": 7.0,
            "dense_intermediate_size": self.intermediate,
            "moe_layer_freq": [0] * self.layers,
            "num_mtp_modules": 0,
            "rotary_dim": self.head_dim // 2,
            "partial_rotary_factor": 0.5,
            "rope_theta": 1e4,
            "use_gemma_norm": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_head",
            "attention_output_gate": False,
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_index_dim": self.head_dim,
                "sparse_num_index_heads": self.kv_heads,
                "sparse_topk_blocks": self.chosen,
                "sparse_block_size": 128,
                "sparse_disable_index_value": is_sparse,
                "sparse_score_type": "max",
                "sparse_init_block": 0,
                "sparse_local_block": 1,
                "sparse_attention_freq": is_sparse,
            },
        }
        # vLLM knows the type of the model that takes pictures alone. The architecture takes none.
        outer = ("architectures", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")
        return {name: text[name] for name in outer} | {
            "model_type": "minimax_m3_vl",
            "text_config": text,
            "tie_word_embeddings": False,
        }

    def weights(self, vocab_size: int) -> Tensors:
        """transformers has no class for the text model alone."""
        random = np.random.Generator(np.random.PCG64(self.seed))
        shapes = dict(self._shapes(vocab_size))
        return {
            f"{name}.weight": self.values(name, shape, random) for name, shape in shapes.items()
        }

    def _shapes(self, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, size = self.hidden, self.head_dim
        queries, keys = self.heads * size, self.kv_heads * size
        yield "model.embed_tokens", (vocab_size, hidden)
        yield "lm_head", (vocab_size, hidden)
        yield "model.norm", (hidden,)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield f"{at}.input_layernorm", (hidden,)
            yield f"{at}.post_attention_layernorm", (hidden,)
            yield f"{at}.mlp.gate_proj", (self.intermediate, hidden)
            yield f"{at}.mlp.up_proj", (self.intermediate, hidden)
            yield f"{at}.mlp.down_proj", (hidden, self.intermediate)
            yield f"{at}.self_attn.o_proj", (hidden, queries)
            for name, width in (("q", queries), ("k", keys), ("v", keys)):
                yield f"{at}.self_attn.{name}_proj", (width, hidden)
            for name in ("q", "k"):
                yield f"{at}.self_attn.{name}_norm", (size,)
            if layer:
                yield f"{at}.self_attn.index_q_proj", (keys, hidden)
                yield f"{at}.self_attn.index_k_proj", (size, hidden)
                yield f"{at}.self_attn.index_q_norm", (size,)
                yield f"{at}.self_attn.index_k_norm", (size,)


@dataclass(frozen=True)
class Llava(Family):
    """A Llama that sees: a CLIP tower makes 64 tokens of a picture of any size.

    Answers depend on each picture as they do on words.
    """

    family = "llava"
    architecture = "LlavaForConditionalGeneration"
    model_type = "llava"
    auto_class = "AutoModelForImageTextToText"
    special_words = ("<image>",)
    gains: ClassVar = {**SHARP_ATTENTION, "q_proj": LOGIT_GAIN}
    constants: ClassVar = {"bias": 0.0}
    chat_template = (
        "{% for message in messages %}"
        "{{ message['role'] + ' ' }}"
        "{% if message['content'] is string %}{{ message['content'] + ' ' }}{% else %}"
        "{% for part in message['content'] %}"
        "{{ part['text'] + ' ' if part['type'] == 'text' else '<image> ' }}"
        "{% endfor %}"
        "{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
    )
    image_token: ClassVar = 3  # after the special words of all families
    patches: ClassVar = 8  # in a row and in a column

    patch: int = 8  # pixels
    vision_hidden: int = 64
    vision_layers: int = 3

    @property
    def image_tokens(self) -> int:
        return self.patches**2

    @property
    def pixels(self) -> int:
        """The width and height that pictures are resized to."""
        return self.patches * self.patch

    def config(self, vocab_size: int) -> dict[str, object]:
        text = super().config(vocab_size)
        names = ("architectures", "model_type", "torch_dtype", "eos_token_id", "pad_token_id")
        return {name: text[name] for name in names} | {
            "image_token_index": self.image_token,
            "image_seq_length": self.image_tokens,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "text_config": text
            | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 1e4},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": self.vision_hidden,
                "intermediate_size": 2 * self.vision_hidden,
                "num_hidden_layers": self.vision_layers,
                "num_attention_heads": 2,
                "image_size": self.pixels,
                "patch_size": self.patch,
                "projection_dim": self.vision_hidden,
            },
        }

    def processor(self) -> Mapping[str, object]:
        size = self.pixels
        return {
            "processor_class": "LlavaProcessor",
            "image_token": self.special_words[0],
            "num_additional_image_tokens": 1,
            "patch_size": self.patch,
            "vision_feature_select_strategy": "default",
            "image_processor": {
                "image_processor_type": "CLIPImageProcessor",
                "size": {"shortest_edge": size},
                "crop_size": {"height": size, "width": size},
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.25, 0.25, 0.25],
            },
        }

    def weights(self, vocab_size: int) -> Tensors:
        """vLLM's loader knows the names in LLaVA's own checkpoints."""
        weights = super().weights(vocab_size)
        tower = "vision_tower."
        return {
            name.replace(tower, f"{tower}vision_model."): part for name, part in weights.items()
        }


_ALL: Final = (
    TinyModel,
    PaddedQwen3,
    Gemma3,
    Gemma4,
    DeepseekV2,
    DeepseekV4,
    Qwen3Next,
    Qwen3NextMtp,
    Granite4,
    KimiLinear,
    MiniMaxM3,
    Llava,
)
FAMILIES: Final[Mapping[str, Callable[..., Family]]] = {family.family: family for family in _ALL}
