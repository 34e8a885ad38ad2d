"""One vLLM engine as a child process, also without a GPU and without a model hub."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from harness.cluster.client import is_healthy
from harness.cluster.netns import WIRE, Namespace
from harness.cluster.processes import ManagedProcess, Ports
from harness.cluster.warm import Launch, WarmServer

Connector = Literal["none", "nixl-kv", "in-tree"]
Role = Literal["prefill", "decode", "both", "single"]
Device = Literal["cpu", "cuda"]
FindWarm = Callable[["EngineSpec"], WarmServer | None]
"""Gives the process that forks an engine; None for one that a command line starts."""

API_SERVER: Final = "vllm.entrypoints.openai.api_server"
SERVE: Final = "harness.cluster.serve"
HOST: Final = "127.0.0.1"
MODEL_NAME: Final = "tiny"
OVERLAP: Final = {"overlap": "on"}
"""The setting of the connector."""
START_TIMEOUT_S: Final = 300.0
RESTART_TIMEOUT_S: Final = 120.0
KV_ROLES: Final[Mapping[Role, str]] = {
    "prefill": "kv_producer",
    "decode": "kv_consumer",
    "both": "kv_both",
}
CPU_DTYPE: Final = "float32"
"""In bfloat16 random weights give near-ties between tokens, which rounding decides one way in a
prefill of many tokens and another way in one of few."""

QUIET_ENV: Final = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "NO_COLOR": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""No telemetry, no downloads, no colours in logs."""

CPU_ENV: Final = {
    "KMP_BLOCKTIME": "0",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Otherwise vLLM 0.33 wants a NUMA node for each data-parallel rank of a host.
    "VLLM_CPU_SIM_MULTI_NUMA": "0",
}
"""Several engines share few cores: one thread each, bound to no core, that never spins. Nothing is
compiled: vLLM does so in spite of --enforce-eager, for 5 s at the first request of each engine."""

PATIENT: Final[Mapping[str, object]] = {
    "request_timeout_s": 120,
    "lease_s": 30,
    "offer_ttl_s": 60,
    "peer_timeout_s": 30,
}
"""The connector's, where few cores make everything slow, also the signs of life."""

READ_AT_IMPORT: Final = (
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "PYTHONPATH",
    "TORCH_COMPILE_DISABLE",
    "TRANSFORMERS_OFFLINE",
    "TRITON_INTERPRET",
)
"""Variables that a process which has imported vLLM does not look at again."""

MODEL_RUNNER: Final = "NIXL_KV_MODEL_RUNNER"
"""This variable is `v2` for engines on CPU with vLLM's V2 model runner, which vLLM uses on GPUs. It
stands in an engine's `extra_env`, or in the environment of the program that starts engines."""

CONTAINER: Final = ("unshare", "--pid", "--ipc", "--mount-proc", "--fork", "--kill-child")
"""Begins the command of an engine in namespaces of its own."""

TRITON_ON_CPU: Final = Path(__file__).resolve().parent / "triton_on_cpu"

NO_TORCHVISION: Final = Path(__file__).resolve().parent / "no_torchvision"

CPU_PIPELINE: Final = (
    "--no-enforce-eager",
    "--compilation-config",
    '{"mode": 2, "backend": "eager"}',
)
"""vLLM makes the tensors that its stages exchange in a warm-up, which eager engines on CPU skip."""

ERROR_LINE: Final = re.compile(r"\b\w*(?:Error|Exception): .+")
LOG_PREFIX: Final = re.compile(r"^\(.*?\) (?:\w+ \d\S* \S+ \[\S+\] )?")


