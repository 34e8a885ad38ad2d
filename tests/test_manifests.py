"""configs/kubernetes and configs/compose.yaml fit published schemas, and their parts each other."""

import argparse
import base64
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import kubernetes_validate
import pytest
import typer
import yaml
from compose_spec import PyCompose
from vllm_router.router_args import RouterArgs

from nixl_kv.cli.main import app
from nixl_kv.keys import parse_key
from support import engine_commands, kustomize
from support.engine_commands import REPO

KUBERNETES: Final = REPO / "configs/kubernetes"
FOLDERS: Final = ("secret", "base", "vllm-router", "llm-d", "kserve")
VERSIONS: Final = ("1.29", "1.37")
"""The first with containers that start before the others and stay, and the newest that is known."""

GENERATED: Final = {"key.env": f"NIXL_KV_KEY={engine_commands.KEY}\n"}
BUILT: Final = {name: kustomize.build(KUBERNETES / name, GENERATED) for name in FOLDERS}
COMPOSE: Final = yaml.safe_load((REPO / "configs/compose.yaml").read_text(encoding="utf-8"))

LATER_THAN_SCHEMA: Final = "pre_stop"
"""Of compose 2.30, which compose_spec does not know yet."""

ENGINES: Final = {"base": 2, "vllm-router": 2, "llm-d": 2, "kserve": 2}

each_folder = pytest.mark.parametrize("folder", FOLDERS)
each_router = pytest.mark.parametrize("arguments", ["compose", "kubernetes"], indirect=True)


class Engine(NamedTuple):
    """A container that runs vLLM, and the template of its pod."""

    folder: str
    template: Any
    container: Any


def templates(resources: list[Any]) -> Iterator[Any]:
    """The template of each pod."""
    for resource in resources:
        spec = resource.get("spec", {})
        for owner in (spec, spec.get("prefill", {})):
            if "template" in owner:
                template = owner["template"]
                yield template if "spec" in template else {"metadata": {}, "spec": template}


def engines(folder: str) -> Iterator[Engine]:
    for template in templates(BUILT[folder]):
        for container in template["spec"]["containers"]:
            if "NIXL_KV_KEY" in engine_commands.environment_of(container):
                yield Engine(folder, template, container)


def arguments_of(container: Any) -> str:
    return " ".join(container.get("args", ()))


each_engine = pytest.mark.parametrize(
    "engine",
    [
        pytest.param(engine, id=f"{folder}-{number}")
        for folder in ENGINES
        for number, engine in enumerate(engines(folder))
    ],
)


# --- by the schemas


@each_folder
@pytest.mark.parametrize("version", VERSIONS)
def test_resources_are_valid(folder: str, version: str) -> None:
    for resource in BUILT[folder]:
        if resource["kind"] != "LLMInferenceService":  # see below
            kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_pods_that_kserve_makes_are_valid(version: str) -> None:
    """KServe's own fields are few; what stands in them is Kubernetes'."""
    (service,) = [one for one in BUILT["kserve"] if one["kind"] == "LLMInferenceService"]
    assert service["apiVersion"] == "serving.kserve.io/v1alpha2"
    spec = service["spec"]
    assert set(spec) == {"model", "replicas", "router", "template", "prefill"}
    assert set(spec["prefill"]) == {"replicas", "template"}
    assert set(spec["router"]) == {"route", "gateway", "scheduler"}
    assert re.fullmatch(r"hf://\S+", spec["model"]["uri"])
    for template in templates([service]):
        resource = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
        kubernetes_validate.validate(resource, version, strict=True)


