"""The plugin, which vLLM runs in every process of every start."""

import logging
import sys
from types import ModuleType

import pytest

from nixl_kv.connector import plugin

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


class Factory:
    """vLLM's, as far as it is used."""

    def __init__(self, known: dict[str, object]) -> None:
        self._registry = known

    def register_connector(self, name: str, module: str, class_name: str) -> None:
        assert name not in self._registry, "vLLM ends the start for a name that is known"
        self._registry[name] = (module, class_name)


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Factory:
    """In place of vLLM's, whether that is installed or not."""
    names = FACTORY.split(".")
    for length in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:length]), ModuleType(names[length - 1]))
    factory = Factory({})
    monkeypatch.setattr(sys.modules[FACTORY], "KVConnectorFactory", factory, raising=False)
    return factory


def test_the_connector_is_known_by_its_name(factory: Factory) -> None:
    for _ in range(2):
        plugin.register()
    assert factory._registry == {"NixlKVConnector": ("nixl_kv.connector", "NixlKVConnector")}


def test_a_connector_that_is_known_stays(factory: Factory) -> None:
    factory._registry["NixlKVConnector"] = "another"
    plugin.register()
    assert factory._registry["NixlKVConnector"] == "another"


class OtherRules(Factory):
    """A factory that does not take every connector."""

    def register_connector(self, name: str, module: str, class_name: str) -> None:
        raise ValueError(f"{module}.{class_name} may not be registered as {name}")


def module_with(factory: Factory) -> ModuleType:
    module = ModuleType("factory")
    setattr(module, "KVConnectorFactory", factory)  # noqa: B010 - mypy knows no such name
    return module


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(None, id="no module"),
        pytest.param(module_with(OtherRules({})), id="other rules"),
    ],
)
@pytest.mark.usefixtures("factory")
def test_another_vllm_costs_a_line_in_the_log_and_nothing_else(
    module: ModuleType | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, FACTORY, module)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert caplog.messages == ["vLLM's factory did not accept the name NixlKVConnector"]
