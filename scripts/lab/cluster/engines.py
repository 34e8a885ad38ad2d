"""One vLLM engine as a child process, also without a GPU and without a model hub."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from pd.client import is_healthy
from pd.processes import ManagedProcess, Ports, ProcessDiedError
from pd.waiting import wait_until

Connector = Literal["none", "nixl-kv", "in-tree"]
Role = Literal["prefill", "decode", "both", "single"]
Device = Literal["cpu", "cuda"]

HOST = "127.0.0.1"
MODEL_NAME = "tiny"
START_TIMEOUT_S = 300.0
KV_ROLES: Mapping[Role, str] = {
    "prefill": "kv_producer",
    "decode": "kv_consumer",
    "both": "kv_both",
}

# No telemetry, no downloads, no colours in logs.
QUIET_ENV: Final = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "NO_COLOR": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
NO_PROXY: Final = ("no_proxy", "NO_PROXY")
LOCAL_HOSTS: Final = ("127.0.0.1", "localhost")
# Several engines share few cores: one thread each, bound to no core, that never spins.
CPU_ENV: Final = {
    "KMP_BLOCKTIME": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True)
class EngineSpec:
    """What to start: everything but the ports."""

    name: str
    model: Path
    role: Role = "single"
    connector: Connector = "none"
    connector_config: Mapping[str, object] = field(default_factory=dict)
    by_name: bool = False  # let the installed entry point find our connector
    module: str = "nixl_kv.connector"  # where else it is found, or a class that stands for it
    device: Device = "cpu"
    dtype: str = "auto"
    tensor_parallel: int = 1
    gpu_memory_utilization: float = 0.4
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)
    without_env: frozenset[str] = frozenset()  # what it must not take over from us
    cores: frozenset[int] = frozenset()  # where it may run; empty: everywhere
    served_name: str = MODEL_NAME

    def __post_init__(self) -> None:
        """Refuse what cannot mean anything."""
        if (self.role == "single") != (self.connector == "none"):
            raise ValueError(f"{self.name}: role {self.role!r} with connector {self.connector!r}")


class Engine(ManagedProcess):
    """A vLLM API server. start() returns at once; wait_ready() waits."""

    def __init__(self, spec: EngineSpec, log_dir: Path, ports: Ports) -> None:
        """Ports are chosen here, so that the URL is known before the start."""
        super().__init__(spec.name, log_dir / f"{spec.name}.log")
        self.spec = spec
        self.port = ports.take()
        self.side_port = ports.take()
        self.url = f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Launch it."""
        self.launch(self.command(), self.environment(), apart(self.log_path.parent))
        if self.spec.cores:  # before it has children and threads, which inherit this
            os.sched_setaffinity(self.pid, self.spec.cores)

    def is_ready(self) -> bool:
        """Whether it answers; raises if it has died."""
        self.check_alive()
        return is_healthy(self.url)

    def wait_ready(
        self,
        timeout_s: float = START_TIMEOUT_S,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        """Wait until it answers; on_wait is called with the seconds that have passed."""
        if not wait_until(self.is_ready, timeout_s, on_wait=on_wait):
            raise ProcessDiedError(f"{self.name} not ready in {timeout_s:.0f} s:\n{self.tail()}")

    def command(self) -> list[str]:
        """The command line."""
        spec = self.spec
        # The `vllm` command looks for a distribution of that name and dies under vllm-cpu.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        model = spec.model.absolute() if spec.model.is_dir() else spec.model
        command += ["--model", str(model), "--served-model-name", spec.served_name]
        command += ["--host", HOST, "--port", str(self.port), "--enable-prefix-caching"]
        command += ["--dtype", spec.dtype, "--tensor-parallel-size", str(spec.tensor_parallel)]
        if spec.device == "cpu":
            command += ["--enforce-eager"]
        else:
            command += ["--gpu-memory-utilization", str(spec.gpu_memory_utilization)]
        transfer = self.kv_transfer_config()
        if transfer:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        return [*command, *spec.extra_args]

    def environment(self) -> dict[str, str]:
        """This process's environment with what the engine needs on top."""
        env = os.environ | QUIET_ENV
        for name in self.spec.without_env:
            env.pop(name, None)
        if self.spec.device == "cpu":
            env |= CPU_ENV
        if self.spec.connector == "in-tree":
            env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = HOST
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.side_port)
        return env | dict(self.spec.extra_env)

    def kv_transfer_config(self) -> dict[str, object] | None:
        """The value of --kv-transfer-config; None for an engine without a connector."""
        spec = self.spec
        if spec.connector == "none":
            return None
        config: dict[str, object] = {
            "kv_role": KV_ROLES[spec.role],
            "kv_load_failure_policy": "recompute",
        }
        extra = dict(spec.connector_config)
        if spec.connector == "in-tree":
            config["kv_connector"] = "NixlConnector"
        else:
            config["kv_connector"] = "NixlKVConnector"
            if not spec.by_name:
                config["kv_connector_module_path"] = spec.module
            extra = {"port": self.side_port, "verify": "all"} | extra
        return config | ({"kv_connector_extra_config": extra} if extra else {})


def past_proxies(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep a proxy from our own engines, with what they exempt already."""
    exempt = [host.strip() for name in NO_PROXY for host in env.get(name, "").split(",")]
    hosts = dict.fromkeys(host for host in (*exempt, *LOCAL_HOSTS) if host)
    return dict.fromkeys(NO_PROXY, "*" if "*" in hosts else ",".join(hosts))


def apart(folder: Path) -> Path | None:
    """Where a child runs that must not take modules from where we run; None: there all the same.

    PYTHONSAFEPATH, which the scripts set, keeps Python from it, but not before 3.11.
    """
    return folder if sys.version_info < (3, 11) else None
