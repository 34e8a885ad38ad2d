"""Two ranks: one reads from the other's prefix cache what no offer pins."""

import logging

import pytest
from msgspec.structs import replace

from nixl_kv.config import Config
from nixl_kv.conversations.part import ContentPart
from nixl_kv.conversations.runs import KEY_BYTES, Run, seal
from nixl_kv.conversations.slots import ContentSlots
from nixl_kv.engine.engine import TransferEngine
from nixl_kv.feature import StepPart
from nixl_kv.geometry.layout import Table
from nixl_kv.ids import Nonce, Rank, RequestId, new_claim
from nixl_kv.protocol.events import (
    BlocksTaken,
    Command,
    Counts,
    FailureKind,
    LoadEnded,
    OfferEnded,
    PrepareLoad,
    SetContentKey,
    SetEngine,
    StartLoad,
)
from nixl_kv.protocol.messages import Ask, Grant, decode_to_rank
from support.records import HOME, NONCE2, hex32
from support.stepped import MakeWorld, Stepped, World
from unit.engine.test_loop import Stranger

KEY = b"k" * KEY_BYTES
CACHED, LOADED = [7, 3, 4], [2, 9, 1]
TOKENS = 11
OFFER = Nonce(hex32(0xF00D))
ON = Config(conversations="on")


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    """Decode reads prefill, whose first step has filled its blocks."""
    world = make_world(ON)
    world.prefill.submit(SetContentKey(KEY))
    step(world.prefill, 1, *CACHED)
    return world


def part_of(rank: Stepped) -> ContentPart:
    parts = (each.prefill for each in rank.parts.features)
    return next(part for part in parts if isinstance(part, ContentPart))


def step(rank: Stepped, number: int, *ids: int, ends: bool = True) -> None:
    """A step of vLLM's on the rank."""
    commands: list[Command] = rank.engine.before_step([BlocksTaken(number, Table.of(ids).ids)])
    rank.submit(*commands)
    if ends:
        rank.engine.end_step(lambda: None)


def found(*ids: int, steps: int = 1, need: int = 1, offer: Nonce = OFFER) -> bytes:
    run = Run(first_block=0, ids=Table.of(ids).ids, steps=steps, need=need, epoch=0)
    return seal(run, offer, KEY)


def load(world: World, sealed: bytes) -> RequestId:
    """Decode asks for the blocks found, and has room for them."""
    ticket = replace(world.prefill.ticket(1, TOKENS), nonce=OFFER)
    request = RequestId("d1")
    world.decode.submit(
        PrepareLoad(request, ticket, new_claim(), found=sealed),
        StartLoad(request, 0, TOKENS, (Table.of(LOADED),)),
    )
    return request


def is_idle(rank: Stepped) -> bool:
    """Whether its part holds nothing."""
    part = part_of(rank)
    return not (len(part) or len(part.slots) or rank.parts.prefill.offers)


def test_cached_blocks_are_read_and_the_caller_hears_nothing(world: World) -> None:
    load(world, found(*CACHED))
    world.run()
    ended = world.decode.ended_load()
    assert ended.failure is None
    expected, got = world.prefill.cache.blocks(CACHED), world.decode.cache.blocks(LOADED)
    assert (expected[:, :2] == got[:, :2]).all()
    assert world.prefill.ends() == []
    assert not len(world.prefill.loop.outstanding)
    assert is_idle(world.prefill)


def test_a_load_whose_blocks_are_reused_fails_before_its_bytes_are_believed(world: World) -> None:
    world.fabric.reads_hang = True
    load(world, found(*CACHED))
    world.run()
    slot = world.decode.parts.decode.loads[0].reads[Rank(0)].grant
    assert isinstance(slot, Grant)
    commands = world.prefill.engine.before_step([BlocksTaken(2, Table.of([3]).ids)])
    assert world.prefill.parts.slots.read(slot.slot) == bytes(16)
    world.prefill.submit(*commands)
    world.fabric.reads_hang = False
    world.run()
    assert world.decode.failed_load().kind in (FailureKind.DENIED, FailureKind.FENCED)
    assert world.prefill.ends() == []
    assert is_idle(world.prefill)


