"""Real engines of the oldest vLLM that is supported, and of two minors side by side.

So a fleet is upgraded from one vLLM to the next: both speak one wire version.
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from lab.cluster.client import Client
from lab.cluster.cluster import Cluster, pair_specs
from lab.cluster.engines import Engine
from lab.cluster.models.files import ensure_tiny_model
from lab.cluster.pair import Pair
from lab.cluster.prompts import random_prompt
from support.engines import PATIENT, Accounts, connect

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REPO = Path(__file__).resolve().parents[2]
OLDEST = "0.31.0"
THIS = "this"
START_S = 900
"""Two of vLLM are imported side by side, and their code for the CPU is loaded."""
LENGTHS = (5, 127, 128, 129, 300, 700, 1100, 1500)
"""Of the prompts, in tokens; a block has 128."""


@pytest.fixture(scope="module")
def oldest_python() -> Path:
    """Of an environment with the oldest vLLM, which is kept for the next time."""
    venv = REPO / f".venv-vllm-{OLDEST}"
    install = [str(REPO / "scripts" / "install"), "--cpu", "--vllm", OLDEST, "--venv", str(venv)]
    subprocess.run([*install, "--quiet"], check=True)
    return venv / "bin" / "python"


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, oldest_python: Path
) -> Iterator[dict[tuple[str, str], Engine]]:
    """Prefill and decode, of each vLLM."""
    base = pair_specs(ensure_tiny_model(), kv_cache_bytes=64 << 20, connector_config=PATIENT)
    specs = {
        (version, spec.role): replace(spec, name=f"{spec.role}-{version}", python=python)
        for version, python in ((OLDEST, oldest_python), (THIS, Path(sys.executable)))
        for spec in base
    }
    with Cluster(tmp_path_factory.mktemp("engines"), start_timeout_s=START_S) as cluster:
        yield dict(zip(specs, cluster.start(*specs.values()), strict=True))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_these_are_engines_of_the_oldest_vllm(
    engines: dict[tuple[str, str], Engine], role: str
) -> None:
    version = httpx.get(f"{engines[OLDEST, role].url}/version", timeout=60).json()["version"]
    assert version.startswith(OLDEST)


@pytest.mark.parametrize(
    ("on_prefill", "on_decode"), [(OLDEST, OLDEST), (OLDEST, THIS), (THIS, OLDEST)]
)
def test_every_prompt_is_read_from_prefill_and_answered_right(
    engines: dict[tuple[str, str], Engine], on_prefill: str, on_decode: str
) -> None:
    prefill, decode = engines[on_prefill, "prefill"], engines[on_decode, "decode"]
    seed = 3100 + 10 * [OLDEST, THIS].index(on_prefill) + [OLDEST, THIS].index(on_decode)
    prompts = [random_prompt(length, seed=seed) for length in LENGTHS]
    connect(prefill, decode)
    with Pair(prefill, decode) as pair, Client(prefill.url) as alone:
        accounts = Accounts(pair)
        answers = [pair.complete(prompt).tokens for prompt in prompts]
        accounts.expect_loaded(*(length - 1 for length in LENGTHS))
        accounts.expect_offers(len(prompts), read=len(prompts))
        accounts.expect_free()
        assert answers == [alone.complete(prompt).tokens for prompt in prompts]
