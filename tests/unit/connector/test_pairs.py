"""Pair tickets in both halves of the scheduler: an offer that decode asks for before it exists."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
from msgspec.structs import replace

from nixl_kv.connector.decode import DecodeScheduler, Prompt
from nixl_kv.connector.paging import Paging, RequestBlocks
from nixl_kv.connector.prefill import Address, PrefillScheduler
from nixl_kv.errors import TicketRefused
from nixl_kv.geometry.layout import Table
from nixl_kv.ids import Nonce, RequestId
from nixl_kv.protocol.events import (
    CancelLoad,
    Command,
    ExpectOffer,
    PrepareLoad,
    PrepareOffer,
    PublishOffer,
    StartLoad,
    WithdrawOffer,
)
from nixl_kv.protocol.ticket import SealedTicket, Ticket, context_hash
from support.cache_manager import CacheManager
from support.records import D1, ENGINE_LIFE, P1, P2, PREFILL, hex32, ticket

TOKEN_IDS = list(range(100, 120))
NUM_TOKENS = len(TOKEN_IDS)
TABLE = [11, 12, 13, 14, 15]
NONCE = Nonce(hex32(7))
CONTEXT = context_hash(NONCE, TOKEN_IDS, [])
PAIR = ticket(nonce=NONCE, num_tokens=NUM_TOKENS, context=CONTEXT, epoch=2, is_early=True)
NOW = replace(PAIR, epoch=3).hashes
EXPECTED = ExpectOffer(NONCE, P1, NOW)


def prompt() -> Prompt:
    return Prompt(D1, NUM_TOKENS, TOKEN_IDS)


# --- prefill


class Prefill:
    def __init__(self, *, in_parts: bool = False, window: int = 0) -> None:
        self.manager = CacheManager({"p1": (TABLE,), "p2": (TABLE,)})
        blocks = RequestBlocks([Paging(0, 4, window)], 20)
        self.scheduler = PrefillScheduler(
            blocks, 0.5, lambda ticket: ticket.params(None), in_parts=in_parts
        )
        blocks.bind(self.manager, self.scheduler.on_free)
        self.scheduler.address = Address(PREFILL, ENGINE_LIFE, "10.0.0.1", 5600, epoch=3)
        self.step = self.scheduler.build_connector_meta

    def arrive(self, pair: Nonce | None = NONCE, request: RequestId = P1) -> list[Command]:
        self.scheduler.on_new_request(request, NUM_TOKENS, prompt().hashes, pair)
        return self.step()

    def compute(self) -> PrepareOffer:
        (command,) = self.step([(P1, range(NUM_TOKENS))])
        assert isinstance(command, PrepareOffer)
        return command

    def finish(self, reason: str = "") -> tuple[Ticket | None, list[Command]]:
        _, params = self.scheduler.request_finished(P1, (TABLE,), reason=reason)
        return SealedTicket.parse(params).open() if params else None, self.step()

    def preempt(self) -> None:
        self.manager.free(SimpleNamespace(request_id=P1))


@pytest.fixture
def prefill() -> Prefill:
    return Prefill()


def test_an_offer_has_the_nonce_of_its_pair_ticket(prefill: Prefill) -> None:
    assert prefill.arrive() == [EXPECTED]
    offer = prefill.compute()
    assert (offer.nonce, offer.context, offer.is_early) == (PAIR.nonce, NOW, True)
    ticket, commands = prefill.finish()
    assert commands == [PublishOffer(PAIR.nonce, P1)]
    assert ticket == replace(PAIR, is_early=False, epoch=3)


def test_a_preempted_request_keeps_its_pair(prefill: Prefill) -> None:
    prefill.arrive()
    prefill.compute()
    prefill.preempt()
    assert prefill.step() == [WithdrawOffer(PAIR.nonce, is_final=False)]
    prefill.manager.tables["p1"] = (TABLE,)
    assert prefill.compute().nonce == PAIR.nonce
    assert prefill.finish()[1] == [PublishOffer(PAIR.nonce, P1)]


@pytest.mark.parametrize("is_computed", [False, True], ids=["queued", "computed"])
def test_a_request_that_ends_otherwise_tells_the_ranks(
    prefill: Prefill, *, is_computed: bool
) -> None:
    prefill.arrive()
    if is_computed:
        prefill.compute()
    assert prefill.finish("it was aborted") == (None, [WithdrawOffer(PAIR.nonce)])


def test_a_cache_reset_withdraws_half_computed_prompts(prefill: Prefill) -> None:
    prefill.arrive()
    prefill.scheduler.reset_cache()
    assert prefill.step() == [WithdrawOffer(PAIR.nonce)]
    assert prefill.finish() == (None, [])


def test_a_cache_reset_ends_the_pair_of_a_preempted_request(prefill: Prefill) -> None:
    """Decode may have read a part that was computed with the former weights."""
    prefill.arrive()
    prefill.compute()
    prefill.preempt()
    prefill.manager.tables["p1"] = ((),)
    prefill.scheduler.reset_cache()
    assert prefill.step()[-1] == WithdrawOffer(PAIR.nonce)
    assert prefill.finish() == (None, [])


def test_a_promise_with_the_nonce_of_another_offer_is_ignored(prefill: Prefill) -> None:
    """Without a key, a client could send one."""
    prefill.arrive(None)
    other = prefill.compute().nonce
    assert prefill.arrive(other, P2) == []
    prefill.scheduler.decline(other)
    assert prefill.step() == []


def test_a_nonce_that_was_forgotten_names_no_second_offer(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After MAX_PROMISED others, while its request waits."""
    monkeypatch.setattr("nixl_kv.connector.prefill.MAX_PROMISED", 0)
    assert prefill.arrive() == [EXPECTED]
    assert prefill.arrive(request=P2) == []


