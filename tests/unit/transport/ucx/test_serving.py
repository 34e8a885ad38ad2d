"""The agent that peers read, and the one that takes over when they cannot connect to it."""

import errno
import socket
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from harness.local.memory import Fabric, MemoryTransport
from nixl_kv.errors import TransportError
from nixl_kv.protocol.events import Counts
from nixl_kv.transport.base import SlotPage
from nixl_kv.transport.ucx import descriptors
from nixl_kv.transport.ucx.serving import AWAKE_CHECK_S, IDLE_CHECK_S, SERVE_ON_S, Serving
from support.stepped import Background, Clock


class World:
    """One rank's memory, and the sockets that its agents listen on."""

    def __init__(self, *, listens: bool = True) -> None:
        self.fabric, self.clock = Fabric(), Clock()
        self.counts = Counts()
        self.listens = listens
        self.slots = SlotPage(4)
        self.background = Background()
        self.sockets: list[socket.socket] = []
        self.failure: TransportError | None = None  # of the next agents that are made
        self.serving = Serving(
            self.open,
            lambda agent: agent.register(self.slots.span, "DRAM", 0),
            background=self.background,
            measure=self.counts.measure,
            clock=self.clock,
        )

    def open(self) -> MemoryTransport:
        if self.failure is not None:
            raise self.failure
        transport = MemoryTransport(self.fabric)
        if self.listens:
            self.sockets.append(socket.create_server(("127.0.0.1", 0)))
        return transport

    def turns(self, seconds: float = 0.0) -> int:
        """All that is due after so long; how often another agent took over."""
        self.clock.now += seconds
        return sum(self.serving.poll() for _ in range(8))


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.failure = None
    made.serving.close()
    for each in made.sockets:
        each.close()
    assert not made.fabric.transports


def test_once_a_minute_it_serves_for_a_moment(world: World) -> None:
    for _ in range(3):
        due = world.serving.next_due
        assert due is not None
        world.clock.now = due - 1.0
        assert world.turns() == 0
        assert not world.serving.is_awake
        world.clock.now = due
        assert world.turns() == 0
        assert world.serving.is_awake, "readers that have left are to be seen"
        world.clock.now += SERVE_ON_S


def test_without_a_listening_socket_there_is_nothing_to_check() -> None:
    world = World(listens=False)
    assert world.turns(IDLE_CHECK_S) == 0
    assert world.serving.next_due is None
    world.serving.close()


def test_a_lost_listening_socket_is_noticed_within_a_second_of_service(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    former = world.serving.metadata()
    world.sockets[0].close()
    world.serving.stay_awake(2 * AWAKE_CHECK_S)
    world.background.is_held = True
    assert world.turns(AWAKE_CHECK_S) == 0
    assert world.counts.amounts["unreadable", ""] == 1
    assert world.serving.is_awake
    world.background.work()
    assert world.turns() == 1
    assert world.serving.metadata() != former
    assert world.counts.amounts["unreadable", ""] == 0
    assert "UCX has closed a listening socket" in caplog.text
    world.background.work()
    assert len(world.fabric.transports) == 1
    assert world.turns(IDLE_CHECK_S) == 0


def test_without_descriptors_it_tries_again_until_there_are_some(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that left `poll` would end all loads of the rank, many times a second."""
    world.sockets.pop(0).close()
    error = OSError(errno.EMFILE, "Too many open files")
    with monkeypatch.context() as starved:
        starved.setattr(descriptors, "listening_sockets", Mock(side_effect=error))
        for _ in range(3):
            assert world.turns(IDLE_CHECK_S) == 0
    world.failure = TransportError("too many open files")
    for _ in range(3):
        assert world.turns(IDLE_CHECK_S) == 0
        assert world.counts.amounts["unreadable", ""] == 1
    assert "cannot make another NIXL agent: too many open files" in caplog.text
    world.failure = None
    assert world.turns(IDLE_CHECK_S) == 1
    assert world.counts.amounts["unreadable", ""] == 0


def test_it_ends_while_another_agent_is_to_be_made(world: World) -> None:
    world.sockets[0].close()
    world.background.is_held = True
    assert world.turns(IDLE_CHECK_S) == 0
    world.serving.close()
    world.background.work()
    assert len(world.sockets) == 1
