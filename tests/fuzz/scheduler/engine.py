"""vLLM's own scheduler with this connector, in a configuration that a seed chooses."""

import random
import tempfile
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from transformers import OPTConfig
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

import nixl_kv.connector.scheduler as ours
from nixl_kv.connector.metadata import HandshakeMetadata
from nixl_kv.connector.vllm_config import prompt_of
from nixl_kv.ids import EngineId, new_incarnation, new_nonce
from nixl_kv.protocol.messages import encode
from nixl_kv.protocol.ticket import Ticket
from support.records import rank_description

BLOCK: Final = 16
MAX_TOKENS: Final = 512
"""Of a request: the model's length, and the block size of Mamba's cache mode `none`."""

STEP_S: Final = 0.1
"""How much time passes for the connector in a step."""

WANT_TICKET: Final = {"do_remote_decode": True, "do_remote_prefill": False}
OURS: Final = {
    "kv_connector": "NixlKVConnector",
    "kv_connector_module_path": "nixl_kv.connector",
}
SAVER: Final = {"kv_connector": "Saver", "kv_connector_module_path": "fuzz.scheduler.saver"}


@dataclass(frozen=True)
class Group:
    """A cache group: what its layers keep, and for how many tokens."""

    kind: str  # full, window, align or none; the last two are Mamba's cache modes
    window: int = 0

    @property
    def block_size(self) -> int:
        """Tokens per entry of the block table."""
        return MAX_TOKENS if self.kind == "none" else BLOCK

    @property
    def is_state(self) -> bool:
        """Whether it keeps one state instead of something for each token."""
        return self.kind in ("align", "none")

    def spec(self, dtype: torch.dtype) -> Any:
        """As vLLM has it."""
        if self.is_state:
            return MambaSpec(
                block_size=self.block_size,
                shapes=((4, 8), (2, 8, 8)),
                dtypes=(torch.float32, torch.float32),
                page_size_padded=BLOCK * 64 * 2 * dtype.itemsize,
                mamba_cache_mode=self.kind,
            )
        attention = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 64, "dtype": dtype}
        if self.window:
            return SlidingWindowSpec(**attention, sliding_window=self.window)
        return FullAttentionSpec(**attention)


FULL: Final = Group("full")
MODELS: Final = (
    (FULL,),
    (FULL, Group("window", 32)),
    (FULL, Group("window", 64)),
    (FULL, Group("window", 100)),
    (Group("window", 64),),
    (FULL, Group("align")),
    (FULL, Group("none")),
)


@dataclass(frozen=True)
class Configuration:
    """Of an engine."""

    role: str
    groups: tuple[Group, ...]
    is_async: bool
    is_multi: bool  # within a MultiConnector
    policy: str
    on_load_failure: str
    caches_prefixes: bool
    num_blocks: int
    num_batched_tokens: int
    max_num_seqs: int
    offer_share: float

    @classmethod
    def drawn(cls, rng: random.Random) -> "Configuration":
        """One of all that are supported."""
        groups = rng.choice(MODELS)
        return cls(
            role=rng.choice(["kv_both", "kv_both", "kv_producer", "kv_consumer"]),
            groups=groups,
            is_async=rng.random() < 0.5,
            is_multi=rng.random() < 0.2,
            policy=rng.choice(["fcfs", "fcfs", "priority"]),
            on_load_failure=rng.choice(["recompute", "recompute", "fail"]),
            # vLLM chooses Mamba's mode `none` where it caches no prefixes.
            caches_prefixes=groups[-1].kind != "none" and rng.random() < 0.8,
            num_blocks=rng.choice([24, 40, 100]),
            num_batched_tokens=rng.choice([48, 64, 256]),
            max_num_seqs=rng.choice([2, 4, 8]),
            offer_share=rng.choice([0.2, 0.5, 0.5, 1.0]),
        )

    def transfer(self) -> KVTransferConfig:
        """What `--kv-transfer-config` would say."""
        extra = {
            "port": 0,
            "on_load_failure": self.on_load_failure,
            "offer_share": self.offer_share,
        }
        child = {**OURS, "kv_role": self.role, "kv_connector_extra_config": extra}
        if not self.is_multi:
            return KVTransferConfig(**child)
        return KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role=self.role,
            kv_load_failure_policy=self.on_load_failure,
            kv_connector_extra_config={"connectors": [child, {**SAVER, "kv_role": self.role}]},
        )


