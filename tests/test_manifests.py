"""configs/kubernetes and configs/compose.yaml fit published schemas, and do what the engines need.

Every overlay is rendered, and compared with what its engines open by the code itself.
"""

import argparse
import base64
import inspect
import itertools
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, Final

import kubernetes_validate
import pytest
import typer
import vllm.envs
import yaml
from compose_spec import PyCompose
from vllm.entrypoints.launchers import dp_supervisor
from vllm_router.router_args import RouterArgs

from nixl_kv.cli.main import READY_TIMEOUT_S, app
from nixl_kv.keys import GROUP_MODES, MODES, parse_key
from support import engine_commands
from support.engine_commands import REPO, environment_of
from support.manifests import (
    HOST,
    KUBERNETES,
    Pod,
    admitted,
    arguments,
    engines,
    group_environment,
    matches,
    of_kind,
    opened,
    parsed,
    pods,
    rendered,
    run_shell,
)

OVERLAYS: Final = ("vllm-router", "llm-d", "llm-d-disaggregated-set", "llm-d-wide-ep")
"""Those that set everything; KServe's templates add the rest to its pods."""
FOLDERS: Final = ("secret", "base", *OVERLAYS, "kserve")
FOREIGN: Final = ("LLMInferenceService", "DisaggregatedSet")
COMPONENTS: Final = tuple(sorted(path.name for path in (KUBERNETES / "components").iterdir()))
DEVICES: Final = {
    "rdma-ib": "rdma/ib",
    "rdma-roce": "rdma/roce_gdr",
    "rdma-sriov": "nvidia.com/sriov-rdma-vf",
    "rdma-efa": "vpc.amazonaws.com/efa",
}
"""Device names of the device plugins in llm-d's guides."""

VERSIONS: Final = ("1.29", "1.37")
"""The first with containers that start before the others and stay, and the newest schema."""
NEWER: Final = {"ResourceClaimTemplate": "1.37"}
COMPOSE: Final = yaml.safe_load((REPO / "configs/compose.yaml").read_text(encoding="utf-8"))
LATER_THAN_SCHEMA: Final = "pre_stop"
"""A key of compose 2.30, which compose_spec does not know yet."""

MOST_RANKS: Final = 64
"""The network policy keeps this number of ports for an engine's descriptions, and for its ranks."""
UCX_PORTS_PER_RANK: Final = 100  # docs/operations.md, Firewall
IDLE_S: Final = 90  # how long llm-d's sidecar and vllm-router keep an idle connection
STRANGER: Final = {"app": "a-stranger"}
MONITORING: Final = {"kubernetes.io/metadata.name": "monitoring"}
ROUTER: Final = {"app.kubernetes.io/name": "nixl-kv", "app.kubernetes.io/component": "router"}

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
each_folder = pytest.mark.parametrize("folder", FOLDERS)
each_with_engines = pytest.mark.parametrize("folder", FOLDERS[1:])
each_overlay = pytest.mark.parametrize("folder", OVERLAYS)
each_with_policy = pytest.mark.parametrize("folder", [*OVERLAYS, "kserve"])


def api_ports(folder: str) -> frozenset[int]:
    """The ports to which clients, routers and Prometheus connect, at either engine."""
    if folder == "kserve":  # its templates: prefill, and a sidecar before decode; decode
        return frozenset({8000, 8001})
    found = engines(rendered(folder))
    before = (each for pod in found for each in pod.spec.get("initContainers", ()))
    sidecars = {port["containerPort"] for container in before for port in container["ports"]}
    return frozenset().union(*(opened(pod).api for pod in found), sidecars)


# --- the files by themselves


def test_every_file_is_part_of_something() -> None:
    files = {path.resolve() for path in KUBERNETES.rglob("*.yaml")}
    roots = {path for path in files if path.name == "kustomization.yaml"}
    named = set()
    for root in roots:
        said = yaml.safe_load(root.read_text(encoding="utf-8"))
        patches = [one["path"] for one in said.get("patches", ()) if "path" in one]
        entries = [*said.get("resources", ()), *said.get("components", ()), *patches]
        named |= {(root.parent / entry).resolve() for entry in entries}
    assert files - roots <= named
    folders = {path.parent.relative_to(KUBERNETES).parts for path in roots}
    inner = {("components", name) for name in COMPONENTS} | {("llm-d-wide-ep", "engines")}
    assert folders == {(name,) for name in FOLDERS} | inner
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


