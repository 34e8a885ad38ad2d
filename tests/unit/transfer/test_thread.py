"""The transfer thread's life: it starts, is stopped, and survives every error."""

import logging
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_kv.errors import TransportError
from nixl_kv.ids import new_generation
from nixl_kv.transfer import thread as thread_module
from nixl_kv.transfer.thread import TransferThread
from nixl_kv.transport.slots import SlotPage

TIMEOUT_S = 30.0


class FakeLoop:
    """Waits in each turn until it is woken; `steps` has all that was done."""

    def __init__(self) -> None:
        self.parts = SimpleNamespace(slots=SlotPage(4))
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
    monkeypatch.setattr(thread_module, "PAUSE_S", 0.0)


def thread_of(loop: FakeLoop) -> TransferThread:
    build: Callable[[], Any] = lambda: loop  # noqa: E731
    return TransferThread(build)


def test_turns_are_made_on_one_thread_of_its_own_until_it_is_stopped() -> None:
    loop = FakeLoop()
    thread = thread_of(loop)
    assert thread.start() is loop
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

    thread = TransferThread(build)
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
    assert record.getMessage() == "the transfer thread died; failing what it holds"
    assert record.exc_info is not None
    thread.stop()


def test_an_error_in_a_restart_leads_to_another_restart() -> None:
    loop = FakeLoop()
    loop.errors = [KeyError("a bug"), KeyError("another"), KeyError("a third")]
    thread = thread_of(loop)
    thread.start()
    loop.wait_for(["turn", "restart", "restart", "restart", "turn"])
    thread.stop()


def test_a_thread_that_does_not_end_keeps_what_it_owns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While it runs, nobody else may close it. But no reader may take its blocks for held."""
    monkeypatch.setattr(thread_module, "STOP_TIMEOUT_S", 0.01)
    loop = FakeLoop()
    slots = loop.parts.slots
    slots.write(2, new_generation())
    monkeypatch.setattr(loop, "wake", lambda: None)
    thread = thread_of(loop)
    thread.start()
    loop.wait_for(["turn"])
    thread.stop()
    assert "close" not in loop.steps
    assert slots.read(2) == bytes(16)
    assert "the transfer thread hangs" in caplog.text
    loop.woken.set()
    (worker,) = loop.threads
    worker.join(TIMEOUT_S)
    assert not worker.is_alive()


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
