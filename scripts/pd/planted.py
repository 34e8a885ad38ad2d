"""Our connector, but for faults that it plants into what decode has read: for `scripts/damage`.

    PYTHONPATH=scripts NIXL_KV_PLANT=byte vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "NixlKVConnector", "kv_connector_module_path": "pd.planted", ...}'

`NIXL_KV_PLANT` is one of `pd.detect_planting.FAULTS`, or `FAULT:RATE` for a share of the loads; or
`@PATH` of a file that holds this, or is empty, and is looked at for each load.
"""

import logging
import os
import random
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from nixl_kv.config import Config
from nixl_kv.connector import setup
from nixl_kv.connector.caches import cache_layout
from nixl_kv.connector.commands import StepCommands
from nixl_kv.connector.connector import NixlKVConnector as Sound
from nixl_kv.connector.worker import Worker
from nixl_kv.protocol.events import Load
from nixl_kv.transport.base import Transport
from pd.detect_planting import VARIABLE, Planted, PlantedTransport, Planter, Planting

logger = logging.getLogger("nixl_kv.planted")


class LoggingPlanter(Planter):
    """Says what it planted, and where."""

    def landed(self, planting: Planting) -> Planted | None:
        """See `Planter.landed`."""
        planted = super().landed(planting)
        if planted is not None:
            row, more = planted.rows[0], len(planted.rows) - 1
            logger.warning(
                "planted %s in request %s: %s of head %d of layer %s and %d more, tokens %d to %d",
                planted.fault,
                planting.load.request,
                row.part,
                row.head,
                row.layer,
                more,
                planted.first,
                planted.last,
            )
        return planted


class PlantedWorker(Worker):
    """One rank, whose reads end as the environment says."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        """Nothing is planted before the cache exists."""
        super().__init__(vllm_config, kv_cache_config)
        self._configs = vllm_config, kv_cache_config
        self._planter: Planter | None = None

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Put the planter around each transport that this life of the rank makes."""
        layout = cache_layout(*self._configs, kv_caches)
        planter = self._planter = LoggingPlanter(layout, np.random.default_rng())
        sound = setup._transport  # noqa: SLF001 - the one place where transports are made

        def planted(config: Config) -> Transport:
            return PlantedTransport(sound(config), planter)

        with patch.object(setup, "_transport", planted):
            super().register(kv_caches)

    def swap(self, step: StepCommands) -> None:
        """Choose a fault for each load of the step."""
        for command in step.commands:
            fault = _chosen() if isinstance(command, Load) else None
            if fault and self._planter is not None and isinstance(command, Load):
                self._planter.expect(command, fault)
        super().swap(step)


class NixlKVConnector(Sound):
    """Under the same name, so that nothing else of an engine's configuration changes."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Take another worker."""
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.WORKER:
            self._worker_role = PlantedWorker(vllm_config, kv_cache_config)


def _chosen() -> str | None:
    """The fault for the next load, if it is to have one."""
    value = os.environ.get(VARIABLE, "")
    if value.startswith("@"):
        value = Path(value[1:]).read_text(encoding="utf-8").strip()
    fault, _, rate = value.partition(":")
    if not fault or random.random() >= float(rate or 1):  # noqa: S311 - no secret
        return None
    return fault
