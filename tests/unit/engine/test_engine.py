"""A rank's transfer engine: how it is put together, and its thread."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from harness.local.caches import Cache, Sizes
from harness.local.engine import HOST, MODEL
from harness.local.memory import Fabric, MemoryTransport
from harness.local.memory_control import MemoryNetwork
from nixl_kv import errors
from nixl_kv.config import Config
from nixl_kv.early.slots import NUM_SLOTS
from nixl_kv.engine import engine as engine_module
from nixl_kv.engine.engine import MAX_SLOTS, MIN_SLOTS, RankSpec, TransferEngine, slots_for
from nixl_kv.errors import IncompatiblePeer, LocalProtocolError, TransportError
from nixl_kv.geometry.layout import CacheLayout, Group, Table
from nixl_kv.ids import EngineId, Rank, RequestId, endpoint_at, new_fence_token
from nixl_kv.protocol.events import CancelLoad, LoadEnded, StartLoad
from nixl_kv.reading.paths import ExtraMemory, PathFeature, allocate
from nixl_kv.transport.base import SlotPage
from support.polling import wait_until
from support.records import description
from support.stepped import Background, StepControl

CACHE = Cache(Sizes())
Make = Callable[..., TransferEngine]


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


@pytest.fixture
def make(fabric: Fabric) -> Iterator[Make]:
    """Makes engines, which are stopped at the end."""
    with contextlib.ExitStack() as stack:

        def make_one(**changed: Any) -> TransferEngine:
            values: dict[str, Any] = {
                "engine": EngineId("engine"),
                "rank": Rank(0),
                "layout": CACHE.layout(),
                "model": MODEL,
                "config": Config(),
                "host": HOST,
                "is_prefill": True,
                "is_decode": True,
                "make_transport": lambda: MemoryTransport(fabric),
                "make_control": lambda: StepControl(MemoryNetwork(), "rank"),
                "make_background": lambda _count: Background(),
            }
            engine = TransferEngine(RankSpec(**{**values, **changed}))
            stack.callback(engine.stop)
            return engine

        yield make_one


@pytest.mark.parametrize(
    ("roles", "num_transports"), [("prefill and decode", 2), ("prefill", 1), ("decode", 1)]
)
def test_a_rank_has_the_agents_of_its_roles_and_describes_itself(
    fabric: Fabric, make: Make, roles: str, num_transports: int
) -> None:
    """A rank that only decodes listens too, for tools."""
    is_prefill, is_decode = "prefill" in roles, "decode" in roles
    engine = make(is_prefill=is_prefill, is_decode=is_decode)
    parts = engine.start_stepped().parts
    described = parts.description
    assert (engine.spec.roles, len(fabric.transports)) == (roles, num_transports)
    assert (parts.serving is not None, bool(parts.agents.polled)) == (is_prefill, is_decode)
    assert described.endpoint.startswith(endpoint_at(HOST, 1)[:-1])
    assert described.layout == CACHE.layout()
    num_slots = MIN_SLOTS + NUM_SLOTS * is_prefill
    assert (described.slots.address, described.slots.count) == (parts.slots.address, num_slots)
    assert described.agent == (parts.serving.metadata() if parts.serving is not None else b"")
    assert described.incarnation == parts.decode.reader.incarnation


def test_the_transfer_thread_uses_the_gpu_of_its_cache(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = Mock()
    monkeypatch.setattr("nixl_kv.gpu.make_current", used)
    layout = replace(CACHE.layout(), memory="VRAM", device=3)
    make(layout=layout, config=Config(verify=0.0, path="direct")).start_stepped()
    used.assert_called_once_with(3)
    make().start_stepped()
    used.assert_called_once()


@pytest.mark.parametrize(
    ("num_blocks", "per_entry", "expected"),
    [
        pytest.param(1, 1, MIN_SLOTS, id="few blocks"),
        pytest.param(4 * MIN_SLOTS, 2, 2 * MIN_SLOTS, id="two in an entry"),
        pytest.param(4 * MAX_SLOTS, 2, MAX_SLOTS, id="more than can be described"),
    ],
)
def test_there_are_as_many_slots_as_offers_can_be(
    num_blocks: int, per_entry: int, expected: int
) -> None:
    """Each has at least one entry of a block table for itself."""
    group = Group(16, num_blocks, per_entry, ())
    assert slots_for(CacheLayout((group,), "DRAM", 0, ())) == expected


def test_a_rank_that_serves_can_be_read_whole(fabric: Fabric, make: Make) -> None:
    ring = allocate(4096)
    feature = PathFeature(served=(ExtraMemory(ring.span, "DRAM", 0),))
    loop = make(is_decode=False, features=(lambda _setup: feature,)).start_stepped()
    (serving,) = fabric.transports.values()
    assert serving._spans == [*CACHE.layout().spans, loop.parts.slots.span, ring.span]


def test_the_configuration_reaches_the_machines(make: Make) -> None:
    config = Config(offer_ttl_s=3.0, lease_s=4.0, request_timeout_s=7.0)
    parts = make(config=config).start_stepped().parts
    assert (parts.prefill._lease_s, parts.prefill._offer_ttl_s) == (4.0, 3.0)
    assert (parts.decode._timeout_s, parts.decode._heartbeat_interval_s) == (7.0, 4.0 / 5)


def test_the_requirements_of_a_rank_reach_the_check_of_its_peers(make: Make) -> None:
    config = Config.parse({"peers": ["10.0.0.0/8"]}, {})
    loop = make(extras={"draft": "one"}, config=config).start_stepped()
    with pytest.raises(IncompatiblePeer, match="draft is 'one' here and None there"):
        loop.parts.agents.peers.check(description())


# --- commands and results


def test_commands_may_be_submitted_before_the_start(make: Make) -> None:
    """They are carried out in the first turn."""
    engine = make()
    assert engine.pop_results() == []
    engine.submit([StartLoad(RequestId("d1"), 0, 4, (Table.of([]),))])
    loop = engine.start_stepped()
    assert engine.pop_results() == []
    loop.turn()
    (ended,) = engine.pop_results()
    assert isinstance(ended, LoadEnded)
    assert ended.request == "d1"
    assert engine.pop_results() == []


@pytest.mark.parametrize("num_commands", [0, 2])
def test_a_waiting_thread_is_woken_for_commands_only(make: Make, num_commands: int) -> None:
    engine = make()
    loop = engine.start_stepped()
    engine.submit([CancelLoad(RequestId("d1"))] * num_commands)
    assert isinstance(loop.parts.control, StepControl)
    assert loop.parts.control._is_woken is bool(num_commands)


@pytest.mark.parametrize("is_started", [False, True], ids=["not started", "stepped"])
def test_an_engine_that_is_stopped_takes_no_commands(
    fabric: Fabric, make: Make, *, is_started: bool
) -> None:
    engine = make()
    if is_started:
        engine.start_stepped()
    engine.stop()
    assert fabric.transports == {}
    with pytest.raises(LocalProtocolError, match="the transfer engine is stopped"):
        engine.submit([])


def test_a_start_that_fails_says_why(make: Make) -> None:
    refuse = Mock(side_effect=TransportError("no such backend"))
    with pytest.raises(TransportError, match="no such backend"):
        make(make_transport=refuse).start()


# The transfer thread: it starts, is stopped, and survives every error

TIMEOUT_S = 30.0


class FakeLoop:
    """Waits in each turn until it is woken; `steps` has all that was done."""

    def __init__(self) -> None:
        self.parts = SimpleNamespace(slots=SlotPage(4), features=(), description=None)
        self.steps: list[str] = []
        self.errors: list[BaseException] = []
        self.threads: set[threading.Thread] = set()
        self.woken = threading.Event()

    def turn(self) -> None:
        self._step("turn")
        self.woken.wait(TIMEOUT_S)
        self.woken.clear()

    def restart(self) -> None:
        self._step("restart")

    def wake(self) -> None:
        self.woken.set()

    def close(self) -> None:
        self.steps.append("close")

    def _step(self, name: str) -> None:
        self.threads.add(threading.current_thread())
        self.steps.append(name)
        if self.errors:
            raise self.errors.pop(0)

    def wait_for(self, *steps: str) -> None:
        wait_until(lambda: self.steps == [*steps])

    def start(self, *steps: str) -> TransferEngine:
        """An engine with this loop, when these steps have been made."""
        unused: Any = None
        engine = TransferEngine(unused)
        engine._build_loop = lambda: self  # type: ignore[method-assign, assignment, return-value]
        engine.start()
        self.wait_for(*steps)
        return engine

    def has_ended(self) -> bool:
        (worker,) = self.threads
        worker.join(TIMEOUT_S)
        return not worker.is_alive()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> FakeLoop:
    monkeypatch.setattr(errors, "ERROR_PAUSE_S", 0.0)
    return FakeLoop()


def test_turns_are_made_on_one_thread_of_its_own_until_it_is_stopped(loop: FakeLoop) -> None:
    engine = loop.start("turn")
    loop.wake()
    loop.wait_for("turn", "turn")
    engine.stop()
    assert loop.steps == ["turn", "turn", "close"]
    (worker,) = loop.threads
    assert (worker.name, worker.daemon) == ("nixl-kv-transfer", True)
    assert loop.has_ended()


@pytest.mark.parametrize("count", [1, 3], ids=["in a turn", "and in its restarts"])
def test_an_error_leads_to_a_restart_and_further_turns(
    loop: FakeLoop, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    loop.errors = [KeyError("a bug")] * count
    loop.start("turn", *["restart"] * count, "turn").stop()
    assert "the transfer thread failed" in caplog.records[0].getMessage()
    assert caplog.records[0].exc_info is not None


def test_a_thread_that_ends_late_closes_its_own_loop(
    loop: FakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it runs, no other thread may close it. But no reader may take its blocks for held."""
    monkeypatch.setattr(engine_module, "STOP_TIMEOUT_S", 0.01)
    slots = loop.parts.slots
    slots.write(2, new_fence_token())
    monkeypatch.setattr(loop, "wake", lambda: None)
    thread = loop.start("turn")
    for _ in range(2):
        with pytest.raises(TransportError, match=r"within 0\.01 s: the thread has not ended"):
            thread.stop()
    assert loop.steps == ["turn"]
    assert slots.read(2) == bytes(16)
    loop.woken.set()
    assert loop.has_ended()
    assert loop.steps == ["turn", "close"]
    thread.stop()
    assert loop.steps == ["turn", "close"]


