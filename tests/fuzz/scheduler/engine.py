"""vLLM's own scheduler with this connector, in a configuration that a seed chooses."""

import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

import nixl_kv.connector.scheduler as ours
from fuzz.scheduler.saver import LOADS
from nixl_kv.connector.stats import RankReports
from nixl_kv.connector.worker import HandshakeMetadata, WorkerMetadata
from nixl_kv.early.answers import PROMISE, seal_promise
from nixl_kv.ids import RequestId, new_incarnation, new_nonce
from nixl_kv.protocol.messages import Hint, Reader, encode
from support.records import rank_description, teller, ticket_for
from support.vllm_scheduler import BLOCK, MAX_TOKENS, OURS, hooked, make_config, make_scheduler

LONGEST: Final = 160  # tokens of a prompt
SAVER: Final = {"kv_connector": "Saver", "kv_connector_module_path": "fuzz.scheduler.saver"}


@dataclass(frozen=True)
class Group:
    """A cache group: what its layers keep, and for how many tokens."""

    kind: str  # full, window, align or none; the last two are Mamba's cache modes
    window: int = 0

    @property
    def block_size(self) -> int:
        """Tokens per entry of the block table."""
        return MAX_TOKENS if self.kind == "none" else BLOCK  # as Mamba's cache mode `none`

    @property
    def is_state(self) -> bool:
        """Whether it keeps one state instead of something for each token."""
        return self.kind in ("align", "none")

    def spec(self, dtype: torch.dtype) -> Any:
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
    is_fast: bool  # hears of loads between steps
    tier_loads: bool = False  # the other connector loads within steps, and may fail
    shortest: int = 2  # tokens of a prompt
    longest: int = LONGEST
    longest_answer: int = 40
    pair_share: float = 0.5  # of the tickets, how many are out before their prompt
    conversations: bool = False
    num_drafts: int = 0  # tokens that a draft model proposes for each step
    long_prefill_token_threshold: int = 0

    @classmethod
    def drawn(cls, rng: random.Random) -> "Configuration":
        """One of all that are supported; one in two computes most of its prompts in parts."""
        groups = rng.choice(MODELS)
        drawn = cls(
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
            is_fast=rng.random() < 0.5,
        )
        if rng.random() < 0.15:
            return drawn._beside_tier(rng)
        return drawn._in_parts(rng) if rng.random() < 0.5 else drawn

    @classmethod
    def drawn_beside_tier(cls, rng: random.Random) -> "Configuration":
        return cls.drawn(rng)._beside_tier(rng)

    @classmethod
    def drawn_with_window(cls, rng: random.Random) -> "Configuration":
        return replace(cls.drawn(rng), groups=(FULL, Group("window", 32)), tier_loads=False)

    @classmethod
    def drawn_for_reads(cls, rng: random.Random) -> "Configuration":
        """One whose cached blocks other engines may read. Few blocks are free."""
        drawn = replace(
            cls.drawn(rng),
            role=rng.choice(["kv_both", "kv_consumer"]),
            groups=(FULL,),
            is_multi=False,
            tier_loads=False,
            policy=rng.choice(["fcfs", "priority"]),
            caches_prefixes=True,
            num_blocks=rng.choice([16, 24, 40, 80]),
            num_batched_tokens=rng.choice([48, 64, 256]),
            max_num_seqs=rng.choice([4, 8]),
            shortest=2,
            longest=rng.choice([70, LONGEST]),
            longest_answer=100,
            pair_share=0.5,
            conversations=True,
            long_prefill_token_threshold=rng.choice([0, 32]),
        )
        if rng.random() < 0.2:
            beside = replace(drawn, policy="fcfs", long_prefill_token_threshold=0)
            return replace(beside._beside_tier(rng), role="kv_both")
        if rng.random() < 0.3:
            return drawn._in_a_crowd()
        return replace(drawn, num_drafts=0 if drawn.is_async else rng.choice([0, 3]))

    def _in_a_crowd(self) -> "Configuration":
        """One prompt fills almost all blocks, and an urgent one preempts it while it runs."""
        return replace(
            self,
            is_async=False,
            policy="priority",
            num_blocks=14,
            num_batched_tokens=48,
            max_num_seqs=4,
            long_prefill_token_threshold=32,
        )

    def _beside_tier(self, rng: random.Random) -> "Configuration":
        """Another connector loads within steps. vLLM discards a step of one cache group alone."""
        return replace(
            self,
            role=rng.choice(["kv_producer", "kv_both"]),
            groups=(FULL,),
            is_async=False,
            is_multi=True,
            tier_loads=True,
            caches_prefixes=True,
            num_blocks=100,
            num_batched_tokens=rng.choice([128, 256]),
            max_num_seqs=8,
            shortest=90,
            longest=LONGEST,
        )

    def _in_parts(self, rng: random.Random) -> "Configuration":
        """Decode may read each step of most prompts, and few blocks are free."""
        return replace(
            self,
            role=rng.choice(["kv_producer", "kv_producer", "kv_both"]),
            groups=(FULL,),
            is_multi=False,
            caches_prefixes=rng.random() < 0.8,
            num_blocks=rng.choice([24, 24, 40]),
            num_batched_tokens=rng.choice([32, 48, 64]),
            max_num_seqs=rng.choice([4, 8]),
            offer_share=0.5,
            shortest=90,
            pair_share=0.9,
        )

    def transfer(self) -> KVTransferConfig:
        extra = {
            "port": 0,
            "overlap": "on" if self.is_fast else "off",
            "on_load_failure": self.on_load_failure,
            "offer_share": self.offer_share,
            "conversations": "on" if self.conversations else "off",
        }
        child = {**OURS, "kv_role": self.role, "kv_connector_extra_config": extra}
        if not self.is_multi:
            return KVTransferConfig(**child)
        options = {LOADS: self.tier_loads}
        tier = {**SAVER, "kv_role": self.role, "kv_connector_extra_config": options}
        return KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role=self.role,
            kv_load_failure_policy=self.on_load_failure,
            kv_connector_extra_config={"connectors": [child, tier]},
        )


