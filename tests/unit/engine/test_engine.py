"""A rank's transfer engine, as it is put together from its specification."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from harness.local.caches import Cache, Sizes
from harness.local.engine import HOST, MODEL
from harness.local.memory import Fabric, MemoryTransport
from harness.local.memory_control import MemoryControl, MemoryNetwork
from nixl_kv.config import Config
from nixl_kv.engine.engine import (
    MAX_SLOTS,
    MIN_SLOTS,
    RankSpec,
    TransferEngine,
    slots_for,
)
from nixl_kv.errors import IncompatiblePeer, LocalProtocolError, TransportError
from nixl_kv.geometry.layout import CacheLayout, Group, Memory, Table
from nixl_kv.ids import EngineId, Rank, RequestId, endpoint_at
from nixl_kv.protocol.events import CancelLoad, LoadEnded, StartLoad
from nixl_kv.reading.paths import ExtraMemory, Feature, allocate
from nixl_kv.transport.base import Transport
from support.records import description
from support.stepped import Background, StepControl


class Planes:
    """What transports and controls were made."""

    def __init__(self) -> None:
        self.fabric, self.network = Fabric(), MemoryNetwork()
        self.transports: list[MemoryTransport] = []
        self.controls: list[MemoryControl] = []

    def make_transport(self) -> Transport:
        self.transports.append(MemoryTransport(self.fabric))
        return self.transports[-1]

    def make_control(self) -> MemoryControl:
        self.controls.append(StepControl(self.network, "rank"))
        return self.controls[-1]


CACHE = Cache(Sizes())


def spec_of(planes: Planes, **changed: Any) -> RankSpec:
    values: dict[str, Any] = {
        "engine": EngineId("engine"),
        "rank": Rank(0),
        "layout": CACHE.layout(),
        "model": MODEL,
        "config": Config(),
        "host": HOST,
        "is_prefill": True,
        "is_decode": True,
        "make_transport": planes.make_transport,
        "make_control": planes.make_control,
        "make_background": lambda _count: Background(),
    }
    return RankSpec(**{**values, **changed})


@pytest.fixture
def planes() -> Planes:
    return Planes()


Step = Callable[..., TransferEngine]


@pytest.fixture
def step(planes: Planes) -> Iterator[Step]:
    """Starts an engine whose turns the test makes."""
    engines: list[TransferEngine] = []

    def start(**changed: Any) -> TransferEngine:
        engine = TransferEngine(spec_of(planes, **changed))
        engine.start_stepped()
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        assert engine.loop is not None
        engine.loop.close()


@pytest.mark.parametrize(
    ("is_prefill", "is_decode", "roles", "num_transports"),
    [
        pytest.param(True, True, "prefill and decode", 2, id="both"),
        pytest.param(True, False, "prefill", 1, id="prefill"),
        pytest.param(False, True, "decode", 1, id="decode"),
    ],
)
def test_a_rank_has_the_agents_of_its_roles(
    planes: Planes,
    step: Step,
    *,
    is_prefill: bool,
    is_decode: bool,
    roles: str,
    num_transports: int,
) -> None:
    engine = step(is_prefill=is_prefill, is_decode=is_decode)
    assert engine.loop is not None
    parts = engine.loop.parts
    assert engine.spec.roles == roles
    assert len(planes.transports) == num_transports
    assert (parts.serving is not None) == is_prefill
    assert bool(parts.agents.polled) == is_decode
    assert bool(parts.description.agent) == is_prefill


@pytest.mark.parametrize("is_prefill", [False, True], ids=["decode", "prefill"])
def test_a_rank_describes_itself(planes: Planes, step: Step, *, is_prefill: bool) -> None:
    """A rank that only decodes listens too, for tools."""
    engine = step(is_prefill=is_prefill, is_decode=not is_prefill)
    assert engine.loop is not None
    parts = engine.loop.parts
    described = parts.description
    (endpoint,) = planes.network.listeners
    assert described.endpoint == endpoint
    assert described.endpoint.startswith(endpoint_at(HOST, 1)[:-1])
    assert described.layout == CACHE.layout()
    assert (described.slots.address, described.slots.count) == (parts.slots.address, MIN_SLOTS)
    assert described.agent == (parts.serving.metadata() if parts.serving is not None else b"")
    assert described.incarnation == parts.decode.reader.incarnation


@pytest.mark.parametrize(
    ("num_blocks", "expected"),
    [(1, MIN_SLOTS), (4 * MIN_SLOTS, 2 * MIN_SLOTS), (4 * MAX_SLOTS, MAX_SLOTS)],
    ids=["few blocks", "two in an entry", "more than can be described"],
)
def test_there_are_as_many_slots_as_offers_can_be(num_blocks: int, expected: int) -> None:
    """Each has at least one entry of a block table for itself."""
    group = Group(block_size=16, num_blocks=num_blocks, blocks_per_entry=1, regions=())
    larger = replace(group, blocks_per_entry=2) if num_blocks > 1 else group
    assert slots_for(CacheLayout((larger,), "DRAM", 0, ())) == expected


def test_each_life_has_another_incarnation(step: Step) -> None:
    lives = {
        engine.loop.parts.description.incarnation for engine in (step(), step()) if engine.loop
    }
    assert len(lives) == 2


def test_what_serves_can_be_read_whole(planes: Planes, step: Step) -> None:
    ring = allocate(4096)
    feature = Feature(served=(ExtraMemory(ring.span, "DRAM", 0),))
    engine = step(is_decode=False, features=(lambda _setup: feature,))
    assert engine.loop is not None
    (serving,) = planes.transports
    assert serving._spans == [*CACHE.layout().spans, engine.loop.parts.slots.span, ring.span]


def test_the_configuration_reaches_the_machines(step: Step) -> None:
    config = Config(offer_ttl_s=3.0, lease_s=4.0, request_timeout_s=7.0)
    engine = step(config=config)
    assert engine.loop is not None
    offers, decode = engine.loop.parts.prefill, engine.loop.parts.decode
    assert (offers._lease_s, offers._offer_ttl_s) == (4.0, 3.0)
    assert (decode._timeout_s, decode._heartbeat_interval_s) == (7.0, 4.0 / 5)


def test_what_a_rank_needs_of_its_peers_reaches_their_check(step: Step) -> None:
    engine = step(extras={"draft": "one"}, config=Config.parse({"peers": ["10.0.0.0/8"]}, {}))
    assert engine.loop is not None
    with pytest.raises(IncompatiblePeer, match="draft is 'one' here and None there"):
        engine.loop.parts.agents.peers.check(description())


# --- commands and results


def test_commands_may_be_submitted_before_the_start(planes: Planes) -> None:
    """They are carried out in the first turn."""
    engine = TransferEngine(spec_of(planes))
    assert engine.pop_results() == []
    engine.submit([StartLoad(RequestId("d1"), 0, 4, (Table.of([]),))])
    loop = engine.start_stepped()
    assert engine.pop_results() == []
    loop.turn()
    (ended,) = engine.pop_results()
    assert isinstance(ended, LoadEnded)
    assert ended.request == "d1"
    assert engine.pop_results() == []
    loop.close()


@pytest.mark.parametrize("num_commands", [0, 2])
def test_a_waiting_thread_is_woken_for_commands_only(
    planes: Planes, step: Step, num_commands: int
) -> None:
    engine = step()
    engine.submit([CancelLoad(RequestId("d1"))] * num_commands)
    (control,) = planes.controls
    assert control._is_woken is bool(num_commands)


def test_on_its_thread_it_starts_works_and_stops(planes: Planes) -> None:
    spec = spec_of(planes, make_control=lambda: MemoryControl(planes.network))
    engine = TransferEngine(spec)
    described = engine.start()
    assert list(planes.network.listeners) == [described.endpoint]
    engine.submit([StartLoad(RequestId("d1"), 0, 4, (Table.of([]),))])
    results: list[Any] = []
    while not results:
        results = engine.pop_results()
    assert isinstance(results[0], LoadEnded)
    engine.stop()
    engine.stop()
    assert planes.fabric.transports == {}


@pytest.mark.parametrize("is_started", [False, True], ids=["not started", "stepped"])
def test_an_engine_that_is_stopped_takes_no_commands(planes: Planes, *, is_started: bool) -> None:
    engine = TransferEngine(spec_of(planes))
    if is_started:
        engine.start_stepped()
    engine.stop()
    engine.stop()
    assert planes.fabric.transports == {}
    with pytest.raises(LocalProtocolError, match="the transfer engine is stopped"):
        engine.submit([])


def test_a_start_that_fails_says_why(planes: Planes) -> None:
    def refuse() -> Transport:
        raise TransportError("no such backend")

    with pytest.raises(TransportError, match="no such backend"):
        TransferEngine(spec_of(planes, make_transport=refuse)).start()


def spec_in(planes: Planes, memory: Memory, **changed: Any) -> RankSpec:
    return spec_of(planes, layout=replace(CACHE.layout(), memory=memory), **changed)
