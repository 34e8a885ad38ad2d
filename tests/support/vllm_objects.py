"""vLLM's own configuration, cache and requests, for a tiny model that is never loaded."""

import copy
import itertools
import tempfile
from types import SimpleNamespace
from typing import Any, Final

import torch
from transformers import Qwen3Config
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

BLOCK_SIZE: Final = 32
NUM_BLOCKS: Final = 16
MAX_TOKENS: Final = 512
"""The model's length."""
KV_HEADS: Final = 2
HEAD_SIZE: Final = 64
LAYERS: Final = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")

_FOLDER: Final = tempfile.TemporaryDirectory()
"""Has the model's configuration, which vLLM reads again for each engine."""

Qwen3Config(
    architectures=["Qwen3ForCausalLM"],
    vocab_size=4099,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=len(LAYERS),
    num_attention_heads=4,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD_SIZE,
    max_position_embeddings=4096,
).save_pretrained(_FOLDER.name)

MODEL: Final = ModelConfig(
    model=_FOLDER.name,
    served_model_name="tiny",
    skip_tokenizer_init=True,
    dtype="float32",
    max_model_len=MAX_TOKENS,
)

_CONFIG: Final = VllmConfig(
    model_config=MODEL,
    cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False),
    device_config=DeviceConfig("cpu"),
)
_CONFIG.compilation_config.static_forward_context = {
    layer: SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "CPU_ATTN"))
    for layer in LAYERS
}

_numbers = itertools.count()


def vllm_config(extra: dict[str, Any] | None = None, **transfer: Any) -> VllmConfig:
    """An engine's configuration, a new one for each call.

    Args:
        extra: `kv_connector_extra_config`, by default with any free port.
        transfer: other fields of `kv_transfer_config`.
    """
    config = copy.deepcopy(_CONFIG)
    values = {
        "kv_connector": "NixlKVConnector",
        "kv_connector_module_path": "nixl_kv.connector",
        "kv_role": "kv_both",
        "engine_id": "tiny",
        "kv_connector_extra_config": extra or {"port": 0},
    }
    config.kv_transfer_config = KVTransferConfig(**values | transfer)
    return config


def override(config: VllmConfig, **derived: Any) -> None:
    """Replace properties that vLLM derives from the model's architecture."""
    model = config.model_config
    model.__class__ = type("ModelConfig", (type(model),), derived)


def kv_cache_config(**changed: Any) -> KVCacheConfig:
    """One group, with other fields in its spec."""
    values = {"block_size": BLOCK_SIZE, "num_kv_heads": KV_HEADS, "head_size": HEAD_SIZE}
    spec = FullAttentionSpec(**{**values, "dtype": torch.float32, **changed})
    return KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(list(LAYERS), spec)])


def kv_caches() -> dict[str, torch.Tensor]:
    """Caches of zeros, as a worker registers them: views of one storage."""
    shape = len(LAYERS), NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE
    return dict(zip(LAYERS, torch.zeros(shape), strict=True))


def new_request(params: Any = None, num_tokens: int = 100, **changed: Any) -> Request:
    """A request on arrival, with an id of its own."""
    values: dict[str, Any] = {
        "request_id": f"request-{next(_numbers)}",
        "prompt_token_ids": list(range(num_tokens)),
        "sampling_params": SamplingParams(
            max_tokens=1, extra_args=None if params is None else {"kv_transfer_params": params}
        ),
        "pooling_params": None,
    }
    return Request(**values | changed)


def empty_output() -> SchedulerOutput:
    """A step that computes nothing."""
    output: SchedulerOutput = SchedulerOutput.make_empty()
    return output
