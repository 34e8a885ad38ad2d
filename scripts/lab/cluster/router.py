"""vllm-router in prefill/decode mode as a child process."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pd.client import is_healthy
from pd.engines import HOST, QUIET_ENV, apart, past_proxies
from pd.processes import ManagedProcess, Ports, ProcessDiedError
from pd.waiting import wait_until

START_TIMEOUT_S = 30.0


class Router(ManagedProcess):
    """Sends each request to a prefill engine, then with that engine's answer to a decode engine."""

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], *, log_dir: Path, ports: Ports
    ) -> None:
        """Takes the engines' URLs; they must be up when start() is called."""
        super().__init__("router", log_dir / "router.log")
        self._prefill = list(prefill)
        self._decode = list(decode)
        self.port = ports.take()
        self._prometheus_port = ports.take()  # its default is one fixed port
        self.url = f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Launch it."""
        env = os.environ | QUIET_ENV | past_proxies(os.environ)
        self.launch(self.command(), env, apart(self.log_path.parent))

    def command(self) -> list[str]:
        """The command line."""
        # By its module: an interpreter may find the package without a command beside itself.
        command = [sys.executable, "-m", "vllm_router.launch_router"]
        command += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        # The default policy first asks both engines to tokenize: two more requests each time.
        command += ["--policy", "round_robin"]
        command += ["--host", HOST, "--port", str(self.port)]
        command += ["--prometheus-port", str(self._prometheus_port)]
        for url in self._prefill:
            command += ["--prefill", url]
        for url in self._decode:
            command += ["--decode", url]
        return command

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until it answers."""

        def ready() -> bool:
            self.check_alive()
            return is_healthy(self.url)

        if not wait_until(ready, timeout_s):
            raise ProcessDiedError(f"router not ready in {timeout_s:.0f} s:\n{self.tail()}")
