"""Prefill's scheduler: which requests are offered, and with which ticket. It needs no vLLM."""

import logging
import weakref
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from nixl_kv.connector.block_pinning import PinnedBlocks
from nixl_kv.connector.offer_quota import OfferQuota
from nixl_kv.connector.paging import Paging
from nixl_kv.connector.prefill import Address, PrefillScheduler
from nixl_kv.connector.prompt import Prompt
from nixl_kv.geometry.layout import Table
from nixl_kv.ids import Nonce, RequestId
from nixl_kv.protocol.events import (
    Command,
    PrepareOffer,
    PublishOffer,
    RevokeOffer,
    WithdrawOffer,
)
from nixl_kv.protocol.ticket import SealedTicket, Ticket, context_hash
from support.cache_manager import CacheManager
from support.records import ENGINE_LIFE, P1, P2, PREFILL

TOKEN_IDS = list(range(100, 120))
NUM_TOKENS = len(TOKEN_IDS)
FULL, WINDOW = Paging(0, 4, 0), Paging(1, 4, 8)
TABLES = ([1, 2, 3, 4, 5], [0, 0, 8, 9, 10])
KEY = b"k" * 32
ADDRESS = Address(PREFILL, ENGINE_LIFE, "10.0.0.1", 5600, epoch=3, weights="step 7")


class Side:
    """The scheduler's half, with a cache manager that holds `TABLES` for every request."""

    def __init__(self, *, share: float = 0.5) -> None:
        self.manager = CacheManager({"p1": TABLES, "p2": TABLES})
        blocks = PinnedBlocks([FULL, WINDOW])
        self.scheduler = PrefillScheduler(
            blocks, OfferQuota(20, share), lambda ticket: ticket.params(KEY)
        )
        blocks.bind(self.manager, self.scheduler.on_free)
        self.scheduler.address = ADDRESS

    def arrive(self, request: RequestId = P1) -> None:
        prompt = Prompt(request, NUM_TOKENS, TOKEN_IDS, (b"lora a",))
        self.scheduler.on_arrival(request, NUM_TOKENS, lambda: prompt)

    def step(self, *scheduled: tuple[RequestId, range]) -> list[Command]:
        self.scheduler.on_step(scheduled)
        return self.scheduler.pop_commands()

    def free(self, request: RequestId = P1, *, is_deferred: bool = False) -> None:
        """VLLM preempts a request; is_deferred: while a step under way may write its blocks."""
        free = self.manager.pop_blocks_for_free if is_deferred else self.manager.free
        free(SimpleNamespace(request_id=request))

    def compute(self, request: RequestId = P1) -> PrepareOffer:
        """The step that computes all of a prompt."""
        (command,) = self.step((request, range(NUM_TOKENS)))
        assert isinstance(command, PrepareOffer)
        return command

    def finish(
        self,
        request: RequestId = P1,
        *,
        reason: str = "",
        tables: Sequence[Sequence[int]] = TABLES,
    ) -> tuple[SealedTicket | None, list[Command]]:
        """The ticket, and the commands that go with it."""
        is_pinned, params = self.scheduler.on_finish(request, tables, reason=reason)
        assert is_pinned is (params is not None)
        ticket = None if params is None else SealedTicket.parse(params)
        return ticket, self.scheduler.pop_commands()


@pytest.fixture
def side() -> Side:
    return Side()


# --- an offer


def test_what_a_draft_model_writes_may_come_later(side: Side) -> None:
    side.arrive()
    assert side.compute().is_written
    side.scheduler._writes_late = True
    side.arrive(P2)
    assert not side.compute(P2).is_written


def test_an_offer_is_prepared_by_the_step_that_completes_the_prompt(side: Side) -> None:
    side.arrive()
    assert side.step((P1, range(8))) == []
    assert side.step((P1, range(8, 19))) == []
    (prepare,) = side.step((P1, range(19, 20)))
    assert isinstance(prepare, PrepareOffer)
    assert (prepare.request, prepare.num_tokens) == (P1, NUM_TOKENS)
    assert prepare.tables == (Table.of([1, 2, 3, 4, 5]), Table.of([8, 9, 10], first=2))
    assert prepare.context == context_hash(prepare.nonce, TOKEN_IDS, [b"lora a"])
    assert side.step((P1, range(20, 21))) == []


def test_a_finished_request_is_published_with_its_ticket(side: Side) -> None:
    side.arrive()
    prepare = side.compute()
    ticket, commands = side.finish()
    assert ticket is not None
    assert commands == [PublishOffer(prepare.nonce, P1)]
    ticket.check_mac(KEY)
    expected = Ticket(
        engine=ADDRESS.engine,
        host=ADDRESS.host,
        port=ADDRESS.port,
        incarnation=ADDRESS.incarnation,
        nonce=prepare.nonce,
        num_tokens=NUM_TOKENS,
        context=prepare.context,
        epoch=ADDRESS.epoch,
        weights=ADDRESS.weights,
    )
    assert ticket.open() == expected


def test_each_offer_has_a_nonce_of_its_own(side: Side) -> None:
    nonces: set[Nonce] = set()
    for request in (P1, P2, P1):
        side.arrive(request)
        nonces.add(side.compute(request).nonce)
        side.finish(request)
    assert len(nonces) == 3


def test_a_request_that_asked_for_no_offer_is_nobodys(side: Side) -> None:
    assert side.step((P1, range(NUM_TOKENS))) == []
    assert side.finish() == (None, [])