def check_schema(resources: list[Any], version: str) -> None:
    """Other projects' own kinds have no schema here; they hold Kubernetes' templates of pods."""
    for resource in resources:
        kind = resource["kind"]
        if kind not in FOREIGN and NEWER.get(kind, version) == version:
            kubernetes_validate.validate(resource, version, strict=True)
    for pod in pods(resources):
        template = {"metadata": {"labels": dict(pod.labels)}, "spec": pod.spec}
        held = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
        kubernetes_validate.validate(held, version, strict=True)


@needs_kubectl
@each_folder
@pytest.mark.parametrize("version", VERSIONS)
def test_resources_are_valid(folder: str, version: str) -> None:
    check_schema(rendered(folder), version)


# --- an engine


@needs_kubectl
@each_with_engines
def test_there_are_two_engines_which_run_as_ours(folder: str) -> None:
    """vLLM's parser and checks accept what each container would run."""
    found = engines(rendered(folder))
    assert len(found) == 2
    for pod, index in each_pod(found):
        transfer = parsed(arguments(pod, index)).kv_transfer_config
        assert transfer.kv_connector == "NixlConnector"
        assert transfer.kv_connector_module_path == "nixl_kv.connector"
    roles = [parsed(arguments(pod)).kv_transfer_config.kv_role for pod in found]
    assert sorted(roles) == ["kv_consumer", "kv_producer"]


def each_pod(found: list[Pod]) -> Iterator[tuple[Pod, int]]:
    return ((pod, index) for pod in found for index in range(pod.size))


@needs_kubectl
@each_with_engines
def test_an_engine_reads_the_key_from_a_file(folder: str) -> None:
    (secret,) = of_kind(rendered(folder), "Secret")
    for pod in engines(rendered(folder)):
        extra = parsed(arguments(pod)).kv_transfer_config.kv_connector_extra_config
        path = PurePosixPath(extra["key_file"])
        (mount,) = [one for one in mounts(pod) if path.is_relative_to(one["mountPath"])]
        (volume,) = [one for one in pod.spec["volumes"] if one["name"] == mount["name"]]
        assert volume["secret"]["secretName"] == secret["metadata"]["name"] == "nixl-kv"
        parse_key(base64.b64decode(secret["data"][path.name]).decode(), "the Secret")
        mode, group = volume["secret"]["defaultMode"], pod.spec["securityContext"]["fsGroup"]
        assert mode in GROUP_MODES
        assert group  # the file's, and one of the process
        assert {option for option in key_options(pod) if option} == {str(path)}


def mounts(pod: Pod) -> list[Any]:
    return list(pod.engine()["volumeMounts"])


def key_options(pod: Pod) -> list[str]:
    """The `--key-file` of each command of ours in hooks and probes."""
    return re.findall(r"--key-file[ =]([\w/.-]+)", json.dumps(commands(pod)))


def commands(pod: Pod) -> Any:
    container = pod.engine()
    return [container["lifecycle"], container.get("readinessProbe")]


@needs_kubectl
@each_folder
def test_no_secret_is_in_an_environment(folder: str) -> None:
    for pod in pods(rendered(folder)):
        for container in pod.containers():
            assert "envFrom" not in container
            assert all("secretKeyRef" not in json.dumps(one) for one in container.get("env", ()))
    assert "NIXL_KV_KEY" not in json.dumps(rendered(folder))


@needs_kubectl
@each_with_engines
def test_an_engine_has_variables_that_exist(folder: str) -> None:
    for pod in engines(rendered(folder)):
        container = pod.engine()
        environment = environment_of(container)
        names = {name for name in environment if name.startswith("VLLM_")}
        assert names - {"VLLM_ADDITIONAL_ARGS"} <= vllm.envs.environment_variables.keys()
        assert environment[HOST] == engine_commands.POD_IP
        assert int(environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) == 120 > IDLE_S
        if folder != "kserve":  # which mounts a home of its own
            assert environment["HOME"] in {one["mountPath"] for one in mounts(pod)}
        assert environment["USER"]


@needs_kubectl
@each_with_engines
def test_an_engine_has_its_volumes(folder: str) -> None:
    for pod in engines(rendered(folder)):
        volumes = {entry["name"] for entry in pod.spec["volumes"]}
        assert {entry["name"] for entry in mounts(pod)} == volumes


