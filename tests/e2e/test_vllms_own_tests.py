"""vLLM's own tests of connectors, as they are, with this connector: units, and pairs of engines.

    NIXL_KV_VLLM_TESTS=vllm-0.32.0 pytest tests/e2e/test_vllms_own_tests.py

The variable names a folder with `tests` of vLLM's source, of the version that is installed; `vllm`
must not be beside it.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from harness.cluster.client import is_healthy
from harness.cluster.cluster import Cluster
from harness.cluster.engines import HOST, QUIET_ENV, Engine
from harness.cluster.models.files import REPO
from harness.cluster.pair import Pair
from harness.cluster.processes import ManagedProcess, Ports, stop_all
from harness.cluster.router import START_TIMEOUT_S, past_proxies
from support.engines import connected, expect_free, started
from support.tiered import multi_spec

SOURCE: Final = os.environ.get("NIXL_KV_VLLM_TESTS")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not SOURCE, reason="needs vLLM's tests: set NIXL_KV_VLLM_TESTS"),
]

UNITS: Final = Path("tests/v1/kv_connector/unit")
PAIRS: Final = Path("tests/v1/kv_connector/nixl_integration")
FILES: Final = (
    *("cache_pollution_prevention", "config", "error_propagation", "handshake_pp_aggregation"),
    *("hma_auto_config", "invalid_blocks_correctness", "kv_connector_lifecycle"),
    *("kv_load_failure_recovery", "multi_connector", "output_aggregator"),
    *("remote_decode_lifecycle", "remote_prefill_lifecycle", "scheduler_kv_connector_override"),
)
OVERRIDE: Final = "test_scheduler_kv_connector_override.py"
OTHERS: Final[Mapping[str, Sequence[str]]] = {
    "they ask a model hub": (
        "test_multi_connector.py::test_multi_example_connector_consistency",
        f"{OVERRIDE}::test_connector_receives_block_hashes",
        f"{OVERRIDE}::test_connector_block_state_covers_steps_without_new_blocks",
    ),
    "a load of ours ends before the prompt's last token": (
        "test_remote_prefill_lifecycle.py::test_basic_lifecycle",
    ),
    "our ticket names no blocks": ("test_remote_decode_lifecycle.py::test_prefix_cache_lifecycle",),
}
"""The tests of UNITS that are left out."""
LIMIT_S: Final = 1800.0


def run(tests: Sequence[str], options: Sequence[str] = (), **env: str) -> None:
    """Run some of vLLM's tests. They must pass, and at least one must run.

    Raises:
        AssertionError: otherwise.
    """
    folders = [REPO, REPO / "scripts", REPO / "tests"]
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "support.vllm_suite"]
    # The folder may be below one with a configuration of pytest.
    command += ["-c", os.devnull, "--rootdir=.", f"--confcutdir={Path(tests[0]).parent}"]
    command += ["-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options, *tests],
        cwd=SOURCE,
        env={**os.environ, **QUIET_ENV, "PYTHONPATH": os.pathsep.join(map(str, folders)), **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    print(done.stdout[-400:])
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]


def test_units_of_connectors_and_of_the_scheduler() -> None:
    left_out = [f"--deselect={UNITS / name}" for names in OTHERS.values() for name in names]
    run([str(UNITS / f"test_{name}.py") for name in FILES], left_out)


class Proxy(ManagedProcess):
    """vLLM's proxy for its tests of pairs."""

    def __init__(self, log_path: Path, prefill: Engine, decode: Engine, port: int) -> None:
        super().__init__("toy-proxy", log_path)
        self._engines = {"prefiller": prefill, "decoder": decode}
        self.port = port

    def start(self) -> None:
        assert SOURCE
        command = [sys.executable, str(Path(SOURCE).resolve() / PAIRS / "toy_proxy_server.py")]
        command += ["--port", str(self.port)]
        for role, engine in self._engines.items():
            command += [f"--{role}-hosts", HOST, f"--{role}-ports", str(engine.port)]
        env = os.environ | QUIET_ENV
        self.launch(command, env | past_proxies(env))

    def is_ready(self) -> bool:
        self.check_alive()
        return is_healthy(f"http://{HOST}:{self.port}", "/healthcheck")


@contextmanager
def proxied(pair: Pair, folder: Path) -> Iterator[Mapping[str, str]]:
    """The ports of a pair and of vLLM's proxy before it, as vLLM's tests want them."""
    proxy = Proxy(folder / "proxy.log", pair.prefill, pair.decode, Ports().next_free())
    proxy.start()
    try:
        proxy.wait_ready(START_TIMEOUT_S)
        ports = {"PREFILL": pair.prefill.port, "DECODE": pair.decode.port, "PROXY": proxy.port}
        yield {f"{name}_PORT": str(port) for name, port in ports.items()}
    finally:
        stop_all([proxy])


def test_edge_cases_of_a_pair(pair: Pair, tmp_path: Path) -> None:
    """A prompt shorter than a block, and prompts of which decode has all or the beginning."""
    with proxied(pair, tmp_path) as ports:
        run([str(PAIRS / "test_edge_cases.py")], **ports)
    for client in (pair.to_prefill, pair.to_decode):
        expect_free(client)


def test_edge_cases_of_a_pair_with_an_offloading_connector(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The others expect that decode computes no token of a prompt; here it computes the last."""
    chosen = ("-k", "correctness or direct")
    with (
        started(cluster, multi_spec("prefill"), multi_spec("decode")) as (prefill, decode),
        connected(prefill, decode) as pair,
        proxied(pair, tmp_path) as ports,
    ):
        run([str(PAIRS / "test_multi_connector_edge_cases.py")], chosen, **ports)
