"""Real starts that fail: the last line that an operator sees names the cause."""

import json
import os
import socket
import subprocess
import sys
from typing import Any, Final

import pytest

from harness.cluster.engines import HOST
from harness.cluster.models.files import ensure_tiny_model

pytestmark = pytest.mark.e2e

START_S: Final = 600.0  # on a busy machine
OURS: Final = {"kv_connector": "NixlConnector", "kv_connector_module_path": "nixl_kv.connector"}


def start(extra: dict[str, Any], depth: int = 0) -> tuple[int, list[str]]:
    """The exit status and the lines of an engine's start."""
    transfer = {**OURS, "kv_role": "kv_producer", "kv_connector_extra_config": extra}
    for _ in range(depth):
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"connectors": [transfer]},
        }
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", "0"]
    options = ["--model", str(ensure_tiny_model()), "--enforce-eager", "--dtype", "float32"]
    environ = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(
        [*program, *options, "--kv-transfer-config", json.dumps(transfer)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=START_S,
        env={**os.environ, **environ},
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("depth", [0, 2], ids=["alone", "in nested MultiConnectors"])
def test_a_misspelt_key_is_the_last_line_and_no_engine_starts(depth: int) -> None:
    status, lines = start({"ofer_ttl_s": 5, "prot": 1}, depth)
    assert status == 1
    assert "did you mean 'offer_ttl_s'?" in lines[-1], lines[-5:]
    assert "did you mean 'port'?" in lines[-1]
    assert not [line for line in lines if "EngineCore" in line]


def test_an_error_of_the_engines_process_is_repeated_as_the_last_line() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        status, lines = start({"port": port})
    assert status == 1
    assert lines[-1].startswith("nixl_kv: kv_connector_extra_config['port'] is "), lines[-5:]
    assert f"port {port} of {HOST} cannot be used: Address already in use" in lines[-1]
    assert [line for line in lines if "Engine core initialization failed" in line]