class Engine:
    """vLLM's scheduler with the connector. The caller is its workers."""

    def __init__(self, configuration: Configuration) -> None:
        self.groups = configuration.groups
        self.now = 0.0
        config = make_config(
            configuration.transfer(),
            configuration.num_blocks,
            is_async=configuration.is_async,
            caches_prefixes=configuration.caches_prefixes,
            max_num_seqs=configuration.max_num_seqs,
            max_num_batched_tokens=configuration.num_batched_tokens,
            policy=configuration.policy,
            long_prefill_token_threshold=configuration.long_prefill_token_threshold,
        )
        (last,) = configuration.groups[-1:]
        if last.is_state:
            config.cache_config.mamba_cache_mode = last.kind
            config.cache_config.mamba_block_size = last.block_size
        dtype = config.model_config.dtype
        specs = [KVCacheGroupSpec([group.kind], group.spec(dtype)) for group in self.groups]
        self.vllm = make_scheduler(config, specs, hooked(config))
        self.vllm.num_spec_tokens = self.vllm.num_lookahead_tokens = configuration.num_drafts
        self.connector = self.vllm.connector
        described = HandshakeMetadata(encode(rank_description(incarnation=new_incarnation())))
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): described})
        child = self.connector._connectors[0] if configuration.is_multi else self.connector
        self.role: ours.Scheduler = child
        self.role._decode._clock = lambda: self.now
        self.role._prefill._clock = lambda: self.now
        self._is_multi = configuration.is_multi

    def tables(self, request: str) -> tuple[list[int], ...]:
        """A request's block table in each group."""
        tables: tuple[list[int], ...] = self.vllm.kv_cache_manager.get_block_ids(request)
        return tables

    def ticket(self, tokens: list[int], *, is_early: bool) -> dict[str, Any]:
        """A ticket of another engine that has computed this prompt, or has answered early."""
        ticket = ticket_for(tokens, new_nonce(), incarnation=new_incarnation(), is_early=is_early)
        return self.role._trust.seal(ticket)

    def promise(self) -> dict[str, Any]:
        """The field that this engine's front end adds to a request that it answers early."""
        return {PROMISE: seal_promise(new_nonce(), self.role._trust.ticket_key)}

    def metadata(self, output: SchedulerOutput) -> Any:
        """This connector's metadata for its workers in a step."""
        metadata = output.kv_connector_metadata
        return metadata.metadata[0] if self._is_multi else metadata

    def saves(self, output: SchedulerOutput) -> list[str]:
        """The requests whose blocks the other connector saves, beginning with this step."""
        return output.kv_connector_metadata.metadata[1].requests if self._is_multi else []

    def tier_loads(self, output: SchedulerOutput) -> dict[str, range]:
        """The tokens that the other connector loads within a step, by request."""
        return output.kv_connector_metadata.metadata[1].loads if self._is_multi else {}

    @property
    def teller(self) -> Reader:
        return teller(engine=self.role._engine_id)

    def granted(self, names: Collection[str]) -> Any:
        """The workers' reports of offers that decode has claimed."""
        reports = RankReports(granted={RequestId(name) for name in names})
        meta = WorkerMetadata({}, reports)
        return MultiKVConnectorWorkerMetadata((meta, None)) if self._is_multi else meta

    def tell(self, hint: Hint) -> None:
        """A worker's rank tells the scheduler's process."""
        if self.role._directory is not None:
            self.role._directory._hints.append(hint)

    def close(self) -> None:
        self.connector.shutdown()
