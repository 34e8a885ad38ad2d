"""The check that peers can read a rank, and the agent that takes over when they cannot."""

import errno
import logging
import socket
from collections import defaultdict
from collections.abc import Iterator

import pytest

from lab.local.memory import Fabric, MemoryTransport
from nixl_kv.engine.serving import AGAIN_S, CHECK_S, LOOK_S, UNREADABLE, Serving
from nixl_kv.errors import PeerLost, TransportError
from nixl_kv.transport import descriptors
from nixl_kv.transport.base import PeerName, SlotPage
from support.stepped import Background, Clock


class World:
    """One rank's memory, and the sockets that its agents listen on."""

    def __init__(self) -> None:
        self.fabric, self.clock = Fabric(), Clock()
        self.counts: defaultdict[str, float] = defaultdict(float)
        self.slots = SlotPage(4)
        self.background = Background()
        self.sockets: list[socket.socket] = []
        self.failure: TransportError | None = None  # of the next agents that are made
        self.lost: PeerLost | None = None  # of the next reads
        self.num_checks = 0
        self.serving = Serving(
            self.open,
            self.slots,
            make_checker=self.make_checker,
            background=self.background,
            counts=self.counts,
            clock=self.clock,
        )

    def open(self) -> MemoryTransport:
        if self.failure is not None:
            raise self.failure
        transport = MemoryTransport(self.fabric)
        transport.register(self.slots.span, "DRAM", 0)
        self.sockets.append(socket.create_server(("127.0.0.1", 0)))
        return transport

    def make_checker(self) -> MemoryTransport:
        self.num_checks += 1
        if self.failure is not None:
            raise self.failure
        checker, lost = MemoryTransport(self.fabric), self.lost
        if lost is not None:

            def refuse(_: bytes) -> PeerName:
                raise lost

            checker.add_peer = refuse  # type: ignore[method-assign, assignment]
        return checker

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


def test_it_reads_its_own_slot_once_a_minute(world: World) -> None:
    assert world.turns(CHECK_S - 0.1) == 0
    assert world.num_checks == 0
    for count in (1, 2, 3):
        assert world.turns(CHECK_S) == 0
        assert world.num_checks == count
        assert world.serving.is_awake, "the end of the reader is to be seen"
        world.clock.now += 1.0
        assert world.serving.next_due == pytest.approx(world.clock.now + CHECK_S - 1.0)
    assert world.counts[UNREADABLE] == 0


def test_a_rank_that_can_no_longer_be_read_gets_another_agent(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    assert world.turns(CHECK_S) == 0
    former = world.serving.metadata()
    world.lost = PeerLost("refused")
    assert world.turns(CHECK_S) == 1
    assert world.serving.metadata() != former
    assert world.counts[UNREADABLE] == 1
    assert "can no longer connect to this rank's memory (refused)" in caplog.text
    world.lost = None
    assert world.turns(CHECK_S) + world.turns(CHECK_S) == 0
    assert world.counts[UNREADABLE] == 0
    assert len(world.fabric.transports) == 1


def test_one_failure_costs_nothing(world: World) -> None:
    assert world.turns(CHECK_S) == 0
    world.lost = PeerLost("reset")
    world.clock.now += CHECK_S
    world.serving.poll()
    world.lost = None
    assert world.turns(AGAIN_S) == 0


def test_another_agent_is_no_better_where_none_was_ever_read(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.lost = PeerLost("no way to itself")
    assert world.turns(CHECK_S) == 0
    assert world.counts[UNREADABLE] == 1
    assert "cannot read its own memory as peers do: no way to itself" in caplog.text
    assert len(world.sockets) == 1


def test_a_lost_listening_socket_is_noticed_within_a_second_of_service(world: World) -> None:
    """Over loopback peers may still connect, and over other networks not: no check can tell."""
    former = world.serving.metadata()
    world.sockets[0].close()
    assert world.turns(LOOK_S) == 1
    assert world.serving.metadata() != former
    assert world.turns(CHECK_S) == 0


def test_without_descriptors_it_is_tried_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.failure = TransportError("too many open files")
    caplog.set_level(logging.WARNING)
    assert world.turns(CHECK_S) == 0
    assert "too many open files" in caplog.text
    assert world.counts[UNREADABLE] == 0, "it is not known"
    world.sockets[0].close()
    assert world.turns(LOOK_S) == 0
    assert world.counts[UNREADABLE] == 1
    world.failure = None
    assert world.turns(CHECK_S) == 1
    assert world.counts[UNREADABLE] == 0


def test_it_ends_while_a_check_is_under_way(world: World) -> None:
    world.fabric.polls = 1_000_000
    world.background.is_held = True
    world.clock.now += CHECK_S
    world.serving.poll()
    assert world.serving.is_awake
    world.serving.close()
    world.background.work()
    assert world.num_checks == 0


def test_without_descriptors_it_tries_again_until_there_are_some(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that left `poll` would end all loads of the rank, many times a second."""
    world.turns(CHECK_S)
    world.sockets.pop(0).close()

    def refuse() -> dict[int, int]:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as starved:
        starved.setattr(descriptors, "listening_sockets", refuse)
        for _ in range(5):
            assert world.turns(CHECK_S) == 0
    assert "cannot make another NIXL agent" in caplog.text
    assert world.turns(CHECK_S) == 1
