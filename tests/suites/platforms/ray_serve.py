"""Ray Serve LLM: `build_pd_openai_app`, two replicas of prefill on one node, decode on another."""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from harness.cluster.client import Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import CPU_DTYPE, CPU_ENV, HOST, MODEL_NAME, QUIET_ENV
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.processes import ManagedProcess, Ports, stop_all
from suites.platforms.asking import START_S, WITH_KEY, Engines, Outcome, ask
from suites.platforms.environments import Environment

RAY: Final = "2.60.0"
VLLM: Final = "0.32.0"
ENVIRONMENT: Final = Environment("ray", VLLM, (f"ray[serve,llm]=={RAY}",))
APP: Final = Path(__file__).parent / "inside" / "ray_app.py"
NUM_PREFILL: Final = 2
END_S: Final = 60.0
"""How long it may take to end its replicas."""


class RayServe(ManagedProcess):
    """A Ray cluster of two nodes, which are both on this machine."""

    def __init__(self, python: Path, log_dir: Path, ports: Ports) -> None:
        """Nothing runs before start()."""
        super().__init__("ray", log_dir / "ray.log")
        self._python = python
        self._port = ports.next_free()
        self._metrics_ports = [ports.next_free(), ports.next_free()]
        self.url = f"http://{HOST}:{self._port}"
        self.metrics_urls = [f"http://{HOST}:{port}" for port in self._metrics_ports]

    def start(self) -> None:
        """Launch it."""
        settings = {
            "model": str(ensure_tiny_model().absolute()),
            "name": MODEL_NAME,
            "dtype": CPU_DTYPE,
            "port": self._port,
            "metrics_ports": self._metrics_ports,
            "num_prefill": NUM_PREFILL,
        }
        env = os.environ | QUIET_ENV | CPU_ENV
        env |= {
            "NIXL_KV_KEY": secrets.token_hex(32),
            "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray leaves one in the home folder
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):  # it has an environment of its own
            env.pop(name, None)
        self.launch([str(self._python), str(APP), json.dumps(settings)], env)

    def end(self) -> None:
        """Its replicas' engines are none of Ray's own processes, and may outlive it."""
        children = psutil.Process(self.pid).children(recursive=True) if self.is_running() else []
        stop_all([self], END_S)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def is_ready(self) -> bool:
        """Whether it says that all replicas run; raises if it has died."""
        self.check_alive()
        return "platform is up" in self.log_text()


def run(cluster: Cluster, single: Client) -> Iterator[Outcome]:
    """Once."""
    ray = RayServe(ENVIRONMENT.ensure(), cluster.log_dir, Ports())
    try:
        ray.start()
        ray.wait_ready(START_S)
        with Client(ray.url) as platform, Engines(*ray.metrics_urls) as engines:
            asked = ask(platform, engines, single)
    finally:
        ray.end()
    yield Outcome(
        f"Ray Serve LLM, build_pd_openai_app, {NUM_PREFILL} prefill on a node, decode on another",
        RAY,
        VLLM,
        WITH_KEY,
        engines=NUM_PREFILL + 1,
        asked=asked,
    )
