"""Prefill's scheduler: which requests are offered, when, and with which ticket. No vLLM needed."""

import logging
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.connector.decode import Prompt
from nixl_kv.connector.paging import Paging, RequestBlocks
from nixl_kv.connector.prefill import (
    BLOCK_WAIT_S,
    OFFER_TRANSITIONS,
    Address,
    OfferEvent,
    OfferState,
    PrefillScheduler,
)
from nixl_kv.geometry.layout import Table
from nixl_kv.ids import Nonce, RequestId
from nixl_kv.protocol.events import (
    Command,
    PrepareOffer,
    PublishOffer,
    ReclaimBlocks,
    RevokeOffer,
    WithdrawOffer,
)
from nixl_kv.protocol.ticket import SealedTicket, Ticket, context_hash, weights_hash
from support.cache_manager import CacheManager
from support.records import ENGINE_LIFE, P1, P2, PREFILL
from support.stepped import Clock

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
        self.blocks = blocks = RequestBlocks([FULL, WINDOW], 20)
        self.scheduler = PrefillScheduler(blocks, share, lambda ticket: ticket.params(KEY))
        blocks.bind(self.manager, self.scheduler.on_free)
        self.scheduler.address = ADDRESS

    def arrive(self, request: RequestId = P1) -> None:
        prompt = Prompt(request, NUM_TOKENS, TOKEN_IDS, (b"lora a",))
        self.scheduler.on_new_request(request, NUM_TOKENS, prompt.hashes)

    def step(self, *scheduled: tuple[RequestId, range]) -> list[Command]:
        return self.scheduler.build_connector_meta(scheduled)

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
        is_pinned, params = self.scheduler.request_finished(request, tables, reason=reason)
        assert is_pinned is (params is not None)
        ticket = None if params is None else SealedTicket.parse(params)
        return ticket, self.scheduler.build_connector_meta()


@pytest.fixture
def side() -> Side:
    return Side()


# --- an offer


def test_an_offer_is_prepared_by_the_step_that_completes_the_prompt(side: Side) -> None:
    side.arrive()
    assert side.step((P1, range(8))) == []
    assert side.step((P1, range(8, 19))) == []
    (prepare,) = side.step((P1, range(19, 20)))
    assert isinstance(prepare, PrepareOffer)
    assert (prepare.request, prepare.num_tokens) == (P1, NUM_TOKENS)
    assert prepare.tables == (Table.of([1, 2, 3, 4, 5]), Table.of([8, 9, 10], first=2))
    context = context_hash(prepare.nonce, TOKEN_IDS, [b"lora a"])
    assert prepare.context == context + weights_hash(3, "step 7")
    assert side.step((P1, range(20, 21))) == []


HOOKS: dict[OfferEvent, Callable[[Side], object]] = {
    OfferEvent.COMPUTED: lambda side: side.step((P1, range(NUM_TOKENS))),
    OfferEvent.WITHDRAWN: lambda side: side.free(),
    OfferEvent.PUBLISHED: lambda side: side.finish(),
    OfferEvent.CLAIMED: lambda side: side.scheduler.on_granted([P1]),
    OfferEvent.ENDED: lambda side: side.scheduler.update_connector_output([P1]),
}
BEFORE: dict[OfferState, list[OfferEvent]] = {
    OfferState.AWAITED: [],
    OfferState.PREPARED: [OfferEvent.COMPUTED],
    OfferState.OPEN: [OfferEvent.COMPUTED, OfferEvent.PUBLISHED],
    OfferState.KEPT: [OfferEvent.COMPUTED, OfferEvent.PUBLISHED, OfferEvent.CLAIMED],
}


@pytest.mark.parametrize(
    ("state", "event", "after"),
    [(state, *move) for state, moves in OFFER_TRANSITIONS.items() for move in moves.items()],
    ids=lambda each: getattr(each, "name", "over"),
)
def test_each_transition_of_an_offer(
    side: Side, state: OfferState, event: OfferEvent, after: OfferState | None
) -> None:
    side.arrive()
    for earlier in (*BEFORE[state], event):
        HOOKS[earlier](side)
        side.scheduler.check()
    known = {offer.request: offer.state for offer in side.scheduler._known()}
    assert known.get(P1) is after


