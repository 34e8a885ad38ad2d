"""VLLM's fault of docs/upstream/vllm-deepseek-v4-cpu.md, and the repair that tests use."""

import runpy
from typing import Any
from unittest import mock

import pytest

from harness.cluster.engines import shim_env

cpu_mla: Any = pytest.importorskip("vllm.models.deepseek_v4.cpu.cpu_mla")

KINDS = {"swaonly", "c4a", "c128a", "c1a", "c2a"}
"""Those that the base's `build` reads."""


def test_vllms_builder_for_cpu_lacks_kinds_that_its_base_reads() -> None:
    """Once this fails, the report and the repair can go."""
    builder = cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder
    base: Any = builder.__base__
    assert base.build_tile_scheduler(mock.Mock(), 0).keys() == KINDS
    assert builder.build_tile_scheduler(mock.Mock(), 3).keys() == {"swaonly", "c4a", "c128a"}


def test_the_repaired_builder_has_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shim_env("deepseek_v4_on_cpu")["PYTHONPATH"].split(":")[0]
    builder = cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder
    monkeypatch.setattr(builder, "build_tile_scheduler", builder.build_tile_scheduler)
    runpy.run_path(f"{folder}/repairs.py")["all_kinds"](cpu_mla)
    made = builder.__new__(builder).build_tile_scheduler(3)
    assert made == dict.fromkeys(KINDS)