def test_the_compose_file_is_valid() -> None:
    services = {
        name: {key: value for key, value in service.items() if key != LATER_THAN_SCHEMA}
        for name, service in COMPOSE["services"].items()
    }
    templates = ("x-engine", "x-environment")
    rest = {key: value for key, value in COMPOSE.items() if key not in templates}
    PyCompose.from_yaml(yaml.safe_dump(rest | {"services": services})).validate()


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


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@each_folder
def test_kubectl_builds_the_same(folder: str, tmp_path: Path) -> None:
    copied = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, copied)
    (copied / "secret/key.env").write_text(GENERATED["key.env"], encoding="utf-8")
    built = subprocess.run(
        ["kubectl", "kustomize", str(copied / folder)],
        capture_output=True,
        check=True,
    )
    assert by_name(yaml.safe_load_all(built.stdout)) == by_name(iter(BUILT[folder]))


def by_name(resources: Iterator[Any]) -> dict[tuple[str, str], Any]:
    """With secrets in the clear: kubectl breaks their lines."""
    named = {(one["kind"], one["metadata"]["name"]): one for one in resources}
    return {
        name: one | {"data": {key: base64.b64decode(text) for key, text in one["data"].items()}}
        if "data" in one
        else one
        for name, one in named.items()
    }


# --- parts that fit together


def test_all_engines_are_looked_at() -> None:
    assert {folder: len(list(engines(folder))) for folder in ENGINES} == ENGINES


@each_engine
def test_an_engine_has_the_key_and_an_address(engine: Engine) -> None:
    environment = {entry["name"]: entry["valueFrom"] for entry in engine.container["env"][-2:]}
    assert environment == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": {"fieldRef": {"fieldPath": "status.podIP"}},
        "NIXL_KV_KEY": {"secretKeyRef": {"name": "nixl-kv", "key": "NIXL_KV_KEY"}},
    }
    (secret,) = [one for one in BUILT[engine.folder] if one["kind"] == "Secret"]
    assert secret["metadata"]["name"] == "nixl-kv"
    parse_key(base64.b64decode(secret["data"]["NIXL_KV_KEY"]).decode(), "the Secret")


