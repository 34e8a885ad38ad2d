"""Reads by chunks between two stepped ranks: bytes, slots, and failures.

A block has 288 bytes (3 layers, 2 heads, 4 tokens, 12 bytes), a slot 1024: two blocks fit into any.
"""

from collections import deque
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, Mock

import msgspec
import numpy as np
import pytest

from harness.local.caches import Cache, Sizes
from harness.local.engine import HAS_VERIFY, part_of
from harness.local.machines import by_name
from nixl_kv.config import Config
from nixl_kv.errors import TransportError
from nixl_kv.geometry.layout import Memory, Span, Table
from nixl_kv.protocol import messages
from nixl_kv.protocol.events import FailureKind, LoadEnded, OfferEnd, PackChunk
from nixl_kv.protocol.messages import PackReply
from nixl_kv.reading import staged
from nixl_kv.reading.paths import ExtraMemory, PathFeature
from nixl_kv.reading.staged import copier as host_copy
from nixl_kv.reading.staged import path as staged_path_module
from nixl_kv.reading.staged.path import FEW_RUNS, LONG_RUN, LONG_TCP_RUN, PackQueue, StagedPath
from nixl_kv.reading.staged.ring import RingPart
from support.records import TABLES, pack_request
from support.stepped import HOST, RING_SLOTS, Background, MakeWorld, World, rank_setup

TOKENS, CHUNKS = 23, 3
SHORT = [2, 8, 4, 6, 1, 3], [7, 3, 9, 1, 5, 0], TOKENS
"""Blocks of decode, blocks of prefill, tokens."""

LONG = [*SHORT[0], 7, 9, 5, 0], [*SHORT[1], 2, 8, 4, 6], 40
LONG_CHUNKS = 5


# Two stepped ranks


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    config = Config(host=HOST, path="staged")
    return make_world(config, ("prefill and decode", "prefill and decode"))


def start(world: World, number: int = 1, *, long: bool = False, verify: bool = False) -> None:
    local, remote, tokens = LONG if long else SHORT
    world.decode.prepare_load(number, world.prefill.offer(number, remote, tokens))
    world.decode.start_load(number, local, tokens, verify=verify)


def is_there(world: World, *, long: bool = False) -> bool:
    local, remote, _ = LONG if long else SHORT
    return np.array_equal(world.decode.cache.blocks(local), world.prefill.cache.blocks(remote))


def ended(world: World) -> LoadEnded:
    """The report of a load, as soon as there is one."""
    world.until(lambda: any(isinstance(result, LoadEnded) for result in world.decode.results))
    return world.decode.ended_load()


def staged_path(world: World) -> StagedPath:
    """Decode's path."""
    paths = world.decode.parts.agents.peers.paths
    (path,) = (path for path in paths if isinstance(path, StagedPath))
    return path


def free_slots(world: World) -> int:
    """The number of free slots of decode's ring."""
    return len(staged_path(world).slots)


def pack_queue(world: World) -> PackQueue:
    """Prefill's."""
    return part_of(world.prefill.parts, PackQueue)


def nothing_is_left(world: World) -> bool:
    """Neither a slot of either ring, nor a copy."""
    world.prefill.parts.prefill.check()
    ring = part_of(world.prefill.parts, RingPart).ring
    return free_slots(world) == RING_SLOTS and not any(ring.slots) and not pack_queue(world)


def arrives(world: World) -> tuple[str, int]:
    """All of the only load, and nothing of it is left. Its path, and the bytes read directly."""
    end = ended(world)
    assert end.failure is None
    assert is_there(world)
    world.run()
    assert nothing_is_left(world)
    (read,) = end.reads
    return read.path, read.direct_bytes


