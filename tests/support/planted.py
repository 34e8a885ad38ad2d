"""Engines that plant faults into what they read, and whether `verify` has found these."""

import json
import re
from dataclasses import replace
from pathlib import Path

from harness.cluster.engines import Engine, EngineSpec, python_path
from support.planting import Planted

TESTS = Path(__file__).resolve().parents[1]
PLANTED = re.compile(r"planted (\{.*\})")
FAILED = re.compile(r"request (\S+): KV not loaded: (.*\(corrupt.*)")


def planted_spec(spec: EngineSpec, plan: Path) -> EngineSpec:
    """The same decode engine with the faults that the file `plan` names."""
    env = {"NIXL_KV_PLANT": str(plan), "PYTHONPATH": python_path(TESTS)}
    return replace(
        spec,
        name=f"{spec.name}-planted",
        module="support.planted_connector",
        extra_env={**spec.extra_env, **env},
    )


def expect_named(engine: Engine, start: int = 0) -> list[str]:
    """Each fault in the log was found, by its layer, part, head and tokens; their first rows."""
    log = engine.log_text(start)
    faults = [Planted(**json.loads(text)) for text in PLANTED.findall(log)]
    reasons = dict(FAILED.findall(log))
    assert [fault.request for fault in faults] == list(reasons)
    for fault in faults:
        assert fault.is_named_in(reasons[fault.request]), (fault, reasons)
    return [fault.rows[0] for fault in faults]
