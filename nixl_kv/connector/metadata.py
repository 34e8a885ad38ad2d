"""The records that vLLM carries between its scheduler process and its workers."""

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
    """Scheduler to workers, with each step."""

    commands: list[Command] = field(default_factory=list)  # in this order
    computes: bool = True  # False if all requests wait, for loads
    # Each worker reports these loads as failed. All had reported them as good, but the scheduler
    # held that back because its cache was reset.
    failed: list[RequestId] = field(default_factory=list)


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, with a step's output: new incarnations of ranks."""

    rank_descriptions: Mapping[int, bytes]  # by rank, as in HandshakeMetadata

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        if isinstance(other, WorkerMetadata):
            return WorkerMetadata({**self.rank_descriptions, **other.rank_descriptions})
        return self


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once after each registration of the cache."""

    rank_description: bytes  # an encoded RankDescription