def sent_packs(world: World, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Called with what prefill packs from now on."""
    packs = pack_queue(world)
    add = Mock(wraps=packs.add)
    monkeypatch.setattr(packs, "add", add)
    return add


@pytest.mark.parametrize(
    "verify", [pytest.param(False, id=""), *[pytest.param(True, id="verified")] * HAS_VERIFY]
)
def test_a_prompt_arrives_by_chunks(
    world: World, monkeypatch: pytest.MonkeyPatch, *, verify: bool
) -> None:
    packs = sent_packs(world, monkeypatch)
    start(world, verify=verify)
    end = ended(world)
    assert (end.failure, end.verified) == (None, verify)
    assert [(read.path, read.num_bytes) for read in end.reads] == [("staged", 6 * 288)]
    assert is_there(world)
    chunks = [call.args[0].pack_request.chunk for call in packs.call_args_list]
    assert chunks == list(range(CHUNKS))
    world.run()
    assert world.prefill.ended_offer() == ("p1", OfferEnd.READ)
    assert nothing_is_left(world)


def test_a_chunk_that_has_been_read_gives_its_slot_back(world: World) -> None:
    """Others wait for it, while this load is scattered or verified."""
    world.decode.copying.is_held = True
    start(world)
    world.run(20)
    assert world.decode.ends() == []
    assert not any(part_of(world.prefill.parts, RingPart).ring.slots)
    world.decode.copying.is_held = False
    world.decode.copying.work()
    arrives(world)


def test_a_read_that_advances_is_not_late(world: World) -> None:
    """However long all of it takes."""
    world.prefill.copying.is_held = True
    start(world, long=True)
    for _ in range(LONG_CHUNKS):
        world.run(8)
        world.clock.now += 0.8 * world.config.request_timeout_s
        world.prefill.copying.work()
    world.prefill.copying.is_held = False
    world.prefill.copying.work()
    assert ended(world).failure is None
    assert is_there(world, long=True)


def failing(copier: Any, name: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first calls of this method raise."""
    effects = chain([TransportError("no kernel")] * times, repeat(DEFAULT))
    monkeypatch.setattr(copier, name, Mock(wraps=getattr(copier, name), side_effect=effects))


@pytest.mark.parametrize(
    ("name", "times", "expected"),
    [
        pytest.param("start", CHUNKS, ("direct", 0), id="nothing can be packed"),
        pytest.param("poll", 1, ("staged", 2 * 288), id="one chunk cannot"),
        pytest.param("", 0, ("direct", 0), id="too many views, which cost a call of numpy's each"),
    ],
)
def test_kv_that_cannot_be_packed_is_read_directly(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    times: int,
    expected: tuple[str, int],
) -> None:
    if name:
        failing(pack_queue(world)._staging.copier, name, times, monkeypatch)
    else:
        monkeypatch.setattr(host_copy, "MAX_VIEWS", 0)
    start(world)
    assert arrives(world) == expected


@pytest.mark.parametrize("error", [TransportError("too many views"), MemoryError()])
def test_a_plan_that_fails_is_tried_once(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    refuse = Mock(side_effect=error)
    monkeypatch.setattr(pack_queue(world)._staging.copier, "prepare", refuse)
    for number in (1, 2):
        start(world, number)
        assert ended(world).failure is None
    refuse.assert_called_once()


def test_a_chunk_that_cannot_be_scattered_fails_its_load_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(staged_path(world).staging.copier, "start", 1, monkeypatch)
    start(world)
    failure = ended(world).failure
    assert failure is not None
    words = "reading prefill rank 0 failed: no kernel"
    assert (failure.kind, failure.detail) == (FailureKind.BROKEN, words)
    world.run()
    assert nothing_is_left(world)
    start(world, 2)
    arrives(world)


def test_one_slot_is_enough_for_all_of_a_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others take the rest of decode's ring while its first chunks are packed."""
    packs = sent_packs(world, monkeypatch)
    world.prefill.copying.is_held = True
    start(world, long=True)
    world.until(lambda: packs.call_count == 3)
    slots = staged_path(world).slots
    for _ in range(RING_SLOTS - 1):
        slots.popleft()
    world.prefill.copying.is_held = False
    world.prefill.copying.work()
    assert ended(world).failure is None
    assert packs.call_count == LONG_CHUNKS
    assert is_there(world, long=True)
    assert free_slots(world) == 1


def test_without_an_answer_it_ends_without_another_agent(world: World) -> None:
    """Nothing is being read."""
    world.prefill.copying.is_held = True
    start(world)
    world.run()
    world.clock.now += world.config.request_timeout_s + 1
    world.run()
    assert world.decode.failed_load().kind is FailureKind.LATE
    assert free_slots(world) == RING_SLOTS
    assert "replaced_agents stuck_read" not in by_name(world.decode.parts.counts)
    assert not nothing_is_left(world)  # prefill writes into its ring still
    world.prefill.copying.work()
    world.run()
    assert nothing_is_left(world)


def test_a_slot_that_prefill_does_not_have_is_not_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = part_of(world.prefill.parts, RingPart)
    packed = part._reply

    def lie(*arguments: Any) -> Any:
        reply: Any = packed(*arguments)[0]
        message = reply.message
        assert isinstance(message, PackReply)
        return [type(reply)(reply.route, msgspec.structs.replace(message, slot=1000))]

    monkeypatch.setattr(part, "_reply", lie)
    start(world)
    failure = ended(world).failure
    assert failure is not None
    assert (failure.kind, "slot 1000" in failure.detail) == (FailureKind.BROKEN, True)
    assert free_slots(world) == RING_SLOTS


def heads_of(layer: int, end: int = 2) -> messages.LayerHeads:
    return messages.LayerHeads(layer=f"layer.{layer}", first=0, end=end)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"layers": (heads_of(9),)}, "layer 'layer.9' is not on this rank"),
        ({"layers": (heads_of(0, 3),)}, "allowed: within 0 to 2"),
        ({"layers": (heads_of(0),) * 2}, "names a layer twice"),
        ({"begin": 99}, "a chunk has 0 entries"),
        ({"begin": TOKENS + 1, "end": 1}, "a chunk has 0 entries"),
        ({}, "a chunk has 6 entries"),
    ],
)
def test_a_reader_that_asks_for_absent_chunks_gets_nothing(
    world: World, changed: dict[str, Any], why: str
) -> None:
    layers = tuple(map(heads_of, range(Sizes().layers)))
    request = pack_request(**{"end": TOKENS, "layers": layers, **changed})
    packs = pack_queue(world)
    packs.add(PackChunk(b"route", request, (Table.of(SHORT[1]),), 0))
    (packed,) = packs.poll()
    assert why in (packed.refusal or "")