def test_a_pair_ticket_is_good_for_one_request(prefill: Prefill) -> None:
    assert prefill.arrive() == [EXPECTED]
    assert prefill.arrive(request=P2) == []
    prefill.scheduler.decline(NONCE)
    assert prefill.step() == []


def test_a_request_that_is_not_offered_is_declined(prefill: Prefill) -> None:
    prefill.scheduler.decline(NONCE)
    assert prefill.step() == [WithdrawOffer(PAIR.nonce)]


# --- prefill, in parts

Offered: TypeAlias = tuple[int | None, int, bool] | None
"""`computed`, `life` and `in_parts` of the step's offer; None if the step offers nothing."""


@dataclass(frozen=True)
class Begin:
    """vLLM asks whether the request may begin; `local` tokens are in its own prefix cache."""

    local: int = 0


class Preempt:
    """And vLLM gives it other blocks."""


class Reset:
    """vLLM resets the connector's cache."""


OTHER_TABLE = [6, 7, 8, 9, 10]
Chunk: TypeAlias = tuple[Begin | Preempt | Reset | range, Offered]
BEGIN: Chunk = (Begin(), None)
PREEMPT: Chunk = (Preempt(), None)
RESET: Chunk = (Reset(), None)
FIRST: Sequence[Chunk] = [BEGIN, (range(8), (8, 0, True))]
CHUNKS: dict[str, Sequence[Chunk]] = {
    "each step offers the tokens computed so far": [
        *FIRST,
        (range(8, 13), (13, 0, True)),
        (range(13, 20), (None, 0, True)),
        (range(20, 21), None),
    ],
    "a prompt that one step computes": [BEGIN, (range(20), (None, 0, True))],
    "a last token that a step of its own computes": [
        *FIRST,
        (range(8, 19), (19, 0, True)),
        (range(19, 20), (None, 0, True)),
    ],
    "a prefix in vLLM's own cache": [
        (Begin(local=8), None),
        (range(8, 12), (12, 0, True)),
        (range(12, 20), (None, 0, True)),
    ],
    # vLLM may void what another connector loads, and compute it again.
    "another connector loads the beginning": [
        BEGIN,
        (range(8, 12), None),
        (range(12, 20), (None, 0, False)),
    ],
    "another connector loads what follows vLLM's own cache": [
        (Begin(local=4), None),
        (range(8, 12), None),
        (range(12, 20), (None, 0, False)),
    ],
    "another connector loads between two chunks": [
        *FIRST,
        (range(12, 16), None),
        (range(16, 20), (None, 0, False)),
    ],
    "a preemption": [
        *FIRST,
        PREEMPT,
        BEGIN,
        (range(4), (4, 1, True)),
        (range(4, 20), (None, 1, True)),
    ],
    "a preemption after all was computed": [
        *FIRST,
        (range(8, 20), (None, 0, True)),
        PREEMPT,
        (Begin(local=16), None),
        (range(16, 20), (None, 1, True)),
    ],
    "two preemptions": [
        *FIRST,
        PREEMPT,
        BEGIN,
        (range(12), (12, 1, True)),
        PREEMPT,
        BEGIN,
        (range(6), (6, 2, True)),
        (range(6, 20), (None, 2, True)),
    ],
    "a preemption before the first chunk ends no life": [
        BEGIN,
        PREEMPT,
        BEGIN,
        (range(8), (8, 0, True)),
    ],
    "after a preemption another connector has the beginning": [
        *FIRST,
        PREEMPT,
        BEGIN,
        (range(8, 12), None),
        (range(12, 20), (None, 1, False)),
    ],
    "after a preemption it has it no longer": [
        BEGIN,
        (range(8, 12), None),
        PREEMPT,
        BEGIN,
        (range(8), (8, 0, True)),
        (range(8, 20), (None, 0, True)),
    ],
    "a cache reset between two chunks": [
        *FIRST,
        RESET,
        (range(8, 16), None),
        (range(16, 20), None),
    ],
    "a cache reset after a preemption": [
        *FIRST,
        PREEMPT,
        RESET,
        BEGIN,
        (range(8), None),
        (range(8, 20), None),
    ],
}


