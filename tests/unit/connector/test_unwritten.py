"""Offers of engines with draft layers are marked as written after their step, and once."""

from collections import deque
from collections.abc import Sequence

import pytest

from nixl_kv.connector import worker
from nixl_kv.connector.worker import UnwrittenOffers
from nixl_kv.ids import Nonce
from nixl_kv.protocol.events import MarkWritten
from support.records import NONCE, NONCE2, hex32, prepare_offer, publish_offer

LATE = prepare_offer(is_written=False)
NEXT = prepare_offer(nonce=NONCE2, is_written=False)
THIRD = prepare_offer(nonce=Nonce(hex32(3)), is_written=False)


class Event:
    """Of a stream whose work is done when a test says so."""

    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> deque[Event]:
    """The events in the order in which they were recorded."""
    events: deque[Event] = deque()

    def record() -> Event:
        events.append(Event())
        return events[-1]

    monkeypatch.setattr(worker, "_record_event", record)
    return events


def marked(offers: UnwrittenOffers) -> Sequence[Nonce]:
    commands = offers.pop_written()
    assert all(isinstance(command, MarkWritten) for command in commands)
    return [command.nonce for command in commands if isinstance(command, MarkWritten)]


def test_on_a_cpu_a_step_is_complete_when_it_returns() -> None:
    offers = UnwrittenOffers()
    offers.add([LATE, publish_offer()])
    assert marked(offers) == []
    offers.wait_for_save()
    assert marked(offers) == [NONCE]
    assert marked(offers) == []


def test_an_offer_waits_for_the_work_of_its_step(recorded: deque[Event]) -> None:
    offers = UnwrittenOffers()
    offers.add([LATE])
    offers.add([NEXT])  # handed over with the same step
    offers.wait_for_save()
    offers.wait_for_save()  # of a step that writes no offer's KV
    offers.add([THIRD])
    offers.wait_for_save()
    assert marked(offers) == []
    first, second = recorded
    second.is_done = True  # which cannot be before the first
    assert marked(offers) == []
    first.is_done = True
    assert marked(offers) == [NONCE, NONCE2, THIRD.nonce]


def test_without_draft_layers_nothing_waits(recorded: deque[Event]) -> None:
    offers = UnwrittenOffers()
    offers.add([prepare_offer()])
    offers.wait_for_save()
    assert marked(offers) == []
    assert not recorded
