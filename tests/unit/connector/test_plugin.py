"""Runs in every process of every start: the connector's name, and the checks of the start."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nixl_kv.config import HOST_VARIABLE, PORT_VARIABLE, Config
from nixl_kv.connector import plugin
from nixl_kv.connector.plugin import Where, check_address, check_before_weights
from nixl_kv.connector.unpromised import MEDIA, Engine
from nixl_kv.errors import ConfigError
from nixl_kv.transport.ports import LimitedPort

# --- the name

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The registry of a factory like vLLM's, whether vLLM is installed or not."""
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


CHECKS = plugin.CHECKS


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "PORT_WAIT_S", 0.0)
    # The configurations here are not vLLM's; tests/unit/connector/test_vllm_config.py has this one.
    checks = [one for one in CHECKS if one[1] is not plugin.check_settings]
    monkeypatch.setattr(plugin, "CHECKS", checks)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port where another engine listens."""
    port = LimitedPort(HOST, 0)
    yield port.port
    port.close()


def engine(index: int = 0, node: int = 0, transfer: Any = None) -> Any:
    """The part of vLLM's configuration that the plugin uses."""
    parallel = SimpleNamespace(
        data_parallel_index=index,
        node_rank_within_dp=node,
        data_parallel_size_local=1,
        data_parallel_backend="mp",
        distributed_executor_backend=None,
    )
    model = SimpleNamespace(served_model_name="tiny")
    return SimpleNamespace(
        parallel_config=parallel, kv_transfer_config=transfer, model_config=model
    )


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
    monkeypatch.setattr(plugin.unpromised, "is_off", lambda _: False)
    return checked


def executors() -> tuple[Any, list[tuple[Any, ...]]]:
    """A class like vLLM's, which notes its arguments: then it loads the weights."""
    begun: list[tuple[Any, ...]] = []

    class Executor:
        def __init__(self, vllm_config: Any, *args: Any) -> None:
            begun.append((vllm_config, *args))

    for _ in range(3):
        check_before_weights(Executor)
    return Executor, begun


def transfer(port: int, **given: Any) -> Any:
    values = {"kv_connector": "NixlConnector", "kv_connector_module_path": "nixl_kv.connector"}
    extra = {
        "kv_connector_extra_config": {"port": port},
        "kv_role": "kv_both",
        "engine_id": "own",
    }
    return SimpleNamespace(**{**values, **extra, **given})


def multi(*children: Any, **given: Any) -> Any:
    return SimpleNamespace(
        kv_connector="MultiConnector",
        kv_connector_extra_config={"connectors": list(map(vars, children))},
        kv_role="kv_both",
        engine_id="outer",
        **given,
    )


def nested(child: Any, depth: int) -> Any:
    """A connector in as many MultiConnectors, each with another child."""
    for _ in range(depth):
        other = transfer(0, kv_connector="OffloadingConnector", kv_connector_module_path=None)
        child = multi(other, child)
    return child


each_depth = pytest.mark.parametrize("depth", [0, 1, 2, 3])


@each_depth
@pytest.mark.parametrize("module", ["nixl_kv.connector", None], ids=["by module", "by name"])
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_no_weights_are_loaded_if_the_port_is_in_use(
    taken: int, role: str, module: str | None, depth: int
) -> None:
    executor, begun = executors()
    name = "NixlKVConnector"
    ours = transfer(taken, kv_connector=name, kv_connector_module_path=module, kv_role=role)
    with pytest.raises(ConfigError, match="Address already in use"):
        executor(engine(transfer=nested(ours, depth)))
    assert begun == []


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engines whose scheduler gets hooks. The real ones need vLLM's scheduler."""
    engines: list[Any] = []
    module = SimpleNamespace(hook_scheduler=engines.append, serve_address=lambda: None)
    monkeypatch.setitem(sys.modules, "nixl_kv.connector.scheduler_hooks", module)
    return engines


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
    with pytest.raises(ConfigError, match="lacks a part"):
        executor(engine(transfer=multi(transfer(0, kv_role=role))))
    assert begun == []
    (part,) = parts
    assert (part.config, part.is_prefill) == (Config.parse({"port": 0}, {}), is_prefill)