@cache
def _model_folder() -> "tempfile.TemporaryDirectory[str]":
    """It goes with the process: vLLM reads it for each engine."""
    folder = tempfile.TemporaryDirectory()
    sizes = {"hidden_size": 64, "ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    OPTConfig(architectures=["OPTForCausalLM"], **sizes).save_pretrained(folder.name)
    return folder


@cache
def _model() -> ModelConfig:
    return ModelConfig(model=_model_folder().name, dtype="float32", max_model_len=MAX_TOKENS)


class Engine:
    """vLLM's scheduler with the connector. The caller is its workers."""

    def __init__(self, configuration: Configuration) -> None:
        self.groups = configuration.groups
        self.now = 0.0
        config = _vllm_config(configuration)
        kv_cache_utils.init_none_hash(sha256)
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
        dtype = config.model_config.dtype
        specs = [KVCacheGroupSpec([group.kind], group.spec(dtype)) for group in self.groups]
        self.vllm = (AsyncScheduler if configuration.is_async else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(configuration.num_blocks, [], specs),
            structured_output_manager=StructuredOutputManager(config),
            block_size=max(group.block_size for group in self.groups),
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.connector = self.vllm.connector
        described = HandshakeMetadata(encode(rank_description(incarnation=new_incarnation())))
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): described})
        child = self.connector._connectors[0] if configuration.is_multi else self.connector
        self.role: ours.Scheduler = child._scheduler_role
        self.role._decode._clock = lambda: self.now
        self.role._admission._shortage._clock = lambda: self.now
        self._is_multi = configuration.is_multi

    @property
    def num_free(self) -> int:
        """Blocks."""
        return int(self.vllm.kv_cache_manager.block_pool.get_num_free_blocks())

    def tables(self, request: str) -> tuple[list[int], ...]:
        """A request's block table in each group."""
        tables: tuple[list[int], ...] = self.vllm.kv_cache_manager.get_block_ids(request)
        return tables

    def request(
        self, name: str, tokens: list[int], params: object = None, *, max_tokens: int, **more: Any
    ) -> Request:
        """A request as vLLM's frontend makes it; it is not added."""
        extra = None if params is None else {"kv_transfer_params": params}
        sampling = SamplingParams(max_tokens=max_tokens, extra_args=extra, ignore_eos=True)
        return Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=self.now,
            block_hasher=self._hasher,
            **more,
        )

    def ticket(self, tokens: list[int]) -> dict[str, Any]:
        """Of another engine that has computed this prompt."""
        prompt, nonce = prompt_of(self.request("any", tokens, max_tokens=1)), new_nonce()
        ticket = Ticket(
            engine=EngineId("prefill"),
            host="127.0.0.1",
            port=5600,
            incarnation=new_incarnation(),
            nonce=nonce,
            num_tokens=len(tokens),
            context=prompt.context(nonce),
        )
        return self.role._trust.seal(ticket)

    def commands(self, output: SchedulerOutput) -> list[Any]:
        """What this connector tells its workers in a step."""
        commands: list[Any] = self._metadata(output, 0).commands
        return commands

    def failed(self, output: SchedulerOutput) -> list[str]:
        """The loads that its workers report as failed with a step."""
        return list(self._metadata(output, 0).failed)

    def saves(self, output: SchedulerOutput) -> list[str]:
        """The requests whose blocks the other connector saves, beginning with this step."""
        return self._metadata(output, 1).requests if self._is_multi else []

    def close(self) -> None:
        """Stop listening."""
        self.connector.shutdown()

    def _metadata(self, output: SchedulerOutput, child: int) -> Any:
        metadata = output.kv_connector_metadata
        return metadata.metadata[child] if self._is_multi else metadata


def _vllm_config(configuration: Configuration) -> VllmConfig:
    config = VllmConfig(
        model_config=_model(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=configuration.max_num_seqs,
            max_num_batched_tokens=configuration.num_batched_tokens,
            max_model_len=MAX_TOKENS,
            is_encoder_decoder=False,
            async_scheduling=configuration.is_async,
            enable_chunked_prefill=True,
            policy=configuration.policy,
        ),
        cache_config=CacheConfig(
            block_size=BLOCK, enable_prefix_caching=configuration.caches_prefixes
        ),
        kv_transfer_config=configuration.transfer(),
        device_config=DeviceConfig("cpu"),
    )
    register_all_kvcache_specs(config)
    config.scheduler_config.async_scheduling = configuration.is_async  # vLLM turns it off on CPUs
    cache_config = config.cache_config
    cache_config.kv_cache_layout = "LBHNC"
    cache_config.num_gpu_blocks = configuration.num_blocks
    (last,) = configuration.groups[-1:]
    if last.is_state:
        cache_config.mamba_cache_mode = last.kind
        cache_config.mamba_block_size = last.block_size
    return config