@dataclass(frozen=True)
class EngineSpec:
    """An engine without its ports. Engines of equal specs are the same engine."""

    name: str
    model: Path
    role: Role = "single"
    connector: Connector = "none"
    connector_config: Mapping[str, object] = field(default_factory=dict)
    by_name: bool = False  # let the installed entry point find our connector
    drop_in: bool = False
    """Configure it as vLLM's own connector, with our module's path as all that is new."""
    module: str = "nixl_kv.connector"
    """Another module that has the connector's class, or one that replaces it."""
    engine_id: str | None = None
    """The operator's name for it, also after a restart; None: a new name for each start."""
    device: Device = "cpu"
    dtype: str | None = None  # None: float32 on CPU, the model's own on a GPU
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    block_size: int | None = None
    num_blocks: int | None = None  # None: as many as fit into the cache's memory
    kv_cache_bytes: int | None = None
    """The cache of each rank; None: 1 GiB on CPU, the rest of `gpu_memory_utilization` on a GPU."""
    gpu_memory_utilization: float = 0.4
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)
    without_env: frozenset[str] = frozenset()  # variables of ours that it must not inherit
    cores: frozenset[int] = frozenset()  # where it may run; empty: everywhere
    host: Namespace | None = None
    """Where it runs, and reaches others over the wire or switch alone; None: on this machine."""
    contained: bool = False
    """It has PID and IPC namespaces of its own, as a container has. Needs root."""
    headless: bool = False
    """A part of another spec's engine, on a host of its own: it answers no client."""
    api_servers: int = 1  # processes that answer clients
    served_name: str = MODEL_NAME
    python: Path = Path(sys.executable)
    """The interpreter of its environment, which may have another vLLM."""

    def __post_init__(self) -> None:
        if (self.role == "single") != (self.connector == "none"):
            raise ValueError(f"{self.name}: role {self.role!r} with connector {self.connector!r}")

    @property
    def main(self) -> str | None:
        """The module to run instead of the API server's."""
        return SERVE if self.headless or self.api_servers > 1 else None

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def actual_dtype(self) -> str:
        return self.dtype or (CPU_DTYPE if self.device == "cpu" else "auto")

    def environment(self) -> dict[str, str]:
        """This process's environment with what the engine needs on top."""
        env = os.environ | QUIET_ENV
        for name in self.without_env:
            env.pop(name, None)
        if self.device == "cpu":
            env |= CPU_ENV
        if self.kv_cache_bytes is not None:  # the variable would have the last word
            env.pop("VLLM_CPU_KVCACHE_SPACE", None)
        if self.pipeline_parallel > 1:  # see CPU_PIPELINE
            env.pop("TORCH_COMPILE_DISABLE", None)
        if self.host is not None:  # TCP on the wire is the only transport between two hosts
            env |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": WIRE}
            # Where there is a way to others, vLLM finds its address; gloo looks for this machine's.
            is_alone = not self.host.has_default_route
            env |= {"VLLM_HOST_IP": HOST} if is_alone else {"GLOO_SOCKET_IFNAME": WIRE}
        env |= self.extra_env
        if self.device == "cpu" and env.get(MODEL_RUNNER) == "v2":
            paths = filter(None, (str(TRITON_ON_CPU), env.get("PYTHONPATH")))
            env["PYTHONPATH"] = os.pathsep.join(paths)
            env |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
        return env

    def imports(self) -> tuple[str | None, ...]:
        """Engines that are alike in this import the same modules, and can be forked."""
        env = self.environment()
        return str(self.python), *(env.get(name) for name in READ_AT_IMPORT)

    def importing_environment(self) -> dict[str, str]:
        """The variables for a process that imports the modules of such engines beforehand."""
        usual = replace(self, extra_env={}, without_env=frozenset(), host=None).environment()
        env = self.environment()
        wanted = {name: env[name] for name in READ_AT_IMPORT if name in env}
        return {name: usual[name] for name in usual.keys() - READ_AT_IMPORT} | wanted


