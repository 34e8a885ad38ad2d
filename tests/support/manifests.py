"""configs/kubernetes as `kubectl kustomize` renders it: pods, engines, allowed connections."""

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import yaml
from vllm.utils.argparse_utils import FlexibleArgumentParser

from nixl_kv.config import Config
from nixl_kv.connector.plugin import port_of
from nixl_kv.connector.worker import rank_port
from support import engine_commands
from support.engine_commands import REPO

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:  # vLLM 0.31 and 0.32
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args

KUBERNETES: Final = REPO / "configs/kubernetes"
HOST: Final = "VLLM_NIXL_SIDE_CHANNEL_HOST"
LEADER: Final = "leader.example"
ENGINES: Final = ("vllm", "main")
"""Names of vLLM's containers, the second one by KServe."""
Labels = Mapping[str, str]


@functools.cache
def rendered(folder: str, *components: str) -> list[Any]:
    """The objects that `kubectl apply -k` would send for a folder, with components on top of it."""
    with tempfile.TemporaryDirectory() as scratch:
        copied = shutil.copytree(KUBERNETES, Path(scratch, "kubernetes"))
        (copied / "secret/key").write_text(f"{engine_commands.KEY}\n", encoding="utf-8")
        if components:
            overlay = {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "resources": [f"../{folder}"],
                "components": [f"../components/{name}" for name in components],
            }
            folder = "mine"
            (copied / folder).mkdir()
            text = yaml.safe_dump(overlay)
            (copied / folder / "kustomization.yaml").write_text(text, encoding="utf-8")
        command = ["kubectl", "kustomize", str(copied / folder)]
        return list(yaml.safe_load_all(subprocess.check_output(command)))


@dataclass(frozen=True)
class Pod:
    """A template of pods. An engine of several pods has `size` of them."""

    labels: Labels
    spec: Any
    size: int = 1

    def containers(self) -> list[Any]:
        """Those that run at the same time."""
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    def is_engine(self) -> bool:
        return any(one["name"] in ENGINES for one in self.spec["containers"])

    def engine(self) -> Any:
        """The container of vLLM."""
        return next(one for one in self.spec["containers"] if one["name"] in ENGINES)


def pods(resources: list[Any]) -> Iterator[Pod]:
    for resource in resources:
        spec = resource.get("spec", {})
        match resource["kind"]:
            case "Deployment":
                yield _pod(spec["template"])
            case "DisaggregatedSet":
                for role in spec["roles"]:
                    group = role["spec"]["leaderWorkerTemplate"]
                    yield _pod(group["workerTemplate"], group["size"])
            case "LLMInferenceService":
                for owner in (spec["prefill"], spec):
                    yield Pod(owner["labels"], owner["template"])


def _pod(template: Any, size: int = 1) -> Pod:
    return Pod(template["metadata"]["labels"], template["spec"], size)


def engines(resources: list[Any]) -> list[Pod]:
    return [pod for pod in pods(resources) if pod.is_engine()]


def of_kind(resources: list[Any], kind: str) -> list[Any]:
    return [resource for resource in resources if resource["kind"] == kind]


# --- the ports of an engine


@dataclass(frozen=True)
class Opened:
    """The TCP ports of one pod, by the code that listens on them."""

    api: frozenset[int]
    descriptions: frozenset[int]
    ranks: frozenset[int]
    ucx: frozenset[int]
    config: Config
    num_ranks: int


def run_shell(script: str, arguments: list[str], environment: Mapping[str, str]) -> list[list[str]]:
    """The commands that a shell would run, each as words; `sleep` and `wait` do nothing."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        for name in ("vllm", "nixl-kv"):
            program = Path(scratch, name)
            program.write_text(
                f'#!/bin/sh\nline={name}\nfor word in "$@"; do line="$line\t$word"; done\n'
                f"printf '%s\\n' \"$line\" >> {log}\n"
            )
            program.chmod(0o700)
        path = f"{scratch}{os.pathsep}{os.environ['PATH']}"
        said = subprocess.run(
            ["sh", "-ec", f"sleep() {{ :; }}\n{script}", *arguments],
            env={"PATH": path, **environment},
            check=True,
            capture_output=True,
            text=True,
        )
        assert said.stderr == ""
        return sorted(line.split("\t") for line in log.read_text(encoding="utf-8").splitlines())


def group_environment(pod: Pod, index: int) -> dict[str, str]:
    """The variables of a pod's container, with those of the LeaderWorkerSet controller."""
    group = {"LWS_WORKER_INDEX": str(index), "LWS_LEADER_ADDRESS": LEADER}
    return engine_commands.environment_of(pod.engine()) | group