def test_a_finished_request_is_published_with_its_ticket(side: Side) -> None:
    side.arrive()
    prepare = side.compute()
    ticket, commands = side.finish()
    assert ticket is not None
    assert commands == [PublishOffer(prepare.nonce, P1)]
    assert side.manager.block_pool.pinned == {8, 9, 10}, "windows, until the offer has ended"
    side.scheduler.update_connector_output([P1])
    assert side.manager.block_pool.pinned == set()
    side.scheduler.update_connector_output([P1, P2])
    ticket.check_mac(KEY)
    expected = Ticket(
        engine=ADDRESS.engine,
        host=ADDRESS.host,
        port=ADDRESS.port,
        incarnation=ADDRESS.incarnation,
        nonce=prepare.nonce,
        num_tokens=NUM_TOKENS,
        context=context_hash(prepare.nonce, TOKEN_IDS, [b"lora a"]),
        epoch=ADDRESS.epoch,
        weights=ADDRESS.weights,
    )
    assert ticket.open() == expected


def test_the_prompt_is_kept_until_the_ticket_leaves(side: Side) -> None:
    """Its embeddings may be hundreds of megabytes."""

    def make_hashes(nonce: Nonce) -> tuple[str, str]:
        return Prompt(P1, NUM_TOKENS, TOKEN_IDS).hashes(nonce)

    maker = weakref.ref(make_hashes)
    side.scheduler.on_new_request(P1, NUM_TOKENS, make_hashes)
    del make_hashes
    side.compute()
    assert maker() is not None
    side.finish()
    assert maker() is None


# --- requests that are not offered


@pytest.mark.parametrize(
    ("trouble", "finish", "reason"),
    [
        ("incomplete", {"reason": "it was aborted"}, "it was aborted"),
        ("other blocks", {"tables": ([1, 2, 3, 7, 5], TABLES[1])}, "its blocks changed"),
        ("a window that is not pinned", {}, "its blocks changed"),
        ("no address", {}, "this engine is not described yet"),
    ],
)
def test_an_offer_that_cannot_be_read_is_withdrawn(
    side: Side,
    caplog: pytest.LogCaptureFixture,
    trouble: str,
    finish: dict[str, Any],
    reason: str,
) -> None:
    side.arrive()
    nonce = side.compute().nonce
    assert side.manager.block_pool.pinned == {8, 9, 10}
    if trouble == "a window that is not pinned":
        side.blocks.unpin(side.scheduler._awaited[P1].pins)
    elif trouble == "no address":
        side.scheduler.address = None
    with caplog.at_level(logging.INFO):
        assert side.finish(**finish) == (None, [WithdrawOffer(nonce)])
    assert f"request p1 is not offered: {reason}" in caplog.text
    assert side.manager.block_pool.pinned == set()


@pytest.mark.parametrize("error", [ValueError("engine: bad"), UnicodeEncodeError, KeyError("x")])
def test_an_error_while_a_ticket_is_made_costs_that_offer_alone(
    side: Side, caplog: pytest.LogCaptureFixture, error: Any
) -> None:
    """VLLM would end the engine. Its blocks are not kept, and the workers forget the offer."""

    def fail(_: Ticket) -> dict[str, Any]:
        if error is UnicodeEncodeError:
            "\ud800".encode()
        raise error

    seal, side.scheduler._seal = side.scheduler._seal, fail
    side.arrive()
    nonce = side.compute().nonce
    with caplog.at_level(logging.INFO):
        assert side.finish() == (None, [WithdrawOffer(nonce)])
    assert "request p1 is not offered: its ticket cannot be made: " in caplog.text
    assert side.manager.block_pool.pinned == set()
    assert (side.scheduler.num_offers, side.scheduler.num_held_blocks) == (0, 0)
    side.scheduler._seal = seal
    side.arrive(P2)
    side.compute(P2)
    ticket, _ = side.finish(P2)
    assert ticket is not None


# --- blocks that are held