def test_the_prompt_is_kept_until_the_offer_is_out_and_no_copy_of_it(side: Side) -> None:
    """Its embeddings may be hundreds of megabytes."""
    prompts: list[weakref.ref[Prompt]] = []

    def make_prompt() -> Prompt:
        prompt = Prompt(P1, NUM_TOKENS, TOKEN_IDS)
        prompts.append(weakref.ref(prompt))
        return prompt

    maker = weakref.ref(make_prompt)
    side.scheduler.on_arrival(P1, NUM_TOKENS, make_prompt)
    del make_prompt
    side.compute()
    assert [prompt() for prompt in prompts] == [None]
    assert maker() is not None
    side.finish()
    assert maker() is None


# --- what is not offered


@pytest.mark.parametrize(
    "reason", ["it ended as FINISHED_ABORTED", "12 of 20 tokens computed"], ids=["", "computed"]
)
def test_a_request_whose_kv_is_not_complete_is_withdrawn(
    side: Side, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    side.arrive()
    nonce = side.compute().nonce
    assert side.manager.block_pool.pinned == {8, 9, 10}
    with caplog.at_level(logging.INFO):
        assert side.finish(reason=reason) == (None, [WithdrawOffer(nonce)])
    assert caplog.messages == [f"request p1 is not offered: {reason}"]
    assert side.manager.block_pool.pinned == set()


def test_a_prompt_that_no_step_computed_is_not_offered(
    side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    side.arrive()
    with caplog.at_level(logging.INFO):
        assert side.finish() == (None, [])
    assert caplog.messages == ["request p1 is not offered: its prompt was not computed in a step"]


def test_blocks_that_are_others_by_now_are_not_offered(
    side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    side.arrive()
    nonce = side.compute().nonce
    with caplog.at_level(logging.INFO):
        assert side.finish(tables=([1, 2, 3, 7, 5], TABLES[1])) == (None, [WithdrawOffer(nonce)])
    assert "its blocks changed since its prompt was computed" in caplog.text


def test_before_the_engine_is_described_nothing_is_offered(
    side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    side.scheduler.address = None
    side.arrive()
    nonce = side.compute().nonce
    with caplog.at_level(logging.INFO):
        assert side.finish() == (None, [WithdrawOffer(nonce)])
    assert "this engine is not described yet" in caplog.text


# --- blocks that are held


def test_windows_are_pinned_until_the_offer_has_ended(side: Side) -> None:
    side.arrive()
    side.compute()
    side.finish()
    assert side.manager.block_pool.pinned == {8, 9, 10}
    side.scheduler.on_end([P1])
    assert side.manager.block_pool.pinned == set()
    side.scheduler.on_end([P1, P2])


@pytest.mark.parametrize("is_deferred", [False, True], ids=["at once", "deferred"])
def test_a_preemption_ends_what_was_prepared_at_once(side: Side, *, is_deferred: bool) -> None:
    """A paused engine makes no step, and its cache is reset as soon as all blocks are free."""
    side.arrive()
    first = side.compute()
    side.free(is_deferred=is_deferred)
    assert side.manager.block_pool.pinned == set()
    assert side.scheduler.pop_commands() == [WithdrawOffer(first.nonce)]
    side.manager.tables["p1"] = ([6, 7, 8, 9, 10], [0, 0, 11, 12, 13])
    second = side.compute()
    assert second.nonce != first.nonce, "what the workers know of the first is of other blocks"
    assert second.tables == (Table.of([6, 7, 8, 9, 10]), Table.of([11, 12, 13], first=2))
    ticket, commands = side.finish(tables=side.manager.tables["p1"])
    assert ticket is not None
    assert ticket.open().nonce == second.nonce
    assert commands == [PublishOffer(second.nonce, P1)]
    assert side.manager.block_pool.pinned == {11, 12, 13}


def test_a_preempted_request_that_never_computes_its_prompts_end_again_is_not_offered(
    side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes back by a prefix hit on all of its prompt: with other blocks of the window."""
    side.arrive()
    side.compute()
    side.free()
    side.scheduler.pop_commands()
    side.manager.tables["p1"] = ([1, 2, 3, 4, 5, 6], [0, 0, 0, 11, 12, 13])
    assert side.step((P1, range(20, 21))) == []
    with caplog.at_level(logging.INFO):
        assert side.finish(tables=side.manager.tables["p1"]) == (None, [])
    assert caplog.messages == ["request p1 is not offered: its prompt was not computed in a step"]
    assert side.manager.block_pool.pinned == set()


def test_a_window_whose_blocks_are_no_longer_pinned_is_not_offered(side: Side) -> None:
    """Whatever gave them back."""
    side.arrive()
    nonce = side.compute().nonce
    side.scheduler.on_end([P1])
    assert side.finish() == (None, [WithdrawOffer(nonce)])


def test_older_offers_are_revoked_when_too_many_blocks_are_held() -> None:
    """8 blocks each, where offers may hold 10."""
    side = Side(share=0.5)
    side.manager.tables["p2"] = ([11, 12, 13, 14, 15], [0, 0, 16, 17, 18])
    nonces = []
    for request in (P1, P2):
        side.arrive(request)
        nonces.append(side.compute(request).nonce)
    _, first = side.finish(P1)
    assert first == [PublishOffer(nonces[0], P1)]
    _, second = side.finish(P2, tables=side.manager.tables["p2"])
    assert second == [PublishOffer(nonces[1], P2), RevokeOffer(nonces[0])]


def test_the_null_block_counts_for_no_offer() -> None:
    """5 blocks of the one group, and 3 of the other, in a cache where 8 may be held."""
    side = Side(share=0.4)
    side.manager.tables["p2"] = ([1, 2, 3, 4, 5], [0, 0, 8, 9, 10])
    for request in (P1, P2):
        side.arrive(request)
        side.compute(request)
        _, commands = side.finish(request)
        assert len(commands) == 1
