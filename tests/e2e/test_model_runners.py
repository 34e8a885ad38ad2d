"""vLLM's V2 model runner, GPUs' default, on CPU: see `MODEL_RUNNER` of harness.cluster."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cluster.client import Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import MODEL_RUNNER, Engine, EngineSpec, python_path
from harness.cluster.prompts import random_prompt
from harness.cluster.waiting import wait_until
from support.engines import EVENT_S, Accounts, connected, started

pytestmark = pytest.mark.e2e

TESTS = Path(__file__).resolve().parents[1]
TRACE = "traced: "  # as support.traced_connector writes it
ANSWER = 4  # tokens: each takes the interpreter a while


def test_engines_with_the_v2_runner_read_from_each_other_and_from_v1(
    cluster: Cluster,
    base_specs: tuple[EngineSpec, EngineSpec],
    base_engines: tuple[Engine, Engine, Engine],
    single: Client,
) -> None:
    v1_prefill, v1_decode, _ = base_engines
    specs = [
        replace(spec, name=f"{spec.name}-v2", extra_env={MODEL_RUNNER: "v2"}) for spec in base_specs
    ]
    with started(cluster, *specs) as (prefill, decode):
        for engine in (prefill, decode):
            assert "Using V2 Model Runner" in engine.log_text()
        for seed, engines in enumerate(
            ((prefill, decode), (v1_prefill, decode), (prefill, v1_decode)), 3200
        ):
            prompts = [random_prompt(length, seed=seed) for length in (5, 129, 300)]
            with connected(*engines) as pair:
                accounts = Accounts(pair)
                for prompt in prompts:
                    answer = pair.complete(prompt, ANSWER)
                    assert answer.tokens == single.complete(prompt, ANSWER).tokens
                accounts.expect_loaded(4, 128, 299)
                accounts.expect_free()


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_an_offer_counts_as_written_after_the_draft_model(
    cluster: Cluster, base_specs: tuple[EngineSpec, EngineSpec], runner: str
) -> None:
    speculation = {
        "method": "draft_model",
        "model": str(base_specs[0].model.absolute()),
        "num_speculative_tokens": 3,
    }
    spec = replace(
        base_specs[0],
        name=f"prefill-traced-{runner}",
        module="support.traced_connector",
        extra_args=("--speculative-config", json.dumps(speculation)),
        extra_env={MODEL_RUNNER: runner, "PYTHONPATH": python_path(TESTS)},
    )
    with started(cluster, spec) as (prefill,), Client(prefill.url) as client:
        before = len(prefill.log_text())

        def traced() -> list[str]:
            lines = prefill.log_text()[before:].splitlines()
            return [line.split(TRACE)[1] for line in lines if TRACE in line]

        client.ticket(random_prompt(40, seed=3210))
        assert wait_until(lambda: "written" in traced(), EVENT_S)
    first_step = traced()[: traced().index("written") + 1]
    assert first_step == ["step", "draft", "event", "written"]
