"""Who watches offers at a directory: when it asks, what it is told, and what that costs it."""

import queue
from collections.abc import Iterator
from functools import partial

import pytest

from harness.local.memory_control import MemoryControl, MemoryNetwork
from nixl_kv.config import Config
from nixl_kv.engine.directory import DirectoryServer
from nixl_kv.engine.trust import Trust
from nixl_kv.engine.watch import LINK_KEPT_S, OfferWatch
from nixl_kv.ids import Nonce
from nixl_kv.protocol.messages import Status, encode
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.transport.base import FromPeer
from support.records import ENGINE_LIFE, hex32, ticket
from support.stepped import Clock

HOST = "127.0.0.1"
TIMEOUT_S = 30.0


class World:
    """A directory and who watches at it, whose turns a test makes."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.server = DirectoryServer(MemoryControl(self.network), HOST, 0)
        self.control = MemoryControl(self.network)
        self.control.clock = self.clock = Clock()
        self.watch = OfferWatch(self.control)
        self.released: list[Nonce] = []

    def pair(self, number: int) -> Ticket:
        offer = {"nonce": hex32(number), "num_tokens": 0, "context": ""}
        return ticket(host=HOST, port=self.server.port, **offer)

    def add(self, number: int) -> Nonce:
        pair = self.pair(number)
        self.watch.add(pair, lambda: self.released.append(pair.nonce))
        return pair.nonce

    def turns(self) -> None:
        """The question, its answer, and what is made of that."""
        self.watch.turn(0)
        self.server.turn(0)
        self.watch.turn(0)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.server.stop()


def test_it_learns_which_offers_decode_has_released(world: World) -> None:
    first, second = world.add(1), world.add(2)
    world.turns()
    assert world.released == []
    world.server.tell_released([second])
    world.turns()
    world.server.tell_released([first, second])
    world.turns()
    assert world.released == [second, first]


def test_what_is_discarded_is_not_told(world: World) -> None:
    nonce = world.add(1)
    world.turns()
    world.watch.discard(nonce)
    world.watch.discard(nonce)
    world.server.tell_released([nonce])
    world.turns()
    assert world.released == []


def test_its_link_closes_when_nothing_is_watched(world: World) -> None:
    nonce = world.add(1)
    world.turns()
    world.clock.now += 2 * LINK_KEPT_S
    world.turns()
    assert len(world.control.links()) == 1, "an offer is watched"
    world.watch.discard(nonce)
    world.turns()
    assert world.control.links() == []
    world.add(2)
    world.turns()
    world.watch.discard(Nonce(hex32(2)))
    world.clock.now += LINK_KEPT_S / 2
    world.turns()
    assert len(world.control.links()) == 1, "the next request may come soon"


def test_a_directory_that_is_gone_is_logged_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.server.stop()
    for number in range(3):
        world.add(number)
        world.watch.turn(0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    endpoint = world.pair(1).endpoint
    assert f"cannot learn from {endpoint} which offers decode has released (" in caplog.text


def test_a_directory_that_ends_while_nothing_is_watched_is_no_news(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    nonce = world.add(1)
    world.turns()
    world.watch.discard(nonce)
    world.server.stop()
    world.watch.turn(0)
    assert (world.control.links(), caplog.records) == ([], [])


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"\xc1garbage", id="not a message"),
        pytest.param(
            encode(Status(incarnation=ENGINE_LIFE, facts={}, totals={}, lists={})),
            id="another message",
        ),
    ],
)
def test_an_answer_to_something_else_changes_nothing(world: World, answer: bytes) -> None:
    nonce = world.add(1)
    world.watch.turn(0)
    control = world.server._control
    (question,) = control.poll(0)
    assert isinstance(question, FromPeer)
    control.reply(question.route, answer)
    world.watch.turn(0)
    assert world.released == []
    control.inbox.append(question)  # type: ignore[attr-defined]
    world.server.tell_released([nonce])
    world.turns()
    assert world.released == [nonce]


@pytest.mark.parametrize("settings", [{}, {"insecure": True}], ids=["with a key", "without"])
def test_several_api_servers_hear_of_their_offers_over_zmq(settings: dict[str, object]) -> None:
    trust, told = Trust.of(Config.parse(settings, {})), queue.Queue[int]()
    server = DirectoryServer(trust.control(), HOST, 0)
    server.start()
    pairs = []
    for number in range(2):
        offer = {"nonce": hex32(number), "num_tokens": 0, "context": ""}
        pairs.append(ticket(host=HOST, port=server.port, **offer))
        watch = OfferWatch(trust.control())
        watch.start()
        watch.add(pairs[number], partial(told.put, number))
    for number, pair in enumerate(pairs):
        server.tell_released([pair.nonce])
        assert told.get(timeout=TIMEOUT_S) == number
    server.stop()
