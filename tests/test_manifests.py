"""configs/kubernetes and configs/compose.yaml fit published schemas, and their parts each other."""

import argparse
import base64
import functools
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import typer
import yaml
from compose_spec import PyCompose
from vllm_router.router_args import RouterArgs

from nixl_kv.cli.main import app
from nixl_kv.keys import parse_key
from support import engine_commands
from support.engine_commands import REPO

KUBERNETES: Final = REPO / "configs/kubernetes"
FOLDERS: Final = ("secret", "base", "vllm-router", "llm-d", "kserve")
VERSIONS: Final = ("1.29", "1.37")
"""The first with containers that start before the others and stay, and the newest schema."""
COMPOSE: Final = yaml.safe_load((REPO / "configs/compose.yaml").read_text(encoding="utf-8"))
LATER_THAN_SCHEMA: Final = "pre_stop"
"""Of compose 2.30, which compose_spec does not know yet."""

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
each_folder = pytest.mark.parametrize("folder", FOLDERS)
each_with_engines = pytest.mark.parametrize("folder", FOLDERS[1:])


@functools.cache
def built(folder: str) -> list[Any]:
    """What `kubectl apply -k` would send."""
    with tempfile.TemporaryDirectory() as scratch:
        copied = shutil.copytree(KUBERNETES, Path(scratch, "kubernetes"))
        key = f"NIXL_KV_KEY={engine_commands.KEY}\n"
        (copied / "secret/key.env").write_text(key, encoding="utf-8")
        command = ["kubectl", "kustomize", str(copied / folder)]
        return list(yaml.safe_load_all(subprocess.check_output(command)))


def templates(resources: list[Any]) -> Iterator[Any]:
    """The template of each pod."""
    for resource in resources:
        spec = resource.get("spec", {})
        for owner in (spec, spec.get("prefill", {})):
            if "template" in owner:
                template = owner["template"]
                yield template if "spec" in template else {"metadata": {}, "spec": template}


def engines(folder: str) -> list[tuple[Any, Any]]:
    """For each engine the template of its pod, and its container."""
    found = [
        (template, container)
        for template in templates(built(folder))
        for container in template["spec"]["containers"]
        if "NIXL_KV_KEY" in engine_commands.environment_of(container)
    ]
    assert len(found) == 2
    return found


def arguments_of(container: Any) -> str:
    return " ".join(container.get("args", ()))


# --- the files by themselves


def test_every_file_is_part_of_something() -> None:
    named = {
        (folder / entry).resolve()
        for folder in map(KUBERNETES.joinpath, FOLDERS)
        for said in [yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))]
        for entry in [*said.get("resources", ()), *(one["path"] for one in said.get("patches", ()))]
    }
    files = {path.resolve() for path in KUBERNETES.rglob("*.yaml")}
    assert {path for path in files if path.name != "kustomization.yaml"} <= named
    assert {path.parent.name for path in files} == set(FOLDERS)
    for path in named:
        assert path.is_dir() or all("kind" in one for one in yaml.safe_load_all(path.read_text()))


def test_the_compose_file_is_valid() -> None:
    services = {
        name: {key: value for key, value in service.items() if key != LATER_THAN_SCHEMA}
        for name, service in COMPOSE["services"].items()
    }
    templates = ("x-engine", "x-environment")
    rest = {key: value for key, value in COMPOSE.items() if key not in templates}
    PyCompose.from_yaml(yaml.safe_dump(rest | {"services": services})).validate()


@needs_kubectl
@each_folder
@pytest.mark.parametrize("version", VERSIONS)
def test_resources_are_valid(folder: str, version: str) -> None:
    """KServe's own fields are few; they hold Kubernetes' templates of pods."""
    for resource in built(folder):
        if resource["kind"] != "LLMInferenceService":
            kubernetes_validate.validate(resource, version, strict=True)
            continue
        assert resource["apiVersion"] == "serving.kserve.io/v1alpha2"
        spec = resource["spec"]
        assert set(spec) == {"model", "replicas", "router", "template", "prefill"}
        assert set(spec["prefill"]) == {"replicas", "template"}
        assert set(spec["router"]) == {"route", "gateway", "scheduler"}
        assert re.fullmatch(r"hf://\S+", spec["model"]["uri"])
        for template in templates([resource]):
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
            kubernetes_validate.validate(pod, version, strict=True)


# --- parts that fit together


@needs_kubectl
@each_with_engines
def test_an_engine_has_the_key_an_address_ports_and_volumes(folder: str) -> None:
    (secret,) = [one for one in built(folder) if one["kind"] == "Secret"]
    assert secret["metadata"]["name"] == "nixl-kv"
    parse_key(base64.b64decode(secret["data"]["NIXL_KV_KEY"]).decode(), "the Secret")
    for template, container in engines(folder):
        environment = {entry["name"]: entry["valueFrom"] for entry in container["env"][-2:]}
        assert environment == {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": {"fieldRef": {"fieldPath": "status.podIP"}},
            "NIXL_KV_KEY": {"secretKeyRef": {"name": "nixl-kv", "key": "NIXL_KV_KEY"}},
        }
        if folder == "kserve":  # its templates have the others
            assert not {"ports", "volumeMounts", "startupProbe"} & set(container)
            continue
        ports = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
        assert f"--port={ports['http']} " in arguments_of(container)
        assert ports["nixl-kv"] == 5600
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
        volumes = {entry["name"] for entry in template["spec"]["volumes"]}
        assert {entry["name"] for entry in container["volumeMounts"]} == volumes


