"""A pytest plugin: vLLM's own unit tests of connectors, with this connector instead of vLLM's.

    cd VLLM_SOURCE
    PYTHONPATH=REPO:REPO/scripts:REPO/tests python -m pytest -p support.vllm_suite \
        --confcutdir=tests/v1/kv_connector/unit tests/v1/kv_connector/unit/test_...

VLLM_SOURCE is an unpacked source distribution of vLLM, of the version that is installed; a copy of
its `tests` folder is enough, and better: `vllm` must be the installed one. The tests stay as they
are. What their helpers make is replaced:

- the default connector is ours, for both roles, and takes `on_load_failure` from vLLM's own policy;
  a NixlConnector in a MultiConnector is ours too;
- the engine is described, as by the handshake of its worker;
- a request for decode brings a ticket that is valid for its prompt;
- where a test of engines counts the bytes that vLLM's connector has read, it counts ours;
- the model is a folder with the configuration of `facebook/opt-125m`: no hub is asked.
"""

import functools
import importlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from transformers import OPTConfig

from nixl_kv.connector.connector import NixlKVConnector
from nixl_kv.connector.worker import HandshakeMetadata
from nixl_kv.ids import EngineId, new_incarnation, new_nonce
from nixl_kv.keys import make_user_key
from nixl_kv.protocol.messages import encode
from support.records import rank_description, ticket_for

UTILS: Final = "tests.v1.kv_connector.unit.utils"
HUB_MODEL: Final = "facebook/opt-125m"
NAME: Final = "NixlConnector"
OURS: Final = {"kv_connector_module_path": "nixl_kv.connector", "kv_role": "kv_both"}
FREE_PORT: Final = {"port": 0}
BYTES_EXPRESSION: Final = "_NIXL_BYTES_RE"
BYTES_READ: Final = re.compile(r"^vllm:nixl_kv_read_bytes_total\{.*\} (.+)$", re.MULTILINE)

Make = Callable[..., Any]


class Adapter:
    """Stands between the tests and their helpers."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._connectors: list[Any] = []

    def config(self, make: Make, *args: Any, **kwargs: Any) -> Any:
        """`create_vllm_config`: another default of the connector, and of the model."""
        if kwargs.setdefault("kv_connector", NAME) == NAME:
            kwargs |= OURS
        children = (kwargs.get("kv_connector_extra_config") or {}).get("connectors", [])
        for child in children:
            if child["kv_connector"] == NAME:
                child.update(OURS, kv_connector_extra_config=dict(FREE_PORT))
        if not args and kwargs.get("model", HUB_MODEL) == HUB_MODEL:
            kwargs["model"] = self._model
        return make(*args, **kwargs)

    def scheduler(self, make: Make, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """`create_scheduler`: with an engine that is described, at a port of its own."""
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_connector == NAME:
            policy = transfer.kv_load_failure_policy
            transfer.kv_connector_extra_config |= {**FREE_PORT, "on_load_failure": policy}
        scheduler = make(vllm_config, *args, **kwargs)
        connector = scheduler.connector
        children = getattr(connector, "sub_connectors", ())  # of a MultiConnector
        if any(isinstance(one, NixlKVConnector) for one in (connector, *children)):
            self._connectors.append(connector)
            described = rank_description(incarnation=new_incarnation())
            connector.set_xfer_handshake_metadata_pp_aware(
                {(0, 0): HandshakeMetadata(encode(described))}
            )
        return scheduler

    def request(self, make: Make, *args: Any, **kwargs: Any) -> Any:
        """`create_request`: with a ticket for its prompt, where there is one of vLLM's."""
        request = make(*args, **kwargs)
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            ticket = ticket_for(
                request.prompt_token_ids,
                new_nonce(),
                engine=EngineId(params["remote_engine_id"]),
                port=params["remote_port"],
            )
            sealed = ticket.params(make_user_key()[0].tickets, for_in_tree=False)
            request.kv_transfer_params = sealed
        return request

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        """No test leaves a socket behind."""
        yield
        while self._connectors:
            self._connectors.pop().shutdown()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Replace the helpers, before a test module takes them over by name."""
    folder = tempfile.TemporaryDirectory(prefix="opt-")
    config.add_cleanup(folder.cleanup)
    OPTConfig(architectures=["OPTForCausalLM"]).save_pretrained(folder.name)
    adapter = Adapter(folder.name)
    config.pluginmanager.register(adapter)
    sys.path.insert(0, str(config.rootpath))
    utils = importlib.import_module(UTILS)
    for name, replace in (
        ("create_vllm_config", adapter.config),
        ("create_scheduler", adapter.scheduler),
        ("create_request", adapter.request),
    ):
        setattr(utils, name, functools.partial(replace, getattr(utils, name)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The edge cases of a MultiConnector look for a metric by this expression."""
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        if hasattr(module, BYTES_EXPRESSION):
            setattr(module, BYTES_EXPRESSION, BYTES_READ)
