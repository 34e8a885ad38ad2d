"""Our connector, except that it plants faults into the bytes that decode has read (CPU only).

The file that `NIXL_KV_PLANT` names holds a fault of `support.planting.FAULTS`, or `FAULT@NAME` for
layers with NAME in their names, or nothing; each load looks there. Loads come one at a time. The
fault `exception` ends what the transfer thread does, and `slow` makes each read take SLOW_S.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from nixl_kv import verify
from nixl_kv.connector.connector import NixlKVConnector as SoundConnector
from nixl_kv.connector.worker import StepMetadata
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.protocol.events import StartLoad
from nixl_kv.reading.agent import ActiveRead, ReadAgent
from nixl_kv.verify.queue import DigestQueue
from support.planting import Planter

SLOW_S = 0.3


def planted() -> str:
    return Path(os.environ["NIXL_KV_PLANT"]).read_text("utf-8")


def _poll_late(
    agent: ReadAgent, read: ActiveRead, poll: Callable[..., Any] = ReadAgent._poll
) -> Any:
    """The agent sees the end of a load's read late, as over a slow link."""
    is_early = agent._clock() - read.started_at < SLOW_S
    return [] if read.request and is_early and planted() == "slow" else poll(agent, read)


ReadAgent._poll = _poll_late  # type: ignore[method-assign,assignment]


class NixlKVConnector(SoundConnector):
    """Has the same name, so that nothing else of an engine's configuration changes."""

    _planter: Planter | None = None  # of a worker that has a cache

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        def open_planting(layout: CacheLayout, _digester: object, *others: Any) -> DigestQueue:
            self._planter = Planter(layout)
            return DigestQueue(layout, self._planter, *others)

        with patch.object(verify, "DigestQueue", open_planting):
            super().register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        fault, _, where = planted().partition("@")
        step = connector_metadata
        for command in step.commands if isinstance(step, StepMetadata) else ():
            if not isinstance(command, StartLoad):
                continue
            if fault == "exception" and self._engine is not None:
                self._engine.submit([None])  # type: ignore[list-item]
            elif fault and fault != "slow" and self._planter is not None:
                self._planter.expect(command, fault, where)
        super().bind_connector_metadata(step)
