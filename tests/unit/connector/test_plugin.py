"""Runs in every process of every start: the connector's name, and the check of its address."""

import logging
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nixl_kv.config import PORT_VARIABLE, Config
from nixl_kv.connector import plugin
from nixl_kv.connector.plugin import check_address, check_before_weights
from nixl_kv.connector.unpromised import Engine
from nixl_kv.errors import ConfigError
from nixl_kv.transport.ports import LimitedPort

# --- the name

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """That of a factory like vLLM's, whether vLLM is installed or not."""
    known: dict[str, object] = {}

    def register(name: str, module: str, class_name: str) -> None:
        if name in known:
            raise KeyError("vLLM ends the start for a name that is known")
        known[name] = (module, class_name)

    names = FACTORY.split(".")
    for length in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:length]), ModuleType(names[length - 1]))
    factory = SimpleNamespace(_registry=known, register_connector=register)
    monkeypatch.setattr(sys.modules[FACTORY], "KVConnectorFactory", factory, raising=False)
    return known


def test_the_connector_is_known_by_its_name(registry: dict[str, object]) -> None:
    for _ in range(2):
        plugin.register()
    assert registry == {"NixlKVConnector": ("nixl_kv.connector", "NixlKVConnector")}


@pytest.mark.parametrize("module", [None, SimpleNamespace()], ids=["no module", "no factory"])
@pytest.mark.usefixtures("registry")
def test_another_vllm_costs_a_line_in_the_log_and_nothing_else(
    module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, FACTORY, module)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert caplog.messages == ["vLLM's factory did not accept the name NixlKVConnector"]


# --- the address, before vLLM loads the weights

HOST = "127.0.0.1"
ELSEWHERE = "192.0.2.1"
"""An address for documentation: no machine has it."""


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "PORT_WAIT_S", 0.0)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port where another engine listens."""
    port = LimitedPort(HOST, 0)
    yield port.port
    port.close()


def engine(index: int = 0, node: int = 0, transfer: Any = None) -> Any:
    """As much of vLLM's configuration as the plugin uses."""
    parallel = SimpleNamespace(data_parallel_index=index, node_rank_within_dp=node)
    return SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer)


@pytest.mark.parametrize("is_prefill", [False, True], ids=["decode", "prefill"])
def test_a_configured_address_that_cannot_be_used_is_refused_in_any_role(
    taken: int, *, is_prefill: bool
) -> None:
    config = Config.parse({}, {PORT_VARIABLE: f"{taken}"})
    with pytest.raises(ConfigError) as refusal:
        check_address(config, engine(), is_prefill=is_prefill)
    assert str(refusal.value) == (
        f"{PORT_VARIABLE} is {taken}; port {taken} of {HOST} cannot be used: Address already "
        "in use; allowed: a free port; set VLLM_NIXL_SIDE_CHANNEL_PORT (or 'port') to another port "
        "for each engine on this machine"
    )
    config = Config.parse({"insecure": True, "host": ELSEWHERE}, {})
    words = rf"config\['host'\] is '{ELSEWHERE}', which is not an address of this machine;"
    with pytest.raises(ConfigError, match=words):
        check_address(config, engine(), is_prefill=is_prefill)


def test_the_default_port_is_refused_where_tickets_name_it(taken: int) -> None:
    by_default = replace(Config.parse({"port": taken}, {}), port_name="")
    with pytest.raises(ConfigError, match=rf"^port is {taken} \(the default\); port {taken} of"):
        check_address(by_default, engine(), is_prefill=True)
    check_address(by_default, engine(), is_prefill=False)


def test_each_data_parallel_rank_checks_its_own_port(taken: int) -> None:
    config = Config.parse({"port": taken - 1}, {})
    words = f"is {taken - 1}; data-parallel rank 1 listens on {taken};"
    with pytest.raises(ConfigError, match=words):
        check_address(config, engine(1), is_prefill=True)


def test_checks_leave_the_port_free_and_do_not_meet() -> None:
    """Engines that start at the same time check at the same time; the first to listen wins."""
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    config, errors = Config.parse({"port": port}, {}), list[Exception]()

    def check() -> None:
        try:
            for _ in range(200):
                check_address(config, engine(), is_prefill=True)
        except ConfigError as error:
            errors.append(error)

    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    LimitedPort(HOST, port).close()