@needs_kubectl
@pytest.mark.parametrize("folder", ["base", *OVERLAYS])
def test_pods_have_no_privileges(folder: str) -> None:
    for pod in pods(rendered(folder)):
        assert pod.spec["automountServiceAccountToken"] is False
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod.containers():
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


@needs_kubectl
def test_kserve_gets_the_settings_that_its_templates_lack() -> None:
    """They have ports, probes, and a context without root, but no user, and 15 s of preStop."""
    for pod in engines(rendered("kserve")):
        assert not {"ports", "startupProbe", "readinessProbe"} & set(pod.engine())
        assert pod.spec["securityContext"]["runAsUser"]
    prefill, decode = engines(rendered("kserve"))
    assert prefill.spec["automountServiceAccountToken"] is False
    assert "automountServiceAccountToken" not in decode.spec, "the sidecar asks Kubernetes"


IN_TREE: Final = ("--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_both"}')


@needs_kubectl
@pytest.mark.parametrize("order", ["before", "behind"])
def test_our_connector_wins_over_one_that_a_template_adds(order: str) -> None:
    """KServe adds one unless VLLM_ADDITIONAL_ARGS has the option; llm-d's guides have one."""
    for pod in engines(rendered("kserve")):
        assert IN_TREE[0] in environment_of(pod.engine())["VLLM_ADDITIONAL_ARGS"]
        model, *ours = arguments(pod)
        both = [*IN_TREE, *ours] if order == "before" else [*ours, *IN_TREE]
        transfer, own = (parsed([model, *one]).kv_transfer_config for one in (both, ours))
        assert transfer.kv_connector_module_path == "nixl_kv.connector"
        assert transfer.kv_role == own.kv_role != "kv_both"
        assert transfer.kv_connector_extra_config == own.kv_connector_extra_config


# --- ports


@needs_kubectl
@each_overlay
def test_a_container_names_the_ports_that_it_opens(folder: str) -> None:
    for pod in engines(rendered(folder)):
        engine = opened(pod)
        named = {port["name"]: port["containerPort"] for port in pod.engine()["ports"]}
        assert len(set(named.values())) == len(named)
        assert {named[name] for name in named if name != "nixl-kv"} == engine.api
        assert named["nixl-kv"] == min(engine.descriptions)
        inner = [
            one["containerPort"]
            for each in pod.spec.get("initContainers", ())
            for one in each["ports"]
        ]
        assert not set(inner) & engine.api, "containers of a pod share its ports"


@needs_kubectl
@each_overlay
def test_probes_ask_what_answers(folder: str) -> None:
    for pod in engines(rendered(folder)):
        container = pod.engine()
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            match container[name]:
                case {"httpGet": {"path": path, "port": port}} if port == "supervisor":
                    assert f'"{path}"' in inspect.getsource(dp_supervisor._build_dp_supervisor_app)
                    assert ports[port] == parsed(arguments(pod)).data_parallel_supervisor_port
                case {"httpGet": {"path": path, "port": port}}:
                    assert (path, port) == ("/health", "http")
                    assert ports[port] == parsed(arguments(pod)).port
                case {"exec": {"command": command}, "timeoutSeconds": limit}:
                    assert command[:2] == ["nixl-kv", "ready"]
                    assert parameters(shlex.join(command))["at"] is None
                    assert limit > READY_TIMEOUT_S + 2, "Python starts first"
                case _:
                    pytest.fail(f"{name} of {pod.labels}")


@needs_kubectl
@each_with_policy
def test_engines_reach_each_other(folder: str) -> None:
    """Each port that an engine opens, and of others only those kept for a larger engine."""
    resources = rendered(folder)
    found = engines(resources)
    for (target, index), source in itertools.product(each_pod(found), found):
        engine, api = opened(target, index), api_ports(folder)
        reached = admitted(resources, target.labels, source.labels)
        assert reached is not None
        assert engine.descriptions | engine.ranks | engine.ucx <= reached
        config = engine.config
        kept = set(range(config.port, config.port + MOST_RANKS))
        kept |= set(range(config.rank_port, config.rank_port + MOST_RANKS))
        is_own_group = target is source and target.size > 1  # NCCL's ports are any
        assert is_own_group or reached - api == kept | engine.ucx
        assert len(engine.ucx) >= UCX_PORTS_PER_RANK * engine.num_ranks
        opens = (engine.descriptions, engine.ranks, engine.ucx, api)
        assert sum(map(len, opens)) == len(frozenset().union(*opens)), "no port has two uses"