# Which reads are staged

MANY = 100_000
MEMORIES: tuple[Memory, ...] = "VRAM", "DRAM"


def path_with(num_slots: int, memory: Memory = "DRAM", *, is_forced: bool = False) -> StagedPath:
    staging: Any = SimpleNamespace(ring=SimpleNamespace(num_slots=num_slots))
    layout: Any = SimpleNamespace(memory=memory)
    return StagedPath(layout, staging, is_forced=is_forced)


@pytest.mark.parametrize(
    ("memory", "num_runs", "run", "expected"),
    [
        *[(memory, MANY, LONG_RUN[memory] - 1, True) for memory in MEMORIES],
        *[(memory, MANY, LONG_RUN[memory], False) for memory in MEMORIES],
        *[(memory, FEW_RUNS[memory] + 1, 1, True) for memory in MEMORIES],
        *[(memory, FEW_RUNS[memory], 1, False) for memory in MEMORIES],
        ("TCP", 100, LONG_TCP_RUN - 1, True),  # a run takes 0.45 ms there instead of 1.5 us
        ("DRAM", 100, LONG_TCP_RUN - 1, False),
        ("TCP", 100, LONG_TCP_RUN, False),
        ("forced", 1, 1 << 30, True),
    ],
)
def test_many_short_runs_are_staged(
    monkeypatch: pytest.MonkeyPatch, memory: Any, num_runs: int, run: int, *, expected: bool
) -> None:
    monkeypatch.setattr(staged_path_module, "StagedOp", lambda *_: "staged")
    source = SimpleNamespace(is_tcp=memory == "TCP")
    read: Any = SimpleNamespace(num_runs=num_runs, num_bytes=num_runs * run, source=source)
    rank: Any = None
    path = path_with(4, "VRAM" if memory == "VRAM" else "DRAM", is_forced=memory == "forced")
    assert (path.start(rank, read) is not None) is expected


def test_two_reads_share_no_chunk_number() -> None:
    """Prefill tells the chunks of a load's parts apart by them alone."""
    path = path_with(2)
    assert path.slots == deque((0, 1))
    assert list(path.number_chunks(3)) == [0, 1, 2]
    assert list(path.number_chunks(2)) == [3, 4]
    assert path.number_chunks(messages.MAX_CHUNKS) == range(messages.MAX_CHUNKS)


# Which ranks pack, and how they divide their staging memory

MIB = 1 << 20


def built(*, is_decode: bool = True, **config: Any) -> PathFeature:
    return staged.build(rank_setup(Config(**config), is_decode=is_decode))


@pytest.mark.parametrize("changed", [{"staging_mib": 0}, {"path": "direct"}, {"path": "gather"}])
def test_a_rank_that_is_not_to_pack_has_no_ring(changed: dict[str, Any]) -> None:
    assert built(**changed) == PathFeature()


@pytest.mark.parametrize("is_decode", [True, False])
def test_a_rank_that_packs_and_reads_has_half_of_its_staging_for_either(*, is_decode: bool) -> None:
    feature = built(is_decode=is_decode, staging_mib=2)
    ring = feature.description["ring"]
    assert (ring.length, ring.num_slots) == ((1 if is_decode else 2) * MIB, 16)
    assert feature.served == (ExtraMemory(Span(ring.address, ring.length), "DRAM", 0),)
    if is_decode:
        half = Span(ring.address + ring.length, ring.length)
        assert feature.read_into == (ExtraMemory(half, "DRAM", 0),)
        assert isinstance(feature.path, StagedPath)
        assert feature.path.staging.ring.span == half
    else:
        assert (feature.path, feature.read_into) == (None, ())


def test_the_plans_for_shares_that_are_packed_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_path_module, "MAX_CROPS", 2)
    queue = PackQueue(Cache(Sizes()).layout(), Mock(), Background(is_held=True))
    sizes = []
    for number in range(7):
        layers = (messages.LayerHeads(layer=f"layer.{number}", first=0, end=1),)
        queue.add(PackChunk(b"", pack_request(layers=layers), TABLES, 0))
        assert queue.poll() == []
        sizes.append(len(queue._crops))
    assert max(sizes) == 2