def offered(commands: Sequence[Command], table: Sequence[int]) -> Offered:
    found = [each for each in commands if isinstance(each, PrepareOffer)]
    assert len(found) <= 1
    for offer in found:
        assert (offer.nonce, offer.is_early, offer.is_written) == (PAIR.nonce, True, False)
        num_blocks = -(-(offer.computed or NUM_TOKENS) // 4)
        assert offer.tables == (Table.of(table[:num_blocks]),), "no block that is not written"
        return offer.computed, offer.attempt, offer.in_parts
    return None


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
def test_a_pair_is_offered_in_parts(chunks: Sequence[Chunk]) -> None:
    prefill, table = Prefill(in_parts=True), TABLE
    prefill.arrive()
    for number, (act, expected) in enumerate(chunks):
        commands: list[Command] = []
        match act:
            case Begin():
                prefill.scheduler.may_begin(P1, NUM_TOKENS, act.local)
            case Preempt():
                prefill.preempt()
                table = OTHER_TABLE if table is TABLE else TABLE
                prefill.manager.tables["p1"] = (table,)
            case Reset():
                prefill.scheduler.reset_cache()
            case range():
                commands = prefill.step([(P1, act)])
        assert offered(commands, table) == expected, f"step {number} of {len(chunks)}: {act}"


@pytest.mark.parametrize(
    ("options", "pair"),
    [
        pytest.param({"in_parts": False}, NONCE, id="an engine that offers no parts"),
        pytest.param({"in_parts": True, "window": 8}, NONCE, id="blocks that vLLM frees meanwhile"),
        pytest.param({"in_parts": True}, None, id="no pair"),
    ],
)
def test_other_offers_wait_for_the_last_chunk(options: dict[str, Any], pair: Nonce | None) -> None:
    prefill = Prefill(**options)
    prefill.arrive(pair)
    prefill.scheduler.may_begin(P1, NUM_TOKENS)
    assert prefill.step([(P1, range(8))]) == []
    assert prefill.step([(P1, range(8, 16))]) == []
    (offer,) = prefill.step([(P1, range(16, 20))])
    assert isinstance(offer, PrepareOffer)
    assert (offer.computed, offer.in_parts, offer.is_early) == (None, False, pair is not None)


# --- prefill in chunks

LATER = [21, 22, 23, 24, 25]


@pytest.fixture
def chunks() -> Prefill:
    """A prefill of two chunks, of which decode may read the first."""
    prefill = Prefill(in_parts=True)
    prefill.arrive()
    assert prefill.scheduler.may_begin(P1, NUM_TOKENS)
    prefill.manager.tables["p1"] = (TABLE[:3],)
    (first,) = prefill.step([(P1, range(10))])
    assert isinstance(first, PrepareOffer)
    assert (first.computed, first.in_parts, first.attempt) == (10, True, 0)
    return prefill


BACK = WithdrawOffer(PAIR.nonce, is_final=False)


def test_a_table_that_grows_is_the_same(chunks: Prefill) -> None:
    chunks.manager.tables["p1"] = (TABLE[:4],)
    assert chunks.step() == []
    chunks.manager.tables["p1"] = (TABLE,)
    (last,) = chunks.step([(P1, range(10, NUM_TOKENS))])
    assert isinstance(last, PrepareOffer)
    assert (last.computed, last.attempt) == (None, 0)
    assert chunks.step() == []
    assert chunks.finish()[1] == [PublishOffer(PAIR.nonce, P1)]
    chunks.manager.tables["p1"] = (LATER,)
    assert chunks.step() == [], "the offer holds its blocks now, whatever vLLM says"


@pytest.mark.parametrize(
    "table",
    [
        pytest.param([], id="freed"),
        pytest.param(TABLE[:2], id="cut"),
        pytest.param([*TABLE[:2], 99], id="one replaced"),
        pytest.param(LATER, id="others"),
    ],
)
@pytest.mark.parametrize("is_last", [False, True], ids=["a part", "all of the prompt"])
def test_a_request_that_loses_blocks_loses_its_grant_in_the_same_step(
    chunks: Prefill, caplog: pytest.LogCaptureFixture, table: list[int], *, is_last: bool
) -> None:
    """VLLM may free blocks by a method that `RequestBlocks.bind` does not know."""
    if is_last:
        chunks.manager.tables["p1"] = (TABLE,)
        chunks.step([(P1, range(10, NUM_TOKENS))])
    chunks.manager.tables["p1"] = (table,)
    assert chunks.step() == [BACK]
    assert f"request {P1} lost blocks that decode may read" in caplog.text
    assert chunks.step() == [], "once"
    assert chunks.scheduler.may_begin(P1, NUM_TOKENS)
    chunks.manager.tables["p1"] = (LATER,)
    (again,) = chunks.step([(P1, range(12))])
    assert isinstance(again, PrepareOffer)
    assert (again.computed, again.attempt) == (12, 1)


def test_a_request_that_vllm_names_as_preempted_loses_its_grant(chunks: Prefill) -> None:
    assert chunks.step([], [P2]) == []
    assert chunks.step([], [P1]) == [BACK]
    assert chunks.step([], [P1]) == []


def test_a_preempted_request_that_runs_again_at_once_has_another_life(chunks: Prefill) -> None:
    chunks.preempt()
    chunks.scheduler.may_begin(P1, NUM_TOKENS)
    chunks.manager.tables["p1"] = (TABLE,)
    back, again = chunks.step([(P1, range(8))], [P1])
    assert back == BACK
    assert isinstance(again, PrepareOffer)
    assert (again.computed, again.attempt) == (8, 1)


@pytest.mark.parametrize("is_early", [False, True])
def test_a_request_that_vllm_sends_back_loses_its_grant(*, is_early: bool) -> None:
    """VLLM discards a step if KV that it loaded synchronously is invalid; the blocks stay."""
    prefill = Prefill(in_parts=True)
    prefill.arrive(NONCE if is_early else None)
    prefill.scheduler.may_begin(P1, NUM_TOKENS)
    (first,) = prefill.step([(P1, range(NUM_TOKENS))])
    back, again = prefill.step([(P1, range(4, NUM_TOKENS))])
    assert isinstance(first, PrepareOffer)
    assert isinstance(again, PrepareOffer)
    assert back == WithdrawOffer(first.nonce, is_final=not is_early)
    assert (again.nonce == first.nonce, again.attempt) == (is_early, 1)
    assert prefill.finish()[1] == [PublishOffer(again.nonce, P1)]


def test_rejected_drafts_do_not_count_as_a_way_back(chunks: Prefill) -> None:
    """They are tokens of the answer: decode does not read their blocks."""
    chunks.manager.tables["p1"] = ([*TABLE, 16, 17],)
    chunks.step([(P1, range(10, NUM_TOKENS))])
    assert chunks.step([(P1, range(NUM_TOKENS, NUM_TOKENS + 4))]) == []
    assert chunks.step([(P1, range(NUM_TOKENS + 1, NUM_TOKENS + 5))]) == []
    assert chunks.finish()[1] == [PublishOffer(PAIR.nonce, P1)]


# --- decode


@pytest.fixture
def decode() -> DecodeScheduler:
    scheduler = DecodeScheduler([Paging(0, 4, 0)], SealedTicket.parse)
    scheduler.on_new_request(prompt(), PAIR.params(None))
    return scheduler


def test_decode_asks_before_prefill_has_computed(decode: DecodeScheduler) -> None:
    (command,) = decode.build_connector_meta()
    assert isinstance(command, PrepareLoad)
    assert command.ticket.is_early
    assert command.ticket == PAIR


def test_decode_refuses_an_early_ticket_for_another_prompt(decode: DecodeScheduler) -> None:
    """At once: prefill need not compute it first."""
    other = replace(PAIR, nonce=Nonce(hex32(8)))  # the nonce is the key of the hash
    with pytest.raises(TicketRefused, match="for another prompt"):
        decode.on_new_request(prompt(), other.params(None))


def test_a_request_waits_without_blocks_until_prefill_computes_it(decode: DecodeScheduler) -> None:
    decode.build_connector_meta()
    for _ in range(3):
        assert decode.get_num_new_matched_tokens(D1, 4) == (None, False)
    decode.on_ready([D1, RequestId("other")])
    assert decode.get_num_new_matched_tokens(D1, 4) == (NUM_TOKENS - 1 - 4, True)
    decode.update_state_after_alloc(D1, (TABLE,), NUM_TOKENS - 1 - 4)
    (start,) = decode.build_connector_meta()
    assert isinstance(start, StartLoad)
    assert (start.begin, start.end) == (4, NUM_TOKENS - 1)


def test_a_prompt_in_the_local_cache_does_not_wait(decode: DecodeScheduler) -> None:
    decode.build_connector_meta()
    assert decode.get_num_new_matched_tokens(D1, NUM_TOKENS - 1) == (0, False)
    decode.update_state_after_alloc(D1, (TABLE,), 0)
    assert decode.build_connector_meta() == [CancelLoad(D1)]


@pytest.mark.parametrize("end", ["request_finished", "reset_cache"])
def test_a_request_that_waits_can_end(decode: DecodeScheduler, end: str) -> None:
    decode.build_connector_meta()
    decode.reset_cache() if end == "reset_cache" else decode.request_finished(D1)
    assert decode.build_connector_meta() == [CancelLoad(D1)]
    assert decode.get_num_new_matched_tokens(D1, 0) == (0, False)
    decode.on_ready([D1])
