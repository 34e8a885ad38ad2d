"""What travels between vLLM's scheduler and its workers: one record each way that vLLM carries."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from nixl_kv.protocol.events import Command


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, with each step: what to do, in order."""

    commands: list[Command] = field(default_factory=list)
    computes: bool = True
    """Whether there is anything to compute; else all requests wait, for loads."""


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once after each registration: an encoded `RankDescription`."""

    rank_description: bytes
