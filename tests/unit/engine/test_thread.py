"""The transfer thread's life: it starts, is stopped, and survives every error."""

import logging
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_kv import errors
from nixl_kv.engine import engine as engine_module
from nixl_kv.engine.engine import TransferEngine
from nixl_kv.errors import TransportError
from nixl_kv.ids import new_fence_token
from nixl_kv.transport.base import SlotPage
from support.polling import wait_until

TIMEOUT_S = 30.0


class FakeLoop:
    """Waits in each turn until it is woken; `steps` has all that was done."""

    def __init__(self) -> None:
        self.parts = SimpleNamespace(slots=SlotPage(4), description=None)
        self.steps: list[str] = []
        self.errors: list[BaseException] = []
        self.threads: set[threading.Thread] = set()
        self.woken = threading.Event()
        self.changed = threading.Condition()

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
        with self.changed:
            self.threads.add(threading.current_thread())
            self.steps.append(name)
            self.changed.notify_all()
        if self.errors:
            raise self.errors.pop(0)

    def wait_for(self, steps: list[str]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.steps == steps, TIMEOUT_S), self.steps


@pytest.fixture(autouse=True)
def _without_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "PAUSE_S", 0.0)


class Built(TransferEngine):
    """Has a loop that a test makes."""

    def __init__(self, build: Callable[[], Any]) -> None:
        unused: Any = None
        super().__init__(unused)
        self._build = build

    def _build_loop(self) -> Any:
        return self._build()


def thread_of(loop: FakeLoop) -> TransferEngine:
    return Built(lambda: loop)


def test_turns_are_made_on_one_thread_of_its_own_until_it_is_stopped() -> None:
    loop = FakeLoop()
    thread = thread_of(loop)
    thread.start()
    assert [thread.loop] == [loop]
    loop.wait_for(["turn"])
    loop.wake()
    loop.wait_for(["turn", "turn"])
    thread.stop()
    assert loop.steps == ["turn", "turn", "close"]
    (worker,) = loop.threads
    assert worker.name == "nixl-kv-transfer"
    assert worker.daemon
    assert not worker.is_alive()


def test_what_the_build_raises_is_raised_by_the_start() -> None:
    def build() -> Any:
        raise TransportError("no NIXL here")

    thread = Built(build)
    with pytest.raises(TransportError, match="no NIXL here"):
        thread.start()
    thread.stop()


def test_a_thread_that_was_not_started_can_be_stopped() -> None:
    loop = FakeLoop()
    thread_of(loop).stop()
    assert loop.steps == []


def test_an_error_leads_to_a_restart_and_further_turns(caplog: pytest.LogCaptureFixture) -> None:
    loop = FakeLoop()
    loop.errors = [KeyError("a bug")]
    thread = thread_of(loop)
    with caplog.at_level(logging.CRITICAL):
        thread.start()
        loop.wait_for(["turn", "restart", "turn"])
    (record,) = caplog.records
    assert "the transfer thread failed" in record.getMessage()
    assert record.exc_info is not None
    thread.stop()


def test_an_error_in_a_restart_leads_to_another_restart() -> None:
    loop = FakeLoop()
    loop.errors = [KeyError("a bug"), KeyError("another"), KeyError("a third")]
    thread = thread_of(loop)
    thread.start()
    loop.wait_for(["turn", "restart", "restart", "restart", "turn"])
    thread.stop()


def test_a_thread_that_ends_late_closes_its_own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it runs, nobody else may close it. But no reader may take its blocks for held."""
    monkeypatch.setattr(engine_module, "STOP_TIMEOUT_S", 0.01)
    loop = FakeLoop()
    slots = loop.parts.slots
    slots.write(2, new_fence_token())
    monkeypatch.setattr(loop, "wake", lambda: None)
    thread = thread_of(loop)
    thread.start()
    loop.wait_for(["turn"])
    for _ in range(2):
        with pytest.raises(TransportError, match=r"within 0\.01 s: the thread has not ended"):
            thread.stop()
    assert loop.steps == ["turn"]
    assert slots.read(2) == bytes(16)
    loop.woken.set()
    (worker,) = loop.threads
    worker.join(TIMEOUT_S)
    assert not worker.is_alive()
    assert loop.steps == ["turn", "close"]
    thread.stop()
    assert loop.steps == ["turn", "close"]


def test_a_loop_is_closed_until_nothing_writes_any_longer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors of ours are logged once; what cannot be proven yet is told by `stop`."""
    monkeypatch.setattr(engine_module, "CLOSING_PAUSES_S", (0.001, 0.001))
    loop = FakeLoop()
    is_gone = threading.Event()
    close = loop.close

    def try_to_close() -> None:
        close()
        if not is_gone.is_set():
            raise TransportError("an agent is not gone") if len(loop.steps) > 9 else KeyError("bug")

    monkeypatch.setattr(loop, "close", try_to_close)
    thread = thread_of(loop)
    thread.start()
    loop.wait_for(["turn"])
    with pytest.raises(TransportError):
        thread.stop(0.0)
    wait_until(lambda: len(loop.steps) > 12)
    with pytest.raises(TransportError, match="an agent is not gone"):
        thread.stop(0.0)
    (record,) = caplog.records
    assert record.exc_info is not None
    is_gone.set()
    thread.stop(TIMEOUT_S)
    (worker,) = loop.threads
    assert not worker.is_alive()


def test_nobody_wakes_a_loop_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wake-up descriptor may be another file by then."""
    loop = FakeLoop()
    wake, steps_at_wake = loop.wake, list[list[str]]()

    def wake_slowly() -> None:
        wake()
        loop.threads.pop().join(0.2)  # it has every chance to close too early
        steps_at_wake.append(list(loop.steps))

    monkeypatch.setattr(loop, "wake", wake_slowly)
    thread = thread_of(loop)
    thread.start()
    loop.wait_for(["turn"])
    thread.stop()
    thread.stop()
    assert steps_at_wake == [["turn"]]
    assert loop.steps == ["turn", "close"]


def test_it_leaves_the_core_that_its_caller_is_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads inherit the caller's cores; it takes those of the process above."""
    masks: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {process, 1})
    monkeypatch.setattr(os, "sched_setaffinity", masks.__setitem__)
    thread = thread_of(FakeLoop())
    thread.start()
    thread.stop()
    assert masks == {0: {os.getppid(), 1}}


def test_cores_that_cannot_be_had_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: int, mask: object) -> None:
        raise OSError(f"{process}: {mask}")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    loop = FakeLoop()
    thread = thread_of(loop)
    thread.start()
    loop.wait_for(["turn"])
    thread.stop()