@pytest.mark.parametrize("is_off", [False, True])
def test_a_scheduler_gets_hooks_if_vllm_has_all_that_they_need(
    monkeypatch: pytest.MonkeyPatch, hooked: list[Any], *, is_off: bool
) -> None:
    """An engine that needs them has not come as far as this without."""
    monkeypatch.setattr(plugin.unpromised, "is_off", lambda each: is_off and each is MEDIA)
    executor, begun = executors()
    executor(engine(transfer=transfer(0)))
    assert (len(begun), len(hooked)) == (1, not is_off)


def test_other_engines_and_other_nodes_are_left_alone(
    taken: int, parts: list[Engine], hooked: list[Any]
) -> None:
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
    assert hooked == others[-2:], "those of ours"
    assert [each.vllm_config for each in parts] == others[-1:]


@pytest.mark.parametrize("where", ["alone", "own id of a child", "outer id of a child"])
def test_no_weights_are_loaded_if_no_ticket_could_carry_the_id(where: str) -> None:
    """test_wire_values.py has other ids."""
    executor, begun = executors()
    whole = transfer(0, engine_id="prefill\n")
    if where == "outer id of a child":
        del whole.engine_id
    if where != "alone":
        whole = multi(whole)
        whole.engine_id = "prefill\n" if where == "outer id of a child" else "good"
    with pytest.raises(ConfigError, match=r"^engine_id of --kv-transfer-config is "):
        executor(engine(transfer=whole))
    assert begun == []


@each_depth
@pytest.mark.parametrize(
    ("number", "needs"),
    [
        pytest.param(number, needs, id=check.__name__)
        for number, (needs, check) in enumerate(CHECKS)
    ],
)
@pytest.mark.parametrize("process", ["engine", "other node", "API server", "API server with Ray"])
def test_each_check_runs_before_the_weights_in_every_process_that_can(
    monkeypatch: pytest.MonkeyPatch, depth: int, number: int, needs: Where, process: str
) -> None:
    """It sees the configuration that the connector will see, in MultiConnectors of any depth."""
    seen: list[Any] = []

    def refuse(config: Config, vllm_config: Any) -> None:
        seen.append((config, vllm_config.kv_transfer_config))
        raise ConfigError("no")

    checks: list[Any] = [(Where.CONFIG, lambda *_: None)] * len(CHECKS)
    checks[number] = needs, refuse
    monkeypatch.setattr(plugin, "CHECKS", checks)
    ours = transfer(7, kv_role="kv_consumer")
    ours.kv_connector_extra_config["weights"] = "step 8"
    if depth:
        del ours.engine_id  # as vLLM, take that of the whole engine
    config = engine(node=int(process == "other node"), transfer=nested(ours, depth))
    if process == "API server with Ray":
        config.parallel_config.distributed_executor_backend = "ray"
    begin = arguments(config)[0] if "API" in process else executors()[0]
    has = {"engine": Where.ENGINE, "API server with Ray": Where.CONFIG}
    is_run = needs <= has.get(process, Where.MACHINE)
    refused = pytest.raises(ConfigError, match=r"^no$")
    with refused if is_run else contextlib.nullcontext():
        if "API" in process:
            begin().create_engine_config()
        else:
            begin(config)
    assert len(seen) == is_run
    for parsed, own in seen:
        assert (parsed.weights, parsed.port) == ("step 8", 7)
        assert (own.kv_role, own.engine_id) == ("kv_consumer", "outer" if depth else "own")


# --- vLLM's arguments, in the process that begins a start


def arguments(vllm_config: Any) -> tuple[Any, list[Any]]:
    """A class like vLLM's, which makes this configuration."""
    made: list[Any] = []

    class EngineArgs:
        def create_engine_config(self, *args: Any, **options: Any) -> Any:
            made.append((args, options))
            return vllm_config

    for _ in range(3):
        plugin.check_with_arguments(EngineArgs)
    return EngineArgs, made