@pytest.mark.parametrize("is_deferred", [False, True], ids=["at once", "deferred"])
def test_a_preemption_ends_prepared_offers_at_once(side: Side, *, is_deferred: bool) -> None:
    """A paused engine makes no step, and its cache is reset as soon as all blocks are free."""
    side.arrive()
    first = side.compute()
    side.free(is_deferred=is_deferred)
    assert side.manager.block_pool.pinned == set()
    assert side.scheduler.build_connector_meta() == [WithdrawOffer(first.nonce)]
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
    side.scheduler.build_connector_meta()
    with caplog.at_level(logging.INFO):
        assert side.finish() == (None, [])
    assert caplog.messages == ["request p1 is not offered: its prompt was not computed in a step"]


def test_the_null_block_counts_for_no_offer() -> None:
    """5 blocks of the one group, and 3 of the other, in a cache where 8 may be held."""
    side = Side(share=0.4)
    side.manager.tables["p2"] = ([1, 2, 3, 4, 5], [0, 0, 8, 9, 10])
    for request in (P1, P2):
        side.arrive(request)
        side.compute(request)
        _, commands = side.finish(request)
        assert len(commands) == 1


# --- how many blocks offers may hold


class Budget:
    """A cache of `num_blocks` blocks of one token, of which offers may hold a share."""

    def __init__(
        self, num_blocks: int, share: float, *, is_decoding: bool = True, clock: Clock | None = None
    ) -> None:
        self.manager = CacheManager()
        blocks = RequestBlocks([Paging(0, 1, 0)], num_blocks + 1, self.manager)  # and a null block
        share = num_blocks * share / (num_blocks + 1) + 1e-9
        self.scheduler = PrefillScheduler(
            blocks, share, lambda _: {}, is_decoding=lambda: is_decoding, clock=clock or Clock()
        )
        self.scheduler.address = ADDRESS
        self._numbers: dict[Nonce, int] = {}

    def arrive(self, number: int, num_blocks: int) -> RequestId:
        request = RequestId(f"p{number}")
        self.scheduler.on_new_request(request, num_blocks, lambda nonce: (nonce, ""))
        return request

    def offer(self, number: int, blocks: set[int], request: RequestId | None = None) -> list[int]:
        """Publish an offer of these blocks; the offers that are revoked."""
        request = request or self.arrive(number, len(blocks))
        table = [block + 1 for block in blocks]
        self.manager.tables[request] = [table]
        scheduler = self.scheduler
        (prepare,) = scheduler.build_connector_meta([(request, range(len(blocks)))])
        assert isinstance(prepare, PrepareOffer)
        self._numbers[prepare.nonce] = number
        scheduler.request_finished(request, [table], reason="")
        _, *revoked = scheduler.build_connector_meta()
        return [self._numbers[one.nonce] for one in revoked if isinstance(one, RevokeOffer)]

    def end(self, number: int) -> None:
        self.scheduler.update_connector_output([RequestId(f"p{number}")])

    def has_room(self, num_blocks: int) -> bool:
        """Whether a prompt of this length may begin in the next step; it does not."""
        request = self.arrive(99, num_blocks)
        may_begin = self.scheduler.may_begin(request, num_blocks)
        self.scheduler.request_finished(request, [[]], reason="aborted")
        self.scheduler.build_connector_meta()
        return may_begin


def test_a_block_of_several_offers_counts_once() -> None:
    """They share a prefix, so that revoking one of them frees nothing of it."""
    budget = Budget(10, 0.5)
    for number in range(9):
        assert budget.offer(number, {1, 2, 3, 4}) == []
    assert budget.offer(9, {1, 2, 3, 4, 5, 6}) == list(range(9))


def test_a_prefill_may_begin_while_offers_leave_room_or_hold_nothing() -> None:
    budget = Budget(10, 0.5)
    assert budget.has_room(9)
    expected = budget.arrive(0, 3)
    budget.scheduler.update_state_after_alloc(expected)
    assert (budget.has_room(2), budget.has_room(3)) == (True, False)
    budget.scheduler.on_free(expected)  # preempted
    assert budget.has_room(5)
    budget.scheduler.update_state_after_alloc(expected)
    budget.scheduler.update_state_after_alloc(expected)
    assert (budget.has_room(2), budget.has_room(3)) == (True, False)
    budget.offer(0, {1, 2, 3}, expected)  # it counts by its blocks now
    assert (budget.has_room(2), budget.has_room(3)) == (True, False)
    budget.end(0)
    budget.offer(0, {1, 2})
    assert (budget.has_room(3), budget.has_room(4)) == (True, False)