def test_the_port_of_an_engine_that_is_ending_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = LimitedPort(HOST, 0)
    monkeypatch.setattr(plugin, "PORT_WAIT_S", 60.0)
    monkeypatch.setattr(plugin.time, "sleep", lambda _: other.close())
    with caplog.at_level(logging.WARNING):
        check_address(Config.parse({"port": other.port}, {}), engine(), is_prefill=True)
    assert caplog.messages == [f"port {other.port} is in use; waiting for up to 60 s"]


# --- vLLM's executors


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines whose vLLM was checked. These tests also run without vLLM."""
    checked: list[Engine] = []
    monkeypatch.setattr(plugin.unpromised, "check", checked.append)
    return checked


def executors() -> tuple[Any, list[tuple[Any, ...]]]:
    """A class like vLLM's, which notes what it is made with: then it loads the weights."""
    begun: list[tuple[Any, ...]] = []

    class Executor:
        def __init__(self, vllm_config: Any, *args: Any) -> None:
            begun.append((vllm_config, *args))

    for _ in range(3):
        check_before_weights(Executor)
    return Executor, begun


def transfer(port: int, **given: Any) -> Any:
    values = {"kv_connector": "NixlConnector", "kv_connector_module_path": "nixl_kv.connector"}
    extra = {"kv_connector_extra_config": {"port": port}, "kv_role": "kv_both"}
    return SimpleNamespace(**{**values, **extra, **given})


def multi(*children: Any) -> Any:
    return SimpleNamespace(
        kv_connector="MultiConnector",
        kv_connector_extra_config={"connectors": list(map(vars, children))},
    )


@pytest.mark.parametrize("is_child", [False, True], ids=["alone", "of a MultiConnector"])
@pytest.mark.parametrize("module", ["nixl_kv.connector", None], ids=["by module", "by name"])
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_no_weights_are_loaded_if_the_port_is_in_use(
    taken: int, role: str, module: str | None, *, is_child: bool
) -> None:
    executor, begun = executors()
    name = "NixlKVConnector"
    ours = transfer(taken, kv_connector=name, kv_connector_module_path=module, kv_role=role)
    other = transfer(0, kv_connector="OffloadingConnector", kv_connector_module_path=None)
    with pytest.raises(ConfigError, match="Address already in use"):
        executor(engine(transfer=multi(other, ours) if is_child else ours))
    assert begun == []


@pytest.mark.parametrize(
    ("role", "is_prefill"), [("kv_producer", True), ("kv_both", True), ("kv_consumer", False)]
)
def test_no_weights_are_loaded_if_vllm_lacks_a_part(
    monkeypatch: pytest.MonkeyPatch, parts: list[Engine], role: str, *, is_prefill: bool
) -> None:
    def check(one: Engine) -> None:
        parts.append(one)
        raise ConfigError("vLLM lacks a part")

    monkeypatch.setattr(plugin.unpromised, "check", check)
    executor, begun = executors()
    of_all = engine(transfer=multi(transfer(0, kv_role=role)))
    with pytest.raises(ConfigError, match="lacks a part"):
        executor(of_all)
    assert begun == []
    assert parts == [Engine(of_all, Config.parse({"port": 0}, {}), is_prefill)]


def test_other_engines_and_other_nodes_are_left_alone(taken: int, parts: list[Engine]) -> None:
    executor, begun = executors()
    others = [
        engine(transfer=None),
        SimpleNamespace(kv_transfer_config=None),
        engine(transfer=transfer(taken, kv_connector_module_path=None)),
        engine(transfer=transfer(taken, kv_connector_module_path="nixl_kvs.connector")),
        engine(node=1, transfer=transfer(taken)),
        engine(transfer=transfer(0)),
    ]
    for each in others:
        executor(each, "more")
    assert begun == [(each, "more") for each in others]
    assert [each.vllm_config for each in parts] == others[-1:]


def test_vllms_executors_check() -> None:
    """Looking the connector up is enough, as vLLM does while it reads its configuration."""
    pytest.importorskip("vllm", reason="needs vLLM: scripts/install")
    from vllm.v1.executor.abstract import Executor  # noqa: PLC0415

    import nixl_kv.connector  # noqa: PLC0415

    assert nixl_kv.connector.NixlKVConnector.__name__ == "NixlKVConnector"
    assert getattr(Executor.__init__, "checks_address", False)