@needs_kubectl
@each_with_policy
def test_strangers_reach_the_api_alone(folder: str) -> None:
    resources, api = rendered(folder), api_ports(folder)
    for pod in engines(resources):
        assert api == admitted(resources, pod.labels, STRANGER, MONITORING)
        is_closed = folder == "vllm-router"  # the others' routers have labels of their own
        assert admitted(resources, pod.labels, STRANGER) == (set() if is_closed else api)
        assert not is_closed or admitted(resources, pod.labels, ROUTER) == api
        assert not is_closed or admitted(resources, pod.labels, {}, {}) == set()


@needs_kubectl
@each_with_policy
def test_each_policy_selects_pods(folder: str) -> None:
    resources = rendered(folder)
    labels = [pod.labels for pod in pods(resources)]
    for policy in of_kind(resources, "NetworkPolicy"):
        assert any(matches(policy["spec"]["podSelector"], one) for one in labels)
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        peers = [peer for rule in policy["spec"]["ingress"] for peer in rule.get("from", ())]
        selectors = [peer["podSelector"] for peer in peers if "podSelector" in peer]
        assert all(any(matches(selector, one) for one in labels) for selector in selectors)
    for pod in engines(resources):
        assert admitted(resources, pod.labels, STRANGER) is not None


@needs_kubectl
@each_overlay
def test_prometheus_scrapes_each_api_server_of_the_engines_and_nothing_else(folder: str) -> None:
    path = REPO / "configs/prometheus/podmonitor.yaml"
    monitor = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]
    endpoints = [one["port"] for one in monitor["podMetricsEndpoints"]]
    assert len(set(endpoints)) == len(endpoints)
    for pod in pods(rendered(folder)):
        assert matches(monitor["selector"], pod.labels) == pod.is_engine()
        scraped = [
            (container["name"], port["containerPort"])
            for container in pod.containers()
            for port in container["ports"]
            if port["name"] in endpoints
        ]
        if pod.is_engine():
            options = parsed(arguments(pod))
            servers = range(options.port, options.port + (options.data_parallel_size_local or 1))
            assert scraped == [("vllm", port) for port in servers]


# --- components


@needs_kubectl
@pytest.mark.parametrize("component", [*DEVICES, "rdma-dra", "same-zone", "share-dir"])
def test_a_component_changes_both_engines(component: str) -> None:
    """Also those of a DisaggregatedSet, if it comes last."""
    plain = rendered("llm-d", "disaggregated-set")
    changed = rendered("llm-d", component, "disaggregated-set")
    check_schema(changed, VERSIONS[-1])
    for before, after in zip(engines(plain), engines(changed), strict=True):
        container, was = after.engine(), before.engine()
        if component in DEVICES:
            limits = container["resources"]["limits"]
            assert limits == was["resources"]["limits"] | {DEVICES[component]: "1"}
        if component.startswith("rdma-"):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"add": ["IPC_LOCK"], "drop": ["ALL"]},
                "runAsNonRoot": False,
                "runAsUser": 0,
            }
        backends = ("LIBFABRIC",) if component == "rdma-efa" else ("UCX",)
        assert opened(after).config.backends == backends
        if component == "rdma-dra":
            (claim,) = of_kind(changed, "ResourceClaimTemplate")
            (own,) = after.spec["resourceClaims"]
            assert own["resourceClaimTemplateName"] == claim["metadata"]["name"]
            assert container["resources"]["claims"] == [{"name": own["name"]}]
            assert not container["resources"]["limits"], "the claim has the GPU"
            wanted = [one["name"] for one in claim["spec"]["spec"]["devices"]["requests"]]
            assert claim["spec"]["spec"]["devices"]["constraints"][0]["requests"] == wanted
        if component == "share-dir":
            check_shared_directory(after)
            (shared,) = of_kind(changed, "ResourceClaim")
            (request,) = shared["spec"]["devices"]["requests"]
            assert request["exactly"]["count"] == len(engines(changed)), "a GPU for each"
            (own,) = after.spec["resourceClaims"]
            assert own["resourceClaimName"] == shared["metadata"]["name"], "both see all GPUs"
            assert container["resources"]["claims"] == [{"name": own["name"]}]
        if component == "same-zone":
            (term,) = after.spec["affinity"]["podAffinity"].popitem()[1]
            selector = term["podAffinityTerm"]["labelSelector"]
            assert all(matches(selector, pod.labels) for pod in engines(changed))
    assert len(engines(changed)) == 2


