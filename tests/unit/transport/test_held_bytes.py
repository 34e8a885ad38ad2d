"""How much connections make a port hold, by what the kernel says of them; here it says anything."""

import logging

import pytest

from nixl_kv.transport import held_bytes as module
from nixl_kv.transport.held_bytes import NEGLIGIBLE_BYTES, HeldBytes

LIMIT = 10 * NEGLIGIBLE_BYTES
SOME = 2 * NEGLIGIBLE_BYTES


class Port:
    """Connections 1 and 2 of a port, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.received = {1: 0, 2: 0}
        self.cut_off: list[int] = []
        self.now = 100.0
        self.held = HeldBytes(5, LIMIT)
        monkeypatch.setattr(module, "_received", self.received.__getitem__)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module.os, "dup", self._on_cut_off)
        for descriptor in self.received:
            self.held.on_accepted(descriptor)

    def look(self, *, all_delivered: bool = True) -> list[int]:
        """Whom a look cuts off."""
        self.now += 10
        self.cut_off.clear()
        self.held.look(all_delivered=all_delivered)
        return self.cut_off

    def _on_cut_off(self, descriptor: int) -> int:
        self.cut_off.append(descriptor)
        raise OSError("no such connection")


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Port:
    return Port(monkeypatch)


def test_what_was_received_and_not_delivered_is_held(port: Port) -> None:
    port.received[1] = LIMIT
    assert port.look() == []
    port.received[1] = LIMIT + 1
    assert port.look() == [1]
    assert port.look() == [], "once"


def test_the_limit_is_for_all_together_and_meets_who_holds_most(port: Port) -> None:
    port.received.update({1: SOME + 1, 2: LIMIT - SOME})
    assert port.look() == [2]


def test_what_is_delivered_is_not_held(port: Port) -> None:
    for _ in range(20):
        port.received[1] += LIMIT
        port.held.on_delivered(1, LIMIT - 10)
        assert port.look() == []


def test_a_busy_side_cuts_nobody_off_who_is_served(port: Port) -> None:
    """Whole messages always wait, so that there is no moment at which all is delivered."""
    for _ in range(20):
        port.received[1] += LIMIT
        port.held.on_delivered(1, LIMIT - 10)
        assert port.look(all_delivered=False) == []


def test_whole_messages_that_wait_are_held_too(port: Port) -> None:
    port.received[1] = 2 * LIMIT
    port.held.on_delivered(1, SOME)
    assert port.look(all_delivered=False) == [1]


def test_an_unfinished_message_after_a_whole_one_is_held(port: Port) -> None:
    port.received[1] = SOME
    port.held.on_delivered(1, SOME)
    assert port.look() == []
    port.received[1] += LIMIT + 1
    assert port.look() == [1]


def test_heartbeats_are_not_held(port: Port) -> None:
    port.held = HeldBytes(5, limit=0)
    port.held.on_accepted(1)
    port.received[1] = NEGLIGIBLE_BYTES
    assert port.look() == []


def test_a_connection_that_has_ended_is_not_looked_at(port: Port) -> None:
    for descriptor in (1, 2):
        port.held.on_closed(descriptor)
    port.held.on_closed(7)
    port.held.on_delivered(7, 100)
    port.received.clear()
    assert port.look() == []
    assert port.held.next_look_s is None


def test_looks_cost_little_however_many_connections_there_are(port: Port) -> None:
    port.look()
    assert port.held.next_look_s == pytest.approx(module.LOOK_S, abs=0.01)
    for descriptor in range(3, 1003):
        port.received[descriptor] = 0
        port.held.on_accepted(descriptor)
    port.look()
    assert port.held.next_look_s == pytest.approx(0.6, abs=0.01)


def test_a_connection_that_has_ended_meanwhile_is_not_an_error(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    port.received[1] = LIMIT + 1
    port.look()
    assert caplog.messages == ["port 5: descriptor 1 has ended: no such connection"]
