"""Real engines of the oldest and the newest vLLM, each with itself and beside the one in .venv.

So a fleet is upgraded from one vLLM to the next: all speak one wire version.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cluster.client import Client
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import MODEL_RUNNER, Engine, EngineSpec
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.prompts import random_prompt
from support.engines import PATIENT, Accounts, connected

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REPO = Path(__file__).resolve().parents[2]
OLDEST, NEWEST = "0.31.0", "0.33.0"
OTHER, THIS = "other", "this"
START_S = 900  # two of vLLM are imported side by side, and their code for the CPU is loaded
LENGTHS = (5, 127, 128, 129, 300, 700, 1100, 1500)  # of the prompts, in tokens; a block has 128


def python_with(vllm: str) -> Path:
    """The interpreter of an environment with that vLLM, which is kept for the next time."""
    venv = REPO / f".venv-vllm-{vllm}"
    install = [str(REPO / "scripts" / "install"), "--cpu", "--vllm", vllm, "--venv", str(venv)]
    subprocess.run([*install, "--quiet"], check=True)
    return venv / "bin" / "python"


@pytest.fixture(
    scope="module", params=[OLDEST, NEWEST, f"{NEWEST}, V2 runner"], ids=lambda name: name
)
def engines(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Mapping[tuple[str, str], Engine]]:
    """Prefill and decode, of another vLLM and of this one."""
    version, _, runner = request.param.partition(", ")
    extra_env = {MODEL_RUNNER: "v2"} if runner else {}
    base = pair_specs(ensure_tiny_model(), kv_cache_bytes=64 << 20, connector_config=PATIENT)
    specs: dict[tuple[str, str], EngineSpec] = {
        (which, spec.role): replace(
            spec, name=f"{spec.role}-{which}", python=python, extra_env=extra_env
        )
        for which, python in ((OTHER, python_with(version)), (THIS, Path(sys.executable)))
        for spec in base
    }
    with Cluster(tmp_path_factory.mktemp("engines"), start_timeout_s=START_S) as cluster:
        engines = dict(zip(specs, cluster.start(*specs.values()), strict=True))
        for engine in engines.values():
            with Client(engine.url) as client:
                is_other = client.vllm_version().startswith(version)
            assert is_other == (engine.spec.python != Path(sys.executable))
        yield engines


@pytest.mark.parametrize(
    ("on_prefill", "on_decode"), [(OTHER, OTHER), (OTHER, THIS), (THIS, OTHER)]
)
def test_every_prompt_is_read_from_prefill_and_answered_right(
    engines: Mapping[tuple[str, str], Engine], on_prefill: str, on_decode: str
) -> None:
    prefill, decode = engines[on_prefill, "prefill"], engines[on_decode, "decode"]
    seed = 3100 + 10 * [OTHER, THIS].index(on_prefill) + [OTHER, THIS].index(on_decode)
    prompts = [random_prompt(length, seed=seed) for length in LENGTHS]
    with connected(prefill, decode) as pair, Client(prefill.url) as alone:
        accounts = Accounts(pair)
        answers = [pair.complete(prompt).tokens for prompt in prompts]
        accounts.expect_loaded(*(length - 1 for length in LENGTHS))
        accounts.expect_offers(len(prompts), read=len(prompts))
        accounts.expect_free()
        assert answers == [alone.complete(prompt).tokens for prompt in prompts]
