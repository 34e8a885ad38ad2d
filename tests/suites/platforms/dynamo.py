"""Dynamo: its frontend and two workers of vLLM, which find each other by files."""

import json
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from harness.cluster.client import Client, is_healthy
from harness.cluster.cluster import Cluster
from harness.cluster.engines import CPU_DTYPE, CPU_ENV, HOST, MODEL_NAME, QUIET_ENV, Role
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.processes import ManagedProcess, Ports, stop_all
from suites.platforms.asking import START_S, WITH_KEY, Engines, Outcome, ask
from suites.platforms.environments import NEVER, Environment

DYNAMO: Final = "1.6.1"
VLLM: Final = "0.31.0"
ENVIRONMENT: Final = Environment(
    "dynamo", VLLM, (f"ai-dynamo=={DYNAMO}",), ("certifi>=2026.1", f"aisimulate {NEVER}")
)
WORKER: Final = Path(__file__).parent / "inside" / "dynamo_worker.py"
DISCOVERY: Final = ("--discovery-backend", "file")


class Part(ManagedProcess):
    """One process of Dynamo. All of them read the same folder."""

    def __init__(self, name: str, command: Sequence[str], log_dir: Path, port: int) -> None:
        """`port` is where its metrics are, or the frontend's own."""
        super().__init__(name, log_dir / f"{name}.log")
        self._command = [*command, *DISCOVERY]
        self._port = port
        self.url = f"http://{HOST}:{port}"

    def start(self, key: str, folder: Path, **more: str) -> None:
        """Launch it."""
        env = os.environ | QUIET_ENV | CPU_ENV
        env |= {
            "DYN_FILE_KV": str(folder),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "NIXL_KV_KEY": key,
        }
        env.pop("PYTHONPATH", None)  # it has an environment of its own
        self.launch(self._command, env | more)

    def is_ready(self) -> bool:
        """Whether it answers; raises if it has died."""
        self.check_alive()
        return is_healthy(self.url)


class Worker(Part):
    """An engine of vLLM."""

    def __init__(self, python: Path, role: Role, log_dir: Path, ports: Ports) -> None:
        """On free ports."""
        self._side_port = ports.next_free()
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_connector_module_path": "nixl_kv.connector",  # the one line that is ours
            "kv_role": "kv_both",
        }
        command = [str(python), str(WORKER), "--model", str(ensure_tiny_model().absolute())]
        command += ["--served-model-name", MODEL_NAME, "--disaggregation-mode", role]
        command += ["--dtype", CPU_DTYPE, "--enforce-eager"]
        command += ["--kv-transfer-config", json.dumps(transfer)]
        super().__init__(f"dynamo-{role}", command, log_dir, ports.next_free())

    def start(self, key: str, folder: Path, **more: str) -> None:
        """Launch it. Two workers of one machine need two side channels, with any connector."""
        ports = {
            "DYN_SYSTEM_PORT": str(self._port),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._side_port),
        }
        super().start(key, folder, **ports | more)


def run(cluster: Cluster, single: Client) -> Iterator[Outcome]:
    """Once."""
    python, log_dir, ports = ENVIRONMENT.ensure(), cluster.log_dir, Ports()
    port = ports.next_free()
    command = [str(python), "-m", "dynamo.frontend", "--http-host", HOST, "--http-port", str(port)]
    frontend = Part("dynamo-frontend", command, log_dir, port)
    prefill = Worker(python, "prefill", log_dir, ports)
    decode = Worker(python, "decode", log_dir, ports)
    parts = [frontend, prefill, decode]
    folder, key = log_dir / "dynamo-discovery", secrets.token_hex(32)
    folder.mkdir(parents=True)
    try:
        for part in parts:
            part.start(key, folder)
        for part in parts:
            part.wait_ready(START_S)
        urls = [worker.url for worker in (prefill, decode)]
        with Client(frontend.url) as platform, Engines(*urls) as engines:
            asked = ask(platform, engines, single)
    finally:
        stop_all(parts)
    yield Outcome(
        "Dynamo, frontend and two workers", DYNAMO, VLLM, WITH_KEY, engines=2, asked=asked
    )
