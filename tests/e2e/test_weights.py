"""Prefill and decode with other weights of the same model: only their labels tell them apart."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.cluster.answers import Question
from harness.cluster.client import Client
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import HOST, Engine
from harness.cluster.metrics import FAILURES, LOADS, TICKETS_REFUSED, CountersSince
from harness.cluster.models.families import TinyModel
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.prompts import random_prompt
from nixl_kv.keys import write_key_file
from support.engines import PATIENT, connected, expect, started
from support.nixl_kv_command import nixl_kv

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOKENS = 16


def label(engine: Engine, weights: str, key_file: Path) -> None:
    where = f"{HOST}:{engine.side_port}"
    result = nixl_kv(f"set-weights '{weights}' --key-file {key_file} --at {where}")
    assert result.exit_code == 0, result.output


def test_kv_of_other_weights_is_read_unless_labels_differ(
    cluster: Cluster, single: Client, tmp_path: Path
) -> None:
    key_file = tmp_path / "key"
    write_key_file(key_file)
    specs = pair_specs(
        ensure_tiny_model(),
        suffix="-weights",
        kv_cache_bytes=64 << 20,
        connector_config={**PATIENT, "key_file": str(key_file)},
    )
    prefill = replace(specs[0], model=ensure_tiny_model(model=TinyModel(seed=1)))
    with started(cluster, prefill, specs[1]) as engines, connected(*engines) as pair:

        def likeness(seed: int) -> str:
            question = Question.of(single, random_prompt(150, seed=seed), TOKENS)
            return question.compare(pair.complete(question.prompt, TOKENS))

        since = CountersSince(pair.to_decode)
        assert likeness(170_000) == "other"  # what labels are for
        expect(since, {LOADS: 1, TICKETS_REFUSED: 0})

        label(pair.prefill, "step 7", key_file)
        label(pair.decode, "step 8", key_file)
        assert likeness(170_001) == "same"
        expect(since, {LOADS: 1, TICKETS_REFUSED: 1, FAILURES: 0})
