"""Our connector, but for faults that it plants into what decode has read.

    PYTHONPATH=tests NIXL_KV_PLANT=byte vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "NixlKVConnector", "kv_connector_module_path": "suites.planted", ...}'

`NIXL_KV_PLANT` is one of `suites.detect.planting.FAULTS`, `FAULT@NAME` for layers with this in
their names, or `FAULT:RATE` for a share of the loads; or `@PATH` of a file that holds this, or is
empty, and is looked at for each load.
"""

import logging
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Final
from unittest.mock import patch

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from harness.local.engine import features_with
from nixl_kv.connector import worker
from nixl_kv.connector.connector import NixlKVConnector as SoundConnector
from nixl_kv.connector.worker import StepMetadata
from nixl_kv.engine.engine import RankSpec
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.protocol.events import StartLoad
from suites.detect.planting import Planted, Planter, Planting, PlantingCopier, PlantingTransport

VARIABLE: Final = "NIXL_KV_PLANT"

logger = logging.getLogger("nixl_kv.planted")


class LoggingPlanter(Planter):
    """Logs what it planted, and where."""

    def after_read(self, planting: Planting) -> Planted | None:
        """See `Planter.after_read`."""
        planted = super().after_read(planting)
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


class NixlKVConnector(SoundConnector):
    """Under the same name, so that nothing else of an engine's configuration changes.

    In a worker, reads end as the environment says.
    """

    _planter: Planter | None = None  # nothing is planted before the cache exists

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Put a planter around each transport that this life of the rank makes."""
        sound = worker.rank_spec

        def planting_spec(vllm_config: VllmConfig, layout: CacheLayout) -> RankSpec:
            spec = sound(vllm_config, layout)
            planter = self._planter = LoggingPlanter(layout, np.random.default_rng())
            return replace(
                spec,
                make_transport=lambda: PlantingTransport(spec.make_transport(), planter),
                features=features_with(
                    make_copier=lambda threads: PlantingCopier(threads, planter)
                ),
            )

        with patch.object(worker, "rank_spec", planting_spec):
            super().register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Choose a fault for each load of the step."""
        step = connector_metadata
        for command in step.commands if isinstance(step, StepMetadata) else ():
            if isinstance(command, StartLoad) and self._planter is not None:
                fault = _choose_fault()
                if fault:
                    self._planter.expect(command, fault)
        super().bind_connector_metadata(step)


def _choose_fault() -> str | None:
    """The fault for the next load, if it is to have one."""
    value = os.environ.get(VARIABLE, "")
    if value.startswith("@"):
        value = Path(value[1:]).read_text(encoding="utf-8").strip()
    fault, _, rate = value.partition(":")
    if not fault or random.random() >= float(rate or 1):  # noqa: S311 - no secret
        return None
    return fault