def test_a_revoked_offer_holds_its_blocks_until_it_has_ended() -> None:
    """A reader may have claimed it."""
    budget = Budget(10, 0.5)
    budget.offer(0, {1, 2, 3, 4})
    assert budget.offer(1, {5, 6, 7, 8}) == [0]
    assert not budget.has_room(1)
    budget.end(0)
    assert budget.has_room(1)
    assert budget.scheduler.num_offers == 1
    budget.end(1)
    assert budget.scheduler.num_offers == 0


budget_steps = st.lists(
    st.one_of(
        st.sets(st.integers(1, 30), min_size=1, max_size=12),  # an offer of these blocks
        st.integers(0, 20),  # that offer has ended
    ),
    max_size=40,
)


@given(steps=budget_steps, share=st.floats(0.05, 1))
def test_unclaimed_offers_fit_whatever_happens(steps: list[set[int] | int], share: float) -> None:
    budget = Budget(31, share)
    held: dict[int, set[int]] = {}
    for number, step in enumerate(steps):
        if isinstance(step, int):
            budget.end(step)
            held.pop(step, None)
            continue
        held[number] = step
        for revoked in budget.offer(number, step):
            assert revoked == next(iter(held)), "an older one stayed"
            del held[revoked]
        assert len(held) <= 1 or len(set.union(*held.values())) <= budget.scheduler._allowed


def test_no_prompt_passes_a_longer_one_that_waits() -> None:
    """Short ones would overtake it for ever."""
    budget = Budget(10, 0.5)
    first, long, short = (budget.arrive(number, size) for number, size in enumerate((3, 4, 1)))
    budget.scheduler.update_state_after_alloc(first)

    def begin(*queue: RequestId) -> list[bool]:
        """vLLM asks in this order; then the step ends."""
        may_begin = [budget.scheduler.may_begin(request, 1) for request in queue]
        budget.scheduler.build_connector_meta()
        return may_begin

    decodes = RequestId("decodes")
    assert begin(long, short, decodes) == [False, False, True]
    assert begin(short, long) == [True, False]
    budget.scheduler.request_finished(first, [[]], reason="aborted")
    assert begin(long, short) == [True, True]


def test_an_engine_that_only_prefills_lets_all_begin() -> None:
    budget = Budget(10, 0.5, is_decoding=False)
    for number in range(5):
        request = budget.arrive(number, 3)
        assert budget.scheduler.may_begin(request, 3)
        budget.scheduler.update_state_after_alloc(request)


# --- when a request waits for blocks

Step = Sequence[int | str]
"""The events in it: a request asks for this number of blocks, or `progress`."""


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([(0, [5]), (BLOCK_WAIT_S, [5])], [0, 5], id="patience ends"),
        pytest.param([(0, [5]), (BLOCK_WAIT_S, [])], [0, 0], id="no request waits any longer"),
        pytest.param([(0, [5]), (0.5, []), (BLOCK_WAIT_S, [5])], [0, 0, 0], id="another one waits"),
        pytest.param([(0, [5]), (BLOCK_WAIT_S, ["progress", 5])], [0, 0], id="an offer has ended"),
        pytest.param(
            [
                (times * BLOCK_WAIT_S, [blocks])
                for times, blocks in ((0, 5), (1, 5), (1.5, 5), (2, 7))
            ],
            [0, 5, 0, 7],
            id="again, if that was not enough",
        ),
        pytest.param(
            [(0, [9, "progress", 3]), (BLOCK_WAIT_S, [3])], [0, 3], id="the next one waits"
        ),
    ],
)
def test_when_blocks_must_come_free(
    steps: Sequence[tuple[float, Step]], expected: Sequence[int]
) -> None:
    clock = Clock()
    start = clock.now
    budget = Budget(20, 0.5, clock=clock)
    budget.offer(0, {0})

    def reclaimed() -> int:
        """At the end of a step."""
        commands = budget.scheduler.build_connector_meta()
        return sum(one.num_blocks for one in commands if isinstance(one, ReclaimBlocks))

    needed = []
    for when, step in steps:
        clock.now = start + when
        for each in step:
            if isinstance(each, int):
                assert budget.scheduler.may_begin(P1, each)
            else:
                budget.scheduler.update_state_after_alloc(P2)
        needed.append(reclaimed())
    assert needed == expected
    budget.end(0)
    for _ in range(3):
        clock.now += BLOCK_WAIT_S
        assert budget.scheduler.may_begin(P1, 5)
        assert reclaimed() == 0, "no offer exists"