def arguments(pod: Pod, index: int = 0) -> list[str]:
    """The arguments of `vllm serve` in the pod of this index."""
    container = pod.engine()
    environment = group_environment(pod, index)
    if "VLLM_ADDITIONAL_ARGS" in environment:  # KServe's shell
        ((_, _, *words),) = run_shell(
            'eval "exec vllm serve MODEL ${VLLM_ADDITIONAL_ARGS} $@"', ["--"], environment
        )
        return words
    match container["command"]:
        case ["vllm", "serve"]:
            return list(container["args"])
        case ["sh", "-c", script, name]:
            ((_, _, *words),) = run_shell(script, [name, *container["args"]], environment)
            return words
    raise ValueError(f"{container['command']} is nothing that a test knows")


def parsed(words: list[str]) -> Any:
    """The arguments, after vLLM's own parser and checks."""
    return _parsed(tuple(words))


@functools.cache
def _parsed(words: tuple[str, ...]) -> Any:
    options = make_arg_parser(FlexibleArgumentParser()).parse_args(list(words))
    options.model = options.model_tag = options.model_tag or options.model
    validate_parsed_serve_args(options)
    return options


def opened(pod: Pod, index: int = 0) -> Opened:
    """The ports on which the pod of this index listens."""
    environment = group_environment(pod, index)
    options = parsed(arguments(pod, index))
    config = Config.parse(options.kv_transfer_config.kv_connector_extra_config, environment)
    world = options.tensor_parallel_size * options.pipeline_parallel_size
    local = options.data_parallel_size_local or options.data_parallel_size
    first = options.data_parallel_start_rank or 0
    engines = [
        SimpleNamespace(
            data_parallel_index=rank,
            data_parallel_size=options.data_parallel_size,
            world_size=world,
        )
        for rank in range(first, first + local)
    ]
    api = range(options.port, options.port + local)
    is_supervised = options.data_parallel_multi_port_external_lb
    lowest, _, highest = environment["UCX_TCP_PORT_RANGE"].partition("-")
    described = [port_of(config, SimpleNamespace(parallel_config=one)) for one in engines]
    ranks: list[Any] = [[rank_port(config, one, n) for n in range(world)] for one in engines]  # type: ignore[arg-type]
    return Opened(
        api=frozenset({*api, *([options.data_parallel_supervisor_port] if is_supervised else ())}),
        descriptions=frozenset(described),
        ranks=frozenset(port for ports in ranks for port in ports),
        ucx=frozenset(range(int(lowest), int(highest) + 1)),
        config=config,
        num_ranks=world * local,
    )


# --- network policies


def matches(selector: Any, labels: Labels) -> bool:
    """Whether a selector of Kubernetes selects something with these labels."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    given = selector.get("matchLabels", {})
    expressions = selector.get("matchExpressions", ())
    assert all(one["operator"] == "In" for one in expressions)
    return given.items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in expressions
    )


def admitted(
    resources: list[Any], target: Labels, source: Labels, namespace: Labels | None = None
) -> frozenset[int] | None:
    """The ports of a pod that another pod reaches; None if no policy selects it: all.

    `namespace` has the labels of the other pod's namespace, if that is another one.
    """
    selecting = [
        policy
        for policy in of_kind(resources, "NetworkPolicy")
        if matches(policy["spec"]["podSelector"], target)
    ]
    if not selecting:
        return None
    ports: set[int] = set()
    for rule in (rule for policy in selecting for rule in policy["spec"]["ingress"]):
        peers = rule.get("from")
        if peers is None or any(_is_peer(peer, source, namespace) for peer in peers):
            for one in rule.get("ports", [{"port": 1, "endPort": 65535}]):
                ports |= set(range(one["port"], one.get("endPort", one["port"]) + 1))
    return frozenset(ports)


def _is_peer(peer: Any, source: Labels, namespace: Labels | None) -> bool:
    if "namespaceSelector" not in peer:
        return namespace is None and matches(peer["podSelector"], source)
    assert "podSelector" not in peer
    return matches(peer["namespaceSelector"], namespace or {})