def test_a_reuse_after_the_answer_is_denied(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """It is usual in a full cache, so nothing warns of it."""
    step(world.prefill, 2, 3)
    load(world, found(*CACHED))
    with caplog.at_level(logging.INFO):
        world.run()
    (line,) = [each for each in caplog.records if "cached KV" in each.getMessage()]
    assert line.levelno == logging.INFO
    assert not [each for each in caplog.records if each.levelno > logging.INFO]
    assert world.decode.failed_load().kind is FailureKind.DENIED
    counts = [each for each in world.prefill.engine.pop_results() if isinstance(each, Counts)]
    assert all(("denied_asks", "") not in each.amounts for each in counts), "a usual end"


def test_after_a_restart_of_the_thread_the_rank_still_knows_what_was_reused(world: World) -> None:
    stranger = Stranger(world, world.prefill)
    answer = stranger.ask(nonce=OFFER, found=found(*CACHED))
    assert isinstance(answer, Grant)
    step(world.prefill, 2, 3)
    world.prefill.loop.restart()
    assert world.prefill.parts.slots.read(answer.slot) == bytes(16)
    assert is_idle(world.prefill)
    world.prefill.turn()
    second = {"nonce": NONCE2, "found": found(*CACHED, offer=NONCE2)}
    assert not isinstance(stranger.ask(**second), Grant)
    second["found"] = found(7, 4, offer=NONCE2)
    assert isinstance(stranger.ask(**second), Grant), "it has its key"
    assert not any(isinstance(each, OfferEnded) for each in world.prefill.engine.pop_results())


def test_asks_name_the_directory_that_answers_find(world: World) -> None:
    layouts = (world.decode.parts.description.layout,)
    sent, send = list[Ask](), world.decode.control.send

    def note(endpoint: str, payload: bytes) -> None:
        if payload[1:5] == b"\xa3Ask":
            message = decode_to_rank(payload)
            assert isinstance(message, Ask)
            sent.append(message)
        send(endpoint, payload)  # type: ignore[arg-type]

    world.decode.control.send = note  # type: ignore[method-assign, assignment]
    world.decode.submit(SetEngine(world.decode.engine.spec.engine, layouts, finds_at=HOME))
    world.decode.prepare_load(2, world.prefill.offer(2, CACHED, TOKENS))
    world.decode.start_load(2, LOADED, TOKENS)
    world.run()
    assert [ask.directory for ask in sent] == [HOME]
    ends = world.prefill.ends()
    assert [(end.directory, end.reader) for end in ends if isinstance(end, OfferEnded)] == [
        (HOME, "decode")
    ]
    assert isinstance(world.decode.ended_load(), LoadEnded)


@pytest.mark.parametrize(
    ("config", "roles"),
    [(Config(), "prefill and decode"), (ON, "decode")],
    ids=["it is off", "nothing is read"],
)
def test_without_it_a_rank_has_no_part_of_it(
    make_world: MakeWorld, config: Config, roles: str
) -> None:
    world = make_world(config, roles=(roles, "decode"))
    parts = [each.step for each in world.prefill.parts.features]
    assert not any(isinstance(part, ContentSlots) for part in parts)
    world.prefill.submit(BlocksTaken(1, b""), SetContentKey(KEY))
    world.prefill.turn()


def test_an_event_is_recorded_only_for_a_part_that_waits_for_it(world: World) -> None:
    recorded: list[int] = []

    def record() -> None:
        recorded.append(1)

    engine: TransferEngine = world.prefill.engine
    engine.end_step(record)
    assert not recorded, "the first step has ended"
    engine.before_step([BlocksTaken(2, b"")])
    engine.end_step(record)
    engine.end_step(record)
    assert recorded == [1]
    assert not StepPart().is_in_step
    StepPart().end_step(None)