def test_a_loop_is_closed_until_nothing_writes_any_longer(
    loop: FakeLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Our own errors are logged once; `stop` says which ends are not proven yet."""
    monkeypatch.setattr(engine_module, "CLOSING_PAUSES_S", (0.001, 0.001))
    is_gone = threading.Event()

    def try_to_close() -> None:
        loop.steps.append("close")
        if not is_gone.is_set():
            raise TransportError("an agent is not gone") if len(loop.steps) > 9 else KeyError("bug")

    monkeypatch.setattr(loop, "close", try_to_close)
    thread = loop.start("turn")
    with pytest.raises(TransportError):
        thread.stop(0.0)
    wait_until(lambda: len(loop.steps) > 12)
    with pytest.raises(TransportError, match="an agent is not gone"):
        thread.stop(0.0)
    (record,) = caplog.records
    assert record.exc_info is not None
    is_gone.set()
    thread.stop(TIMEOUT_S)
    assert loop.has_ended()


def test_a_closed_loop_is_not_woken(loop: FakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wake-up descriptor may be another file by then."""
    wake, steps_at_wake = loop.wake, list[list[str]]()

    def wake_slowly() -> None:
        wake()
        loop.threads.pop().join(0.2)  # it has every chance to close too early
        steps_at_wake.append(list(loop.steps))

    monkeypatch.setattr(loop, "wake", wake_slowly)
    thread = loop.start("turn")
    thread.stop()
    thread.stop()
    assert steps_at_wake == [["turn"]]
    assert loop.steps == ["turn", "close"]


@pytest.mark.parametrize("error", [None, OSError("it may not")], ids=repr)
def test_it_leaves_the_core_that_its_caller_is_bound_to_if_it_may(
    loop: FakeLoop, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    """Threads inherit the caller's cores; it takes those of the process above."""
    set_cores = Mock(side_effect=error)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {process, 1})
    monkeypatch.setattr(os, "sched_setaffinity", set_cores)
    loop.start("turn").stop()
    set_cores.assert_called_once_with(0, {os.getppid(), 1})
