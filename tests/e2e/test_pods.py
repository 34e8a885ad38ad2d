"""The engines of configs/kubernetes run as their pods say: user, key, probes, ports and hook.

Each pod is a network namespace. Its container is the process alone: commands and variables are the
manifest's, and paths stand for its volumes. No kubelet and no kube-proxy are there.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from harness.cluster.client import Client
from harness.cluster.engines import API_SERVER, CPU_ENV, MODEL_NAME, QUIET_ENV
from harness.cluster.metrics import CountersSince
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.netns import TUN_DEVICE, WIRE, Namespace, Switch
from harness.cluster.processes import ManagedProcess
from harness.cluster.prompts import random_prompt
from harness.cluster.waiting import wait_until
from support import manifests
from support.engine_commands import KEY, POD_IP
from support.manifests import Pod

FOLDER: Final = "vllm-router"
START_S: Final = 300.0
LISTENS: Final = "0A"  # in /proc/net/tcp
LOADS: Final = "vllm:nixl_kv_loads_total"


def as_user_of(pod: Pod) -> list[str]:
    """A container runtime's part before a pod's command: user, groups, no capabilities."""
    security = pod.spec["securityContext"]
    return [
        *("setpriv", f"--reuid={security['runAsUser']}", f"--regid={security['runAsGroup']}"),
        *(f"--groups={security['fsGroup']}", "--no-new-privs"),
        *("--bounding-set=-all", "--inh-caps=-all"),
    ]


def for_others(path: Path) -> str:
    """A shell's commands that let other users enter a folder below one of root's own.

    They are for a mount namespace, such as `ip netns exec` makes.
    """
    closed = [one for one in (path, *path.parents) if not one.stat().st_mode & 0o001]
    if not closed:
        return ""
    return (
        f"mount --bind {path} /mnt; mount -t tmpfs -o mode=755 none {closed[-1]}; "
        f"mkdir -p {path}; mount --move /mnt {path};"
    )


pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0
        or not all(map(shutil.which, ("ip", "setpriv", "kubectl")))
        or not Path(TUN_DEVICE).exists(),
        reason="needs root, ip, setpriv, kubectl and network namespaces",
    ),
]


class Container:
    """The engine of a pod, in a namespace of its own."""

    def __init__(self, pod: Pod, host: Namespace, folder: Path, log: Path) -> None:
        self.pod = pod
        self.host = host
        self.ip = f"10.0.0.{host.number}"
        security = pod.spec["securityContext"]
        key, home = folder / "key", folder / "home"
        mounted = {one["name"]: one["mountPath"] for one in pod.engine()["volumeMounts"]}
        self._replaced = {mounted["key"]: str(folder), mounted["home"]: str(home), POD_IP: self.ip}
        key.write_text(f"{KEY}\n", encoding="utf-8")
        (volume,) = [one for one in pod.spec["volumes"] if one["name"] == "key"]
        key.chmod(volume["secret"]["defaultMode"])
        os.chown(key, 0, security["fsGroup"])  # as a kubelet does it for both
        home.mkdir()
        os.chown(home, 0, security["fsGroup"])
        home.chmod(0o2775)
        self.process = ManagedProcess(log.stem, log)

    def start(self) -> None:
        model, *options = map(self._here, manifests.arguments(self.pod))
        assert model == "Qwen/Qwen3-0.6B"
        engine = [sys.executable, "-m", API_SERVER, "--model", str(ensure_tiny_model().absolute())]
        engine += ["--served-model-name", MODEL_NAME, "--enforce-eager", *options]
        self.process.launch(self._inside(engine), self.environment(), Path("/"))

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a probe or a hook as a kubelet does: in the container, with its variables."""
        return subprocess.run(
            self._inside([self._here(word) for word in command]),
            env=self.environment(),
            cwd="/",
            text=True,
            capture_output=True,
            check=False,
        )

    def is_ready(self) -> bool:
        self.process.check_alive()
        return self.run(self.pod.engine()["readinessProbe"]["exec"]["command"]).returncode == 0

    def environment(self) -> dict[str, str]:
        own = {
            name: self._here(value)
            for name, value in manifests.group_environment(self.pod, 0).items()
        }
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "TMPDIR") if name in os.environ}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return kept | QUIET_ENV | CPU_ENV | own | {"PATH": path}

    def listening(self) -> set[int]:
        """TCP ports of any address but loopback's."""
        command = self.host.inside(["cat", "/proc/net/tcp", "/proc/net/tcp6"])
        lines = subprocess.check_output(command, text=True).splitlines()
        rows = [line.split() for line in lines if ":" in line.split()[0]]
        local = [row[1].split(":") for row in rows if row[3] == LISTENS]
        return {int(port, 16) for address, port in local if not address.endswith("0100007F")}

    def _inside(self, command: list[str]) -> list[str]:
        open_python = f'{for_others(Path(sys.base_prefix))} exec "$@"'
        return self.host.inside(["sh", "-ec", open_python, "sh", *as_user_of(self.pod), *command])

    def _here(self, text: str) -> str:
        for there, here in self._replaced.items():
            text = text.replace(there, here)
        return text


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[dict[str, Container]]:
    """Prefill and decode, by their label."""
    with ExitStack() as stack:
        hosts = [stack.enter_context(Namespace(f"pod{n}", n)) for n in (1, 2)]
        stack.enter_context(Switch(*hosts))
        found: dict[str, Container] = {}
        for pod, host in zip(manifests.engines(manifests.rendered(FOLDER)), hosts, strict=True):
            host.ip("addr", "add", f"10.0.0.{host.number}/24", "dev", WIRE)
            # Unlike pytest's own folders, other users may enter this one.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nixl-kv-pod-")))
            folder.chmod(0o755)
            name = pod.labels["app.kubernetes.io/component"]
            found[name] = Container(pod, host, folder, tmp_path / f"{name}.log")
            stack.callback(found[name].process.stop)
        for container in found.values():
            container.start()
        yield found