# --- when a running request waits for blocks

ASK, GRANT, END = "ask", "grant", "end"
Shortage = Sequence[tuple[float, Sequence[str], list[bool]]]
"""The time of a step, what happens in it, and the answers to vLLM's questions."""


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([(0, [ASK], [False]), (9, [ASK], [False])], id="no offer is claimed"),
        pytest.param(
            [(0, [GRANT, ASK, ASK], [True, True]), (0.99, [ASK], [True]), (1, [ASK], [False])],
            id="patience ends",
        ),
        pytest.param(
            [(0, [GRANT, ASK], [True]), (0.5, [], []), (5, [ASK], [True]), (5.99, [ASK], [True])],
            id="it got blocks, and lacks some later",
        ),
        pytest.param(
            [(0, [GRANT, ASK], [True]), (1, [ASK], [False]), (2, [], []), (9, [ASK], [False])],
            id="it has waited in vain before",
        ),
        pytest.param(
            [(0, [GRANT, ASK], [True]), (0.9, [END, ASK], [True]), (1.8, [ASK], [True])],
            id="offers end meanwhile",
        ),
        pytest.param(
            [
                *[(0, [GRANT, ASK], [True]), (1, [ASK], [False])],
                *[(2, [END, ASK], [True]), (3, [ASK], [False])],
            ],
            id="an offer has ended since",
        ),
        pytest.param(
            [(0, [GRANT, ASK], [True]), (0.5, [END, END, ASK], [False])], id="all have ended"
        ),
    ],
)
def test_how_long_a_running_request_waits_for_blocks(steps: Shortage) -> None:
    clock = Clock()
    start = clock.now
    budget = Budget(20, 1.0, is_decoding=False, clock=clock)
    open_offers = [0, 1]
    for number in open_offers:
        budget.offer(number, {number})
    scheduler = budget.scheduler
    for when, happens, expected in steps:
        clock.now = start + when * BLOCK_WAIT_S
        answers = []
        for each in happens:
            if each == GRANT:
                scheduler.on_granted([RequestId(f"p{number}") for number in (*open_offers, 7)])
            elif each == END:
                budget.end(open_offers.pop())
            else:
                answers.append(scheduler.has_pending_block_frees())
        assert answers == expected
        waits = any(answers) and answers[-1]
        assert scheduler.may_begin(RequestId("other"), 1) is not waits, "it would take the blocks"
        scheduler.build_connector_meta()
        assert scheduler.may_begin(RequestId("other"), 1)
        scheduler.update_state_after_alloc(RequestId("other"))


def test_a_running_request_of_an_engine_that_decodes_does_not_wait() -> None:
    """Clients read the answers of the others."""
    budget = Budget(20, 1.0)
    budget.offer(0, {0})
    budget.scheduler.on_granted([RequestId("p0")])
    assert not budget.scheduler.has_pending_block_frees()


def test_a_claimed_offer_counts_no_longer_as_unclaimed() -> None:
    budget = Budget(10, 0.5)
    budget.offer(0, {0, 1, 2})
    budget.scheduler.on_granted([RequestId("p0")])
    assert budget.offer(1, {3, 4, 5}) == [], "there is room for it"
    assert budget.offer(2, {6, 7, 8}) == [1]


def test_a_claimed_offer_leaves_the_budget_to_later_ones() -> None:
    budget = Budget(10, 0.5)
    budget.offer(0, {0, 1, 2, 3})
    budget.scheduler.on_granted([RequestId("p0")])
    assert [budget.offer(1, {4, 5}), budget.offer(2, {6, 7})] == [[], []]
