"""What travels between vLLM's scheduler and its workers: one record each way that vLLM carries."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from nixl_kv.ids import RequestId
from nixl_kv.protocol.events import Command


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, with each step: what to do, in order."""

    commands: list[Command] = field(default_factory=list)
    computes: bool = True
    """Whether there is anything to compute; else all requests wait, for loads."""

    failed: list[RequestId] = field(default_factory=list)
    """Loads that all workers have reported as good, and that the scheduler did not pass on because
    its cache was reset: each worker reports them as failed."""


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, with a step's output: new lives of ranks, as `HandshakeMetadata`."""

    rank_descriptions: Mapping[int, bytes]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Those of several ranks."""
        if isinstance(other, WorkerMetadata):
            return WorkerMetadata({**self.rank_descriptions, **other.rank_descriptions})
        return self


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once after each registration: an encoded `RankDescription`."""

    rank_description: bytes