@each_engine
def test_there_is_time_to_drain(engine: Engine) -> None:
    """Within KServe's 15 s of preStop, and else within the pod's time, with the requests' own."""
    shell, option, script = engine.container["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, option) == ("sh", "-c")
    waits, drains = script.split("; ")
    asleep = float(waits.removeprefix("sleep "))
    draining = float(drain_options(drains)["timeout"])
    if engine.folder == "kserve":
        assert asleep + draining <= 15
        assert "terminationGracePeriodSeconds" not in engine.template["spec"]
        return
    running = float(re.findall(r"--shutdown-timeout=(\d+)", arguments_of(engine.container))[0])
    grace = engine.template["spec"]["terminationGracePeriodSeconds"]
    assert asleep + draining + running + 10 <= grace


@each_engine
def test_ports_and_volumes_are_there(engine: Engine) -> None:
    if engine.folder == "kserve":  # its templates have them
        assert not {"ports", "volumeMounts", "startupProbe"} & set(engine.container)
        return
    ports = {entry["name"]: entry["containerPort"] for entry in engine.container["ports"]}
    assert f"--port={ports['http']} " in arguments_of(engine.container)
    assert ports["nixl-kv"] == 5600
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine.container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    volumes = {entry["name"] for entry in engine.template["spec"]["volumes"]}
    assert {entry["name"] for entry in engine.container["volumeMounts"]} == volumes


def test_llm_ds_sidecar_stands_before_decode() -> None:
    decode, prefill = sorted(
        templates(BUILT["llm-d"]), key=lambda one: one["metadata"]["labels"]["llm-d.ai/role"]
    )
    (sidecar,) = decode["spec"]["initContainers"]
    options = dict(word[2:].split("=") for word in sidecar["args"])
    (container,) = decode["spec"]["containers"]
    assert f"--port={options['vllm-port']} " in arguments_of(container)
    assert [entry["containerPort"] for entry in sidecar["ports"]] == [int(options["port"])]
    assert (sidecar["restartPolicy"], options["kv-connector"]) == ("Always", "nixlv2")
    assert "initContainers" not in prefill["spec"]
    assert f"--port={options['port']} " in arguments_of(prefill["spec"]["containers"][0])


@each_folder
def test_selectors_fit(folder: str) -> None:
    pods = [template["metadata"].get("labels", {}) for template in templates(BUILT[folder])]
    for resource in BUILT[folder]:
        selector = resource.get("spec", {}).get("selector", {})
        wanted = selector.get("matchLabels", selector)
        if wanted:
            assert sum(wanted.items() <= labels.items() for labels in pods) == 1


# --- the router


@pytest.fixture
def arguments(request: pytest.FixtureRequest) -> list[str]:
    if request.param == "compose":
        return COMPOSE["services"]["router"]["command"]
    (container,) = next(
        template["spec"]["containers"]
        for template in templates(BUILT["vllm-router"])
        if template["metadata"]["labels"]["app.kubernetes.io/component"] == "router"
    )
    assert container["command"] == ["vllm-router"]
    return container["args"]


@each_router
def test_the_router_knows_its_options_and_finds_the_engines(arguments: list[str]) -> None:
    router = router_of(arguments)
    assert router.vllm_pd_disaggregation
    assert router.kv_connector == "nixl"
    assert (router.host, router.port) == ("0.0.0.0", 8000)  # noqa: S104 - in its container
    assert router.prefill_urls == [("http://prefill:8000", None)]
    assert router.decode_urls == ["http://decode:8000"]


def test_what_the_router_names_exists() -> None:
    services = {
        one["metadata"]["name"]: one for one in BUILT["vllm-router"] if one["kind"] == "Service"
    }
    assert set(services) == {"prefill", "decode", "router"}
    for service in services.values():
        assert service["spec"]["ports"] == [{"name": "http", "port": 8000, "targetPort": "http"}]
    for name in ("prefill", "decode"):
        assert "--port=8000" in COMPOSE["services"][name]["command"]


def router_of(arguments: list[str]) -> RouterArgs:
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    return RouterArgs.from_cli_args(parser.parse_args(arguments))


# --- compose


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_an_engine_of_compose_has_what_it_needs(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["entrypoint"] == ["vllm", "serve"]
    environment = engine_commands.environment_of(service)
    assert environment["NIXL_KV_KEY"] == engine_commands.KEY
    assert environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "auto"
    ((hook,),) = [[one["command"] for one in service[LATER_THAN_SCHEMA]]]
    draining = float(drain_options(shlex.join(hook))["timeout"])
    (running,) = [word.split("=")[1] for word in service["command"] if "shutdown" in word]
    assert draining + float(running) + 10 <= float(service["stop_grace_period"].removesuffix("s"))


def test_the_images_are_built() -> None:
    """Each stage that is named is one of the Dockerfile, and what it copies exists."""
    dockerfile = (REPO / "configs/docker/Dockerfile").read_text(encoding="utf-8")
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", dockerfile, re.MULTILINE))
    builds = [service["build"] for service in COMPOSE["services"].values()]
    assert {build["target"] for build in builds} == stages == {"engine", "router"}
    for build in builds:
        context = (REPO / "configs" / build["context"]).resolve()
        assert (context / build["dockerfile"]).samefile(REPO / "configs/docker/Dockerfile")
    copied = [
        words
        for line in re.findall(r"^COPY (.*)$", dockerfile, re.MULTILINE)
        for words in line.split()[:-1]
    ]
    ignored = (REPO / ".dockerignore").read_text(encoding="utf-8").split()
    for name in copied:
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
    parameters(shlex.split(line, comments=True))


def drain_options(line: str) -> dict[str, Any]:
    words = shlex.split(line)
    assert words[1] == "drain"
    given = parameters(words)
    assert given["at"] is None, "the engine's own variables say where it is"
    return given


def parameters(words: list[str]) -> dict[str, Any]:
    """What a command of ours makes of its options; nothing is run."""
    program, name, *arguments = words
    assert program == "nixl-kv"
    commands: Any = typer.main.get_command(app)
    return dict(commands.commands[name].make_context(name, arguments).params)