def check_shared_directory(pod: Pod) -> None:
    """Made for the user of the engine, in a directory of the node that is mounted."""
    share = opened(pod).config.share_dir
    assert share is not None
    path = PurePosixPath(share)
    (mount,) = [one for one in mounts(pod) if path.is_relative_to(one["mountPath"])]
    (volume,) = [one for one in pod.spec["volumes"] if one["name"] == mount["name"]]
    assert "hostPath" in volume
    (before,) = [one for one in pod.spec["initContainers"] if one["name"] == mount["name"]]
    user = pod.spec["securityContext"]["runAsUser"]
    assert before["command"] == ["install", "-d", "-m", "0700", "-o", str(user), share]
    assert before["volumeMounts"] == [mount]
    assert before["image"] == pod.engine()["image"]


@needs_kubectl
def test_engines_that_share_gpus_take_different_ones() -> None:
    found = engines(rendered("llm-d", "share-dir"))
    assert {environment_of(pod.engine())["CUDA_VISIBLE_DEVICES"] for pod in found} == {"0", "1"}


@needs_kubectl
def test_a_disaggregated_set_has_the_pods_of_the_deployments() -> None:
    deployments = {
        pod.labels["app.kubernetes.io/component"]: pod for pod in pods(rendered("llm-d"))
    }
    sets = rendered("llm-d-disaggregated-set")
    assert not of_kind(sets, "Deployment")
    assert {pod.labels["app.kubernetes.io/component"]: pod for pod in pods(sets)} == deployments


# --- stopping


@needs_kubectl
@each_with_engines
def test_there_is_time_to_drain(folder: str) -> None:
    """Within KServe's 15 s of preStop, otherwise within the pod's time, with the requests' own.

    All ranks of a pod drain at once, each at its own port.
    """
    for pod, index in each_pod(engines(rendered(folder))):
        shell, option, script = pod.engine()["lifecycle"]["preStop"]["exec"]["command"]
        assert (shell, option) == ("sh", "-c")
        drains = run_shell(script, [], group_environment(pod, index))
        given = [parameters(shlex.join(words)) for words in drains]
        if len(given) == 1:
            assert given[0]["at"] is None, "the engine's own variables say where it is"
        else:
            ports = opened(pod, index).descriptions
            assert {one["at"] for one in given} == {
                f"{engine_commands.POD_IP}:{port}" for port in ports
            }
        (timeout,) = {one["timeout"] for one in given}
        stopping = float(re.findall(r"sleep (\d+)", script)[0]) + timeout
        if folder == "kserve":
            assert stopping <= 15
            assert "terminationGracePeriodSeconds" not in pod.spec
            continue
        running = parsed(arguments(pod, index)).shutdown_timeout
        assert stopping + running + 10 <= pod.spec["terminationGracePeriodSeconds"]


# --- llm-d


@needs_kubectl
@pytest.mark.parametrize("folder", OVERLAYS[1:])
def test_llm_ds_sidecar_stands_before_decode(folder: str) -> None:
    found = engines(rendered(folder))
    prefill, decode = sorted(found, key=lambda one: one.labels["llm-d.ai/role"], reverse=True)
    (sidecar,) = decode.spec["initContainers"]
    options = dict(word[2:].split("=") for word in sidecar["args"])
    ranks = int(options.get("data-parallel-size", 1))
    own, behind = parsed(arguments(prefill)), parsed(arguments(decode))
    assert behind.port == int(options["vllm-port"])
    assert ranks == (behind.data_parallel_size_local or 1)
    first = int(options["port"])
    assert [one["containerPort"] for one in sidecar["ports"]] == [*range(first, first + ranks)]
    assert (sidecar["restartPolicy"], options["kv-connector"]) == ("Always", "nixlv2")
    assert "initContainers" not in prefill.spec
    assert own.port == first
    assert len({pod.labels["llm-d.ai/guide"] for pod in found}) == 1