@pytest.fixture(autouse=True)
def causes(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Functions that this process would call when it exits."""
    monkeypatch.setenv(plugin.CAUSE_FILE, "")
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(plugin.atexit, "register", at_exit.append)
    return at_exit


@pytest.mark.parametrize(
    ("name", "value", "is_here"),
    [
        ("distributed_executor_backend", None, True),
        ("distributed_executor_backend", "uni", True),
        ("distributed_executor_backend", "mp", True),
        ("distributed_executor_backend", "ray", False),
        ("distributed_executor_backend", type("Theirs", (), {}), False),
        ("data_parallel_backend", "ray", False),
        ("data_parallel_size_local", 0, False),
    ],
)
def test_an_address_and_a_key_file_of_another_machine_are_not_looked_for(
    name: str, value: object, *, is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API server, or Ray's driver, may run where no engine runs."""
    monkeypatch.setenv(HOST_VARIABLE, "no-such-interface")
    ours = transfer(0)
    ours.kv_connector_extra_config |= {"host": "no-such-interface", "key_file": "/no/such/file"}
    config = engine(transfer=ours)
    setattr(config.parallel_config, name, value)
    begin, _ = arguments(config)
    refused = pytest.raises(ConfigError, match="no-such-interface")
    with refused if is_here else contextlib.nullcontext():
        begin().create_engine_config()


def test_other_engines_begin_as_before(causes: list[Callable[[], None]]) -> None:
    other = transfer(0, kv_connector_module_path=None)
    for config in (engine(transfer=None), engine(transfer=other), engine(transfer=multi(other))):
        begin, made = arguments(config)
        assert begin().create_engine_config(1) is config
        assert made == [((1,), {})]
    assert causes == []


# --- the cause of a failed start is printed last

START = """
import multiprocessing, sys
from types import SimpleNamespace
from nixl_kv.connector import plugin
from nixl_kv.errors import ConfigError

def engine(number):
    with plugin.causes_noted():
        raise ConfigError(f"port {number} is in use\\nreally")

if __name__ == "__main__":
    plugin.print_cause_at_exit()
    context = multiprocessing.get_context(sys.argv[1])
    for number in range(int(sys.argv[2])):
        child = context.Process(target=engine, args=[number])
        child.start()
        child.join()
    raise RuntimeError("Engine core initialization failed. See root cause above.")
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("failures", [0, 1, 2])
def test_the_cause_of_a_failed_start_is_the_last_line(
    tmp_path: Path, method: str, failures: int
) -> None:
    """vLLM starts engines by either method; the first of several causes counts."""
    (tmp_path / "start.py").write_text(START)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "start.py"), method, str(failures)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path), plugin.CAUSE_FILE: ""},
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    if failures:
        assert last == r"nixl_kv: port 0 is in use\nreally"
        assert done.stderr.count("nixl_kv: port") == 1
    else:
        assert last.startswith("RuntimeError: Engine core initialization failed")
    assert [each.name for each in tmp_path.iterdir()] == ["start.py"]


def test_a_cause_that_cannot_be_left_is_raised_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("an earlier cause")
    too_long = str(tmp_path / ("x" * 300))
    for path in ("", str(tmp_path / "no" / "folder"), str(tmp_path / "taken"), too_long):
        monkeypatch.setenv(plugin.CAUSE_FILE, path)
        with pytest.raises(ConfigError, match="mine"), plugin.causes_noted():
            raise ConfigError("mine")
    monkeypatch.setenv(plugin.CAUSE_FILE, str(tmp_path / "half"))
    with pytest.raises(ConfigError, match="half"), plugin.causes_noted():
        raise ConfigError("half of a character: \ud800")
    assert (tmp_path / "half").read_text() == r"half of a character: \ud800"
    assert (tmp_path / "taken").read_text() == "an earlier cause"


def test_vllms_classes_check() -> None:
    """Looking the connector up is enough, as vLLM does while it reads its configuration."""
    pytest.importorskip("vllm", reason="needs vLLM: scripts/install")
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
    from vllm.v1.executor.abstract import Executor  # noqa: PLC0415

    import nixl_kv.connector  # noqa: PLC0415

    assert nixl_kv.connector.NixlKVConnector.__name__ == "NixlKVConnector"
    assert getattr(Executor.__init__, "checks_start", False)
    assert getattr(EngineArgs.create_engine_config, "checks_start", False)