def test_pods_run_without_root_move_kv_open_their_ports_and_drain(
    containers: dict[str, Container],
) -> None:
    prefill, decode = containers["prefill"], containers["decode"]
    assert not prefill.is_ready(), "it has just been started"
    for container in containers.values():
        assert wait_until(container.is_ready, START_S, interval_s=1.0), container.process.tail()

    with ExitStack() as stack:
        to_prefill, to_decode = (
            stack.enter_context(Client(f"http://{one.host.address}:8000"))
            for one in (prefill, decode)
        )
        for client in (to_prefill, to_decode):
            assert wait_until(partial(is_up, client), START_S, interval_s=1.0)
        since = CountersSince(to_decode)
        prompt = random_prompt(300, seed=1)
        to_decode.complete(prompt, 4, kv_transfer_params=to_prefill.ticket(prompt))
        assert since.wait_for(LOADS, timeout_s=30)[LOADS] == 1

    for container in containers.values():
        check_ports(container)
        check_user(container)

    (hook,) = prefill.pod.engine()["lifecycle"]["preStop"]["exec"]["command"][2:]
    drained = prefill.run(["sh", "-c", hook.replace("sleep 10", "sleep 0")])
    assert drained.returncode == 0, drained
    assert "drained" in drained.stdout
    assert not prefill.is_ready(), "so a Service sends it no request"
    assert decode.is_ready()


def is_up(client: Client) -> bool:
    try:
        return "vllm:" in client.metrics()
    except Exception:  # noqa: BLE001 - refused, reset, or no answer yet
        return False


def check_ports(container: Container) -> None:
    """The policy admits engines to what listens, and strangers to the API alone."""
    listening = container.listening()
    engine = manifests.opened(container.pod)
    assert engine.api | engine.descriptions | engine.ranks <= listening
    assert engine.ucx & listening, "UCX listens in its range"
    resources: list[Any] = manifests.rendered(FOLDER)
    labels = container.pod.labels
    router = {**labels, "app.kubernetes.io/component": "router"}
    for source, reached in (({"app": "a-stranger"}, set()), (router, engine.api)):
        admitted = manifests.admitted(resources, labels, source)
        assert admitted is not None
        assert admitted & listening == reached
    admitted = manifests.admitted(resources, labels, labels)
    assert admitted is not None
    assert engine.descriptions | engine.ranks | engine.ucx & listening <= admitted


def check_user(container: Container) -> None:
    """All processes of the engine are the pod's user's, without capabilities."""
    user = container.pod.spec["securityContext"]["runAsUser"]
    members = container.process.members()
    assert len(members) > 1
    for process in members:
        status = Path(f"/proc/{process.pid}/status").read_text("utf-8")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert set(fields["Uid"].split()) == {str(user)}
        assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
