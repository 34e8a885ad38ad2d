"""Our connector, which kills an engine when a rank here makes a transition.

The file that `NIXL_KV_KILL` names holds a process group, a count and a part of a transition as
`nixl-kv status` prints it. The group is killed when the part has come that often. Then the file is
emptied.
"""

import os
import signal
from pathlib import Path
from unittest.mock import patch

import torch

from nixl_kv.connector.connector import NixlKVConnector as OurConnector
from nixl_kv.engine import engine
from nixl_kv.engine.event_log import EventLog, describe
from nixl_kv.protocol.events import Transition


class KillingLog(EventLog):
    """It kills before the rank does what follows from the transition."""

    def record(self, transition: Transition) -> None:
        super().record(transition)
        plan = Path(os.environ["NIXL_KV_KILL"])
        group, _, rest = plan.read_text("utf-8").partition(" ")
        count, _, part = rest.partition(" ")
        if part and part in describe(transition):
            plan.write_text(f"{group} {int(count) - 1} {part}" if int(count) > 1 else "", "utf-8")
            if int(count) == 1:
                os.killpg(int(group), signal.SIGKILL)


class NixlKVConnector(OurConnector):
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        with patch.object(engine, "EventLog", KillingLog):
            super().register_kv_caches(kv_caches)