class Engine(ManagedProcess):
    """A vLLM API server. start() returns at once; wait_ready() waits."""

    def __init__(
        self, spec: EngineSpec, log_dir: Path, ports: Ports, find_warm: FindWarm | None = None
    ) -> None:
        super().__init__(spec.name, log_dir / f"{spec.name}.log")
        self.spec = spec
        self.port = ports.next_free()
        self.side_port = ports.next_free()
        self.address = spec.host.address if spec.host else HOST
        self.url = f"http://{self.address}:{self.port}"
        self._listens_on = listening_address(spec.host)
        self._find_warm = find_warm

    def start(self) -> None:
        spec, folder = self.spec, apart(self.log_path.parent)
        warm = self._find_warm(spec) if self._find_warm else None
        if warm is not None:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            launch = Launch(
                arguments=tuple(self.arguments()),
                env=self.environment(),
                log_path=str(self.log_path.absolute()),
                folder=str(folder or Path.cwd()),
                cores=tuple(sorted(spec.cores)),
                namespace=spec.host.name if spec.host else None,
                main=spec.main,
            )
            self.adopt(warm.fork(launch))
            return
        # The `vllm` command looks for a distribution of that name and dies under vllm-cpu.
        command = [str(spec.python), "-m", spec.main or API_SERVER]
        command += self.arguments()
        command = [*CONTAINER, *command] if spec.contained else command
        self.launch(spec.host.inside(command) if spec.host else command, self.environment(), folder)
        if spec.cores:  # before it has children and threads, which inherit this
            os.sched_setaffinity(self.pid, spec.cores)

    def is_ready(self) -> bool:
        self.check_alive()
        return self.spec.headless or is_healthy(self.url)

    def url_from(self, host: Namespace | None) -> str:
        """Where a process on a host, or on this machine, reaches it."""
        if host is None or self.spec.host is None:
            return self.url
        address = self.spec.host.wire_address
        return f"http://{f'[{address}]' if ':' in address else address}:{self.port}"

    def suspend(self) -> None:
        self.signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal_group(signal.SIGCONT)

    def restart(self) -> None:
        """Start it again, on the same ports, and wait until it answers."""
        self.start()
        self.wait_ready(RESTART_TIMEOUT_S)

    def why_ended(self) -> str:
        """The first line of its log that names an error, without the prefix of its logger."""
        for line in self.log_text().splitlines():
            if ERROR_LINE.search(line) and "WARNING" not in line:
                return LOG_PREFIX.sub("", line)
        return f"status {self.exit_code()}"

    def arguments(self) -> list[str]:
        spec = self.spec
        model = spec.model.absolute() if spec.model.is_dir() else spec.model
        arguments = ["--model", str(model), "--served-model-name", spec.served_name]
        arguments += ["--host", self._listens_on, "--port", str(self.port)]
        arguments += ["--enable-prefix-caching", "--dtype", spec.actual_dtype]
        arguments += ["--tensor-parallel-size", str(spec.tensor_parallel)]
        arguments += ["--pipeline-parallel-size", str(spec.pipeline_parallel)]
        optional = {
            "--block-size": spec.block_size,
            "--num-gpu-blocks-override": spec.num_blocks,
            "--kv-cache-memory-bytes": spec.kv_cache_bytes,
        }
        for flag, value in optional.items():
            arguments += [] if value is None else [flag, str(value)]
        if spec.device == "cuda":
            arguments += ["--gpu-memory-utilization", str(spec.gpu_memory_utilization)]
        else:
            arguments += CPU_PIPELINE if spec.pipeline_parallel > 1 else ["--enforce-eager"]
        if spec.connector != "none":
            arguments += ["--kv-transfer-config", json.dumps(self.kv_transfer_config())]
        if spec.api_servers > 1:
            arguments += ["--api-server-count", str(spec.api_servers)]
        return [*arguments, *spec.extra_args, *(["--headless"] if spec.headless else [])]

    def environment(self) -> dict[str, str]:
        """The spec's, and what vLLM's own connector wants to know about ports."""
        env = self.spec.environment()
        if self.spec.connector == "in-tree" or self.spec.drop_in:
            host = self.spec.host
            env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host.wire_address if host else HOST
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.side_port)
        return env

    def kv_transfer_config(self) -> dict[str, object]:
        """The value of --kv-transfer-config."""
        spec = self.spec
        config: dict[str, object] = {"kv_role": KV_ROLES[spec.role]}
        extra = dict(spec.connector_config)
        if spec.engine_id is not None:
            config["engine_id"] = spec.engine_id
        if spec.connector == "in-tree":
            config["kv_load_failure_policy"] = "recompute"
        elif not spec.by_name:
            config["kv_connector_module_path"] = spec.module
        if spec.connector == "in-tree" or spec.drop_in:
            config["kv_connector"] = "NixlConnector"
        else:
            config["kv_connector"] = "NixlKVConnector"
            extra = {"port": self.side_port, "verify": "all"} | extra
        return config | ({"kv_connector_extra_config": extra} if extra else {})


def listening_address(host: Namespace | None) -> str:
    """Where a server listens: where this machine reaches it, and where other hosts can all do."""
    if host is None or not host.has_default_route:
        return host.address if host else HOST
    return "::" if ":" in host.wire_address else "0.0.0.0"  # noqa: S104 - the host is ours


def python_path(first: Path) -> str:
    """A PYTHONPATH with this folder before those of this process."""
    return os.pathsep.join(filter(None, (str(first), os.environ.get("PYTHONPATH"))))


def shim_env(name: str, *, is_interpreted: bool = True) -> dict[str, str]:
    """For engines with a folder of this one that has a sitecustomize.py.

    `is_interpreted`: Triton runs its kernels on the CPU.
    """
    env = {"PYTHONPATH": python_path(TRITON_ON_CPU.parent / name)}
    return env | {"TRITON_INTERPRET": "1"} if is_interpreted else env


def halves(cores: Iterable[int]) -> tuple[frozenset[int], frozenset[int]]:
    """The cores in two parts, for prefill and decode; a single core is in both.

    The ranks of an engine that waits spin, and with it those that have something to do starve:
    prefill spins while decode reads from it, and decode while it reads.
    """
    ordered = sorted(cores)
    return frozenset(ordered[::2]), frozenset(ordered[1::2] or ordered)


def apart(folder: Path) -> Path | None:
    """Where a child runs that must not import modules from where we run; None: there all the same.

    PYTHONSAFEPATH, which the scripts set, keeps Python from it, but not before 3.11.
    """
    return folder if sys.version_info < (3, 11) else None
