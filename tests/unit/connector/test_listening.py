"""The address of an engine's description is checked before vLLM loads the weights."""

import logging
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_kv.config import HOST_VARIABLE, PORT_VARIABLE, Config
from nixl_kv.connector import plugin
from nixl_kv.connector.plugin import check_address, check_before_weights
from nixl_kv.errors import ConfigError
from nixl_kv.transport.ports import LimitedPort

HOST = "127.0.0.1"


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
    """As much of vLLM's configuration as is looked at."""
    parallel = SimpleNamespace(data_parallel_index=index, node_rank_within_dp=node)
    return SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer)


@pytest.mark.parametrize("is_prefill", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("source", ["extra", "environment"])
def test_a_port_that_was_configured_and_is_in_use_is_refused_in_any_role(
    taken: int, source: str, *, is_prefill: bool
) -> None:
    in_extra = {"port": taken} if source == "extra" else {}
    environ = {} if in_extra else {PORT_VARIABLE: f"{taken}"}
    name = "kv_connector_extra_config['port']" if source == "extra" else PORT_VARIABLE
    with pytest.raises(ConfigError) as refusal:
        check_address(Config.parse(in_extra, environ), engine(), is_prefill=is_prefill)
    assert str(refusal.value) == (
        f"{name} is {taken}; port {taken} of {HOST} cannot be used: Address already in use; "
        "allowed: a free port; set VLLM_NIXL_SIDE_CHANNEL_PORT (or 'port') to another port for "
        "each engine on this machine"
    )


def by_default(port: int) -> Config:
    """As if that were the default port."""
    return replace(Config.parse({"port": port}, {}), port_name="")


def test_the_default_port_is_refused_where_tickets_name_it(taken: int) -> None:
    with pytest.raises(ConfigError, match=rf"^port is {taken} \(the default\); port {taken} of"):
        check_address(by_default(taken), engine(), is_prefill=True)
    check_address(by_default(taken), engine(), is_prefill=False)


def test_each_data_parallel_rank_checks_its_own_port(taken: int) -> None:
    config = Config.parse({"port": taken - 1}, {})
    words = f"is {taken - 1}; data-parallel rank 1 listens on {taken};"
    with pytest.raises(ConfigError, match=words):
        check_address(config, engine(1), is_prefill=True)


@pytest.mark.parametrize("port", [0, 5600])
@pytest.mark.parametrize("source", ["extra", "environment"])
def test_a_host_that_is_not_this_machines_is_refused(port: int, source: str) -> None:
    """192.0.2.0/24 is for documentation."""
    extra: dict[str, Any] = {"port": port, "insecure": True}
    environ = {HOST_VARIABLE: "192.0.2.1"} if source == "environment" else {}
    if source == "extra":
        extra["host"] = "192.0.2.1"
    name = HOST_VARIABLE if environ else "kv_connector_extra_config['host']"
    config = Config.parse(extra, environ)
    for is_prefill in (False, True):
        with pytest.raises(ConfigError) as refusal:
            check_address(config, engine(), is_prefill=is_prefill)
        assert str(refusal.value).startswith(
            f"{name} is '192.0.2.1', which is not an address of this machine; allowed: 'auto', or"
        )


def test_a_check_leaves_the_port_free_and_meets_no_other_one(taken: int) -> None:
    """Engines that start at the same time check at the same time; the first to listen wins."""
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    config = Config.parse({"port": port}, {})
    errors: list[Exception] = []

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
    assert port != taken


def test_the_port_of_an_engine_that_is_ending_is_waited_for(
    taken: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = LimitedPort(HOST, 0)
    config = Config.parse({"port": other.port}, {})
    monkeypatch.setattr(plugin, "PORT_WAIT_S", 60.0)
    monkeypatch.setattr(plugin.time, "sleep", lambda _: other.close())
    with caplog.at_level(logging.WARNING):
        check_address(config, engine(), is_prefill=True)
    assert caplog.messages == [f"port {other.port} is in use; waiting for up to 60 s"]
    assert taken


# The class of vLLM's executors


def executors() -> tuple[Any, list[tuple[Any, ...]]]:
    """A class like vLLM's, which notes what it is made with: then it loads the weights."""
    begun: list[tuple[Any, ...]] = []

    class Executor:
        def __init__(self, vllm_config: Any, *args: Any) -> None:
            begun.append((vllm_config, *args))

    for _ in range(3):
        check_before_weights(Executor)
    return Executor, begun


def transfer(**given: Any) -> Any:
    values = {"kv_connector": "NixlConnector", "kv_connector_module_path": "nixl_kv.connector"}
    extra = {"kv_connector_extra_config": {}, "kv_role": "kv_both"}
    return SimpleNamespace(**{**values, **extra, **given})


def with_port(port: int, **given: Any) -> Any:
    return transfer(kv_connector_extra_config={"port": port}, **given)


def multi(*children: Any) -> Any:
    connectors = {"connectors": list(map(vars, children))}
    return transfer(
        kv_connector="MultiConnector",
        kv_connector_module_path=None,
        kv_connector_extra_config=connectors,
    )


@pytest.mark.parametrize("is_child", [False, True], ids=["alone", "of a MultiConnector"])
@pytest.mark.parametrize("module", ["nixl_kv.connector", None], ids=["by module", "by name"])
@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
def test_no_weights_are_loaded_if_the_port_is_in_use(
    taken: int, role: str, module: str | None, *, is_child: bool
) -> None:
    executor, begun = executors()
    ours = with_port(
        taken, kv_connector="NixlKVConnector", kv_connector_module_path=module, kv_role=role
    )
    other = transfer(kv_connector="OffloadingConnector", kv_connector_module_path=None)
    with pytest.raises(ConfigError, match="Address already in use"):
        executor(engine(transfer=multi(other, ours) if is_child else ours))
    assert begun == []


def test_other_engines_and_other_nodes_are_left_alone(taken: int) -> None:
    """The plugin is in every process of every start."""
    executor, begun = executors()
    others = [
        engine(transfer=None),
        SimpleNamespace(kv_transfer_config=None),
        engine(transfer=with_port(taken, kv_connector_module_path=None)),
        engine(transfer=with_port(taken, kv_connector_module_path="nixl_kvs.connector")),
        engine(node=1, transfer=with_port(taken)),
        engine(transfer=with_port(0)),
    ]
    for each in others:
        executor(each, "more")
    assert begun == [(each, "more") for each in others]


def test_vllms_executors_check() -> None:
    """Looking the connector up is enough, as vLLM does while it reads its configuration."""
    pytest.importorskip("vllm", reason="needs vLLM: scripts/install")
    from vllm.v1.executor.abstract import Executor  # noqa: PLC0415

    import nixl_kv.connector  # noqa: PLC0415

    assert nixl_kv.connector.NixlKVConnector.__name__ == "NixlKVConnector"
    assert getattr(Executor.__init__, "checks_address", False)