@needs_kubectl
def test_wide_ep_has_all_ranks_once() -> None:
    for pod in engines(rendered("llm-d-wide-ep")):
        options = [parsed(arguments(pod, index)) for index in range(pod.size)]
        starts = [one.data_parallel_start_rank for one in options]
        (size,) = {one.data_parallel_size for one in options}
        (local,) = {one.data_parallel_size_local for one in options}
        assert starts == list(range(0, size, local))
        gpus = pod.engine()["resources"]["limits"]["nvidia.com/gpu"]
        assert int(gpus) == local * options[0].tensor_parallel_size


def edits() -> list[tuple[str, list[str]]]:
    """The edits that llm-d's page asks a stranger for: the value, and the files that have it."""
    page = (REPO / "docs/deploy/llm-d.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| `")]
    return [
        (row[0].strip(" `"), re.findall(r"`([\w/.-]+)`", row[1])) for row in rows if len(row) == 3
    ]


@needs_kubectl
@pytest.mark.parametrize(("value", "files"), edits())
def test_the_values_to_edit_for_llm_d_exist(value: str, files: list[str]) -> None:
    assert files
    for name in files:
        assert value in (KUBERNETES / name).read_text(encoding="utf-8"), name
    images = [
        container["image"]
        for pod in pods(rendered("llm-d"))
        for container in pod.containers()
        if "example.com" in container["image"]
    ]
    assert {image.partition(":")[0] for image in images} <= {one for one, _ in edits()}


# --- the services and the router


@needs_kubectl
@each_folder
def test_selectors_fit(folder: str) -> None:
    labels = [pod.labels for pod in pods(rendered(folder))]
    for resource in rendered(folder):
        selector = resource.get("spec", {}).get("selector", {})
        wanted = selector.get("matchLabels", selector)
        if wanted:
            assert sum(wanted.items() <= one.items() for one in labels) == 1


def check_router(words: list[str]) -> None:
    """The router knows its options, and finds the engines."""
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    router = RouterArgs.from_cli_args(parser.parse_args(words))
    assert (router.vllm_pd_disaggregation, router.kv_connector) == (True, "nixl")
    assert (router.host, router.port) == ("0.0.0.0", 8000)  # noqa: S104 - in its container
    assert router.prefill_urls == [("http://prefill:8000", None)]
    assert router.decode_urls == ["http://decode:8000"]


@needs_kubectl
def test_the_router_of_kubernetes_finds_its_engines() -> None:
    resources = rendered("vllm-router")
    (pod,) = [pod for pod in pods(resources) if pod.labels == ROUTER]
    (container,) = pod.spec["containers"]
    assert container["command"] == ["vllm-router"]
    check_router(container["args"])
    services = {one["metadata"]["name"]: one for one in resources if one["kind"] == "Service"}
    assert set(services) == {"prefill", "decode", "router"}
    for service in services.values():
        assert service["spec"]["ports"] == [{"name": "http", "port": 8000, "targetPort": "http"}]


def test_the_router_of_compose_finds_its_engines() -> None:
    check_router(COMPOSE["services"]["router"]["command"])


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_an_engine_of_compose_has_the_resources_it_needs(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["entrypoint"] == ["vllm", "serve"]
    assert "--port=8000" in service["command"]
    environment = environment_of(service)
    assert "NIXL_KV_KEY" not in environment, "it is a file"
    assert environment[HOST] == "auto"
    assert int(environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > IDLE_S
    (secret,) = service["secrets"]
    path = f"/run/secrets/{secret['source']}"
    assert COMPOSE["secrets"][secret["source"]] == {"environment": "NIXL_KV_KEY"}
    assert (secret["mode"], secret["uid"]) in [(mode, "0") for mode in MODES]
    options = parsed(service["command"])
    extra = options.kv_transfer_config.kv_connector_extra_config
    assert extra == {"key_file": path, "share_dir": "/share/engines"}
    assert "share:/share" in service["volumes"]
    assert not {"pid", "ipc"} & service.keys(), "a descriptor crosses namespaces"
    (hook,) = [one["command"] for one in service[LATER_THAN_SCHEMA]]
    given = parameters(shlex.join(hook))
    assert (str(given["key_file"]), given["at"]) == (path, None)
    stopping = given["timeout"] + options.shutdown_timeout
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


def parameters(line: str) -> dict[str, Any]:
    """The options of a command of ours, which does not run."""
    program, name, *arguments = shlex.split(line, comments=True)
    assert program == "nixl-kv"
    commands: Any = typer.main.get_command(app)
    return dict(commands.commands[name].make_context(name, arguments).params)