@needs_kubectl
@each_with_engines
def test_there_is_time_to_drain(folder: str) -> None:
    """Within KServe's 15 s of preStop, otherwise within the pod's time, with the requests' own."""
    for template, container in engines(folder):
        shell, option, script = container["lifecycle"]["preStop"]["exec"]["command"]
        assert (shell, option) == ("sh", "-c")
        waits, drains = script.split("; ")
        stopping = float(waits.removeprefix("sleep ")) + drain_timeout(drains)
        if folder == "kserve":
            assert stopping <= 15
            assert "terminationGracePeriodSeconds" not in template["spec"]
            continue
        running = float(re.findall(r"--shutdown-timeout=(\d+)", arguments_of(container))[0])
        assert stopping + running + 10 <= template["spec"]["terminationGracePeriodSeconds"]


@needs_kubectl
def test_llm_ds_sidecar_stands_before_decode() -> None:
    decode, prefill = sorted(
        templates(built("llm-d")), key=lambda one: one["metadata"]["labels"]["llm-d.ai/role"]
    )
    (sidecar,) = decode["spec"]["initContainers"]
    options = dict(word[2:].split("=") for word in sidecar["args"])
    (container,) = decode["spec"]["containers"]
    assert f"--port={options['vllm-port']} " in arguments_of(container)
    assert [entry["containerPort"] for entry in sidecar["ports"]] == [int(options["port"])]
    assert (sidecar["restartPolicy"], options["kv-connector"]) == ("Always", "nixlv2")
    assert "initContainers" not in prefill["spec"]
    assert f"--port={options['port']} " in arguments_of(prefill["spec"]["containers"][0])


@needs_kubectl
@each_folder
def test_selectors_fit(folder: str) -> None:
    pods = [template["metadata"].get("labels", {}) for template in templates(built(folder))]
    for resource in built(folder):
        selector = resource.get("spec", {}).get("selector", {})
        wanted = selector.get("matchLabels", selector)
        if wanted:
            assert sum(wanted.items() <= labels.items() for labels in pods) == 1


# --- the router


def check_router(arguments: list[str]) -> None:
    """The router knows its options, and finds the engines."""
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    router = RouterArgs.from_cli_args(parser.parse_args(arguments))
    assert (router.vllm_pd_disaggregation, router.kv_connector) == (True, "nixl")
    assert (router.host, router.port) == ("0.0.0.0", 8000)  # noqa: S104 - in its container
    assert router.prefill_urls == [("http://prefill:8000", None)]
    assert router.decode_urls == ["http://decode:8000"]


@needs_kubectl
def test_the_router_of_kubernetes_finds_its_engines() -> None:
    resources = built("vllm-router")
    (container,) = next(
        template["spec"]["containers"]
        for template in templates(resources)
        if template["metadata"]["labels"]["app.kubernetes.io/component"] == "router"
    )
    assert container["command"] == ["vllm-router"]
    check_router(container["args"])
    services = {one["metadata"]["name"]: one for one in resources if one["kind"] == "Service"}
    assert set(services) == {"prefill", "decode", "router"}
    for service in services.values():
        assert service["spec"]["ports"] == [{"name": "http", "port": 8000, "targetPort": "http"}]


def test_the_router_of_compose_finds_its_engines() -> None:
    check_router(COMPOSE["services"]["router"]["command"])


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_an_engine_of_compose_has_what_it_needs(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["entrypoint"] == ["vllm", "serve"]
    assert "--port=8000" in service["command"]
    environment = engine_commands.environment_of(service)
    assert environment["NIXL_KV_KEY"] == engine_commands.KEY
    assert environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "auto"
    (hook,) = [one["command"] for one in service[LATER_THAN_SCHEMA]]
    (running,) = [word.split("=")[1] for word in service["command"] if "shutdown" in word]
    stopping = drain_timeout(shlex.join(hook)) + float(running)
    assert stopping + 10 <= float(service["stop_grace_period"].removesuffix("s"))


def test_the_images_are_built() -> None:
    """Compose names stages of the Dockerfile, and the files that they copy exist."""
    dockerfile = (REPO / "configs/docker/Dockerfile").read_text(encoding="utf-8")
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", dockerfile, re.MULTILINE))
    builds = [service["build"] for service in COMPOSE["services"].values()]
    assert {build["target"] for build in builds} == stages == {"engine", "router"}
    for build in builds:
        context = (REPO / "configs" / build["context"]).resolve()
        assert (context / build["dockerfile"]).samefile(REPO / "configs/docker/Dockerfile")
    ignored = (REPO / ".dockerignore").read_text(encoding="utf-8").split()
    for line in re.findall(r"^COPY (.*)$", dockerfile, re.MULTILINE):
        for name in line.split()[:-1]:
            assert (REPO / name).exists()
            assert f"!{name}" in ignored


# --- our own commands, here and in the pages


def documented_commands() -> list[str]:
    """Lines of code that begin with `nixl-kv`, in docs/deploy and README."""
    pages = [REPO / "README.md", *sorted((REPO / "docs/deploy").glob("*.md"))]
    code = [block for page in pages for _, block in engine_commands.blocks(page.read_text("utf-8"))]
    return [line for block in code for line in block.splitlines() if line.startswith("nixl-kv ")]


@pytest.mark.parametrize("line", documented_commands())
def test_our_commands_exist(line: str) -> None:
    parameters(line)


def drain_timeout(line: str) -> float:
    assert shlex.split(line)[1] == "drain"
    given = parameters(line)
    assert given["at"] is None, "the engine's own variables say where it is"
    return float(given["timeout"])


def parameters(line: str) -> dict[str, Any]:
    """The options of a command of ours, which does not run."""
    program, name, *arguments = shlex.split(line, comments=True)
    assert program == "nixl-kv"
    commands: Any = typer.main.get_command(app)
    return dict(commands.commands[name].make_context(name, arguments).params)
