"""Prefill offers the blocks of a sliding window that decode wants, by vLLM's cache managers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from nixl_kv.connector.paging import Pins, RequestBlocks
from nixl_kv.connector.vllm_config import pagings
from nixl_kv.geometry.layout import ABSENT, Table
from nixl_kv.ids import RequestId
from support.records import written_out
from support.vllm_scheduler import make_config

try:
    from vllm.v1.core import kv_cache_planning
except ImportError:  # vLLM 0.31 and 0.32
    kv_cache_planning = None

P = RequestId("p")
MEMORY = 2 << 20
WINDOW = 0  # its group's number


@pytest.fixture(scope="module")
def vllm_config() -> VllmConfig:
    config = make_config(None, 0)
    config.model_config = SimpleNamespace(
        max_model_len=2048, original_max_model_len=2048, supports_kv_cache_grouping=False
    )
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    kv_cache_utils.init_none_hash(sha256)
    return config


def attention(spec: type[AttentionSpec], block_size: int, **of_spec: int) -> AttentionSpec:
    sizes = {"block_size": block_size, "num_kv_heads": 1, "head_size": 32}
    return spec(**sizes, dtype=torch.float16, **of_spec)


def cache_config(config: VllmConfig, layers: dict[str, AttentionSpec]) -> KVCacheConfig:
    if kv_cache_planning is None:
        configs = kv_cache_utils.get_kv_cache_configs(config, [layers], [MEMORY])
    else:
        groups = kv_cache_planning.get_global_kv_cache_groups(config, [layers])
        configs = kv_cache_planning.get_kv_cache_configs(config, [layers], [MEMORY], groups)
    return kv_cache_utils.generate_scheduler_kv_cache_config(configs)


class Engine:
    """vLLM's cache manager for a layer with a window and one without."""

    def __init__(self, config: VllmConfig, spec: AttentionSpec) -> None:
        size = config.cache_config.block_size = spec.block_size
        layers = {"layers.0": spec, "layers.1": attention(FullAttentionSpec, size)}
        self.cache = cache_config(config, layers)
        self.manager = KVCacheManager(
            self.cache,
            max_model_len=2048,
            scheduler_block_size=size,
            hash_block_size=size,
            enable_caching=True,
            max_in_flight_tokens=512,
        )
        self.hasher = kv_cache_utils.get_request_block_hasher(size, sha256)
        self.idle = self.num_free

    @property
    def num_free(self) -> int:
        return int(self.manager.block_pool.get_num_free_blocks())

    def request(self, prompt: int) -> Request:
        return Request(
            request_id=P,
            prompt_token_ids=list(range(prompt)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self.hasher,
        )

    def prefill(
        self, blocks: RequestBlocks, pins: Pins, prompt: int, chunk: int
    ) -> tuple[Table, ...]:
        """Compute a prompt in chunks as the scheduler does; the tables that are offered."""
        request = self.request(prompt)
        hit, local, _ = self.manager.get_computed_blocks(request)
        computed = local
        first: tuple[Any, ...] = (local, hit)
        offered: tuple[Table, ...] = ()
        while computed < prompt:
            count = min(chunk, prompt - computed)
            self.manager.new_step_starts()
            assert self.manager.allocate_slots(request, count, *first) is not None
            blocks.pin(P, prompt, pins)
            offered = blocks.tables(prompt, blocks.current(P), pins)
            computed += count
            request.num_computed_tokens, first = computed, ()
        request.append_output_token_ids(7)
        self.manager.remove_skipped_blocks(P, prompt, prompt)
        tables = self.manager.get_block_ids_for_computed_tokens(P, prompt)
        assert blocks.tables(prompt, tables, pins) == offered
        self.manager.free(request)  # what the offer keeps of the other group is vLLM's to keep
        return offered

    def wanted(self, prompt: int) -> list[int]:
        """The window's table on decode, which loads all tokens but the last."""
        request = self.request(prompt)
        hit, local, _ = self.manager.get_computed_blocks(request)
        self.manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=local,
            new_computed_blocks=hit,
            num_external_computed_tokens=prompt - 1 - local,
            delay_cache_blocks=True,
        )
        table = list(self.manager.get_block_ids(P)[WINDOW])
        self.manager.free(request)
        return table


def missing(wanted: list[int], offered: list[int], sizes: tuple[int, int], end: int) -> list[int]:
    """The entries of decode's table that prefill does not offer in full, up to token `end`."""
    remote_size, size = sizes
    return [
        entry
        for entry, block in enumerate(wanted)
        if block
        and ABSENT
        in (
            offered[token // remote_size]
            for token in range(entry * size, min((entry + 1) * size, end))
        )
    ]


PROMPTS = [1, 2, 16, 63, 64, 65, 79, 80, 95, 111, 127, 128, 129, 255, 256, 300, 511, 512, 1000]


@pytest.mark.parametrize("chunk", [32, 512], ids="chunks of {}".format)
@pytest.mark.parametrize("sizes", [(16, 16), (64, 16), (16, 64), (32, 128)], ids=str)
@pytest.mark.parametrize(
    ("spec", "window"),
    [
        (SlidingWindowSpec, {"sliding_window": 64}),
        (SlidingWindowSpec, {"sliding_window": 100}),
        (ChunkedLocalAttentionSpec, {"attention_chunk_size": 64}),
    ],
    ids=["window 64", "window 100", "chunks of attention of 64"],
)
def test_all_that_decode_wants_of_a_window_is_offered(
    vllm_config: VllmConfig,
    spec: type[AttentionSpec],
    window: dict[str, int],
    sizes: tuple[int, int],
    *,
    chunk: int,
) -> None:
    prefill, decode = (Engine(vllm_config, attention(spec, size, **window)) for size in sizes)
    groups = pagings(vllm_config, prefill.cache)
    blocks, pins = RequestBlocks(groups, prefill.cache.num_blocks, prefill.manager), Pins()
    pool = prefill.manager.block_pool
    for prompt in PROMPTS:
        offered = prefill.prefill(blocks, pins, prompt, chunk)
        table = written_out(offered[WINDOW])
        assert all(pool.blocks[block].ref_cnt == 1 for block in table if block > 0), prompt
        wanted = decode.wanted(prompt) if prompt > 1 else []
        assert missing(wanted, table, sizes, prompt - 1) == [], prompt
        blocks.unpin(pins)
        if sizes[0] == sizes[1]:  # prefill hits its own cache, which has the window before its end
            table = written_out(prefill.prefill(blocks, pins, prompt, chunk)[WINDOW])
            assert missing(wanted, table, sizes, prompt - 1) == [], prompt
            blocks.unpin(pins)
        for engine in (prefill, decode):
            assert engine.num_free == engine.idle, prompt
            assert engine.manager.reset_prefix_cache()
