"""vllm-router as a child process, in prefill/decode mode or before replicas."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from harness.cluster.client import is_healthy
from harness.cluster.engines import HOST, QUIET_ENV, Engine, apart, listening_address
from harness.cluster.netns import Namespace
from harness.cluster.processes import ManagedProcess, Ports

START_TIMEOUT_S: Final = 180.0  # a router needs a second, and minutes beside busy engines
NO_PROXY: Final = ("no_proxy", "NO_PROXY")
LOCAL_HOSTS: Final = ("127.0.0.1", "localhost")
IN_TURNS: Final = ("--policy", "round_robin")
"""The default policy first asks both engines to tokenize: two more requests each time."""


class Router(ManagedProcess):
    """Sends each request to a prefill engine, then with that engine's answer to a decode engine.

    Without prefill engines, the decode engines are replicas: each request goes to one of them.
    """

    def __init__(
        self,
        log_path: Path,
        prefill: Sequence[Engine],
        decode: Sequence[Engine],
        *,
        ports: Ports,
        host: Namespace | None = None,
        options: Sequence[str] = IN_TURNS,
    ) -> None:
        """The engines must be up when start() is called. It runs on `host`, or on this machine."""
        super().__init__(log_path.stem, log_path)
        self.prefill = tuple(prefill)
        self.decode = tuple(decode)
        self.port = ports.next_free()
        self._prometheus_port = ports.next_free()  # its default is one fixed port
        self.host = host
        self.options = tuple(options)
        self.url = f"http://{host.address if host else HOST}:{self.port}"

    def start(self) -> None:
        env = os.environ | QUIET_ENV
        env |= {"no_proxy": "*", "NO_PROXY": "*"} if self.host else past_proxies(env)
        command = self.host.inside(self.command()) if self.host else self.command()
        self.launch(command, env, apart(self.log_path.parent))

    def is_ready(self) -> bool:
        self.check_alive()
        return is_healthy(self.url)

    def command(self) -> list[str]:
        # By its module: an interpreter may find the package without a command beside itself.
        command = [sys.executable, "-m", "vllm_router.launch_router"]
        if self.prefill:
            command += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        command += self.options
        command += ["--host", listening_address(self.host), "--port", str(self.port)]
        command += ["--prometheus-port", str(self._prometheus_port)]
        urls = [engine.url_from(self.host) for engine in self.decode]
        if not self.prefill:
            return [*command, "--worker-urls", *urls]
        for engine in self.prefill:
            command += ["--prefill", engine.url_from(self.host)]
        for url in urls:
            command += ["--decode", url]
        return command


def past_proxies(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that exempt our own engines from a proxy, beside those exempt already."""
    exempt = [host.strip() for name in NO_PROXY for host in env.get(name, "").split(",")]
    hosts = dict.fromkeys(host for host in (*exempt, *LOCAL_HOSTS) if host)
    return dict.fromkeys(NO_PROXY, "*" if "*" in hosts else ",".join(hosts))
