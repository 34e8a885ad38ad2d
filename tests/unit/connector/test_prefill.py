"""Prefill's scheduler: which requests are offered, when, and with which ticket. No vLLM needed."""

import logging
import weakref
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.connector.decode import Prompt
from nixl_kv.connector.paging import Paging, RequestBlocks
from nixl_kv.connector.prefill import BLOCK_WAIT_S, Address, PrefillScheduler
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
        self.scheduler.on_new_request(request, NUM_TOKENS, prompt.context)

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


def test_the_prompt_is_kept_until_the_ticket_leaves(side: Side) -> None:
    """Its embeddings may be hundreds of megabytes."""

    def make_context(nonce: Nonce) -> str:
        return Prompt(P1, NUM_TOKENS, TOKEN_IDS).context(nonce)

    maker = weakref.ref(make_context)
    side.scheduler.on_new_request(P1, NUM_TOKENS, make_context)
    del make_context
    side.compute()
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
    side.scheduler.update_connector_output([P1])
    assert side.manager.block_pool.pinned == set()
    side.scheduler.update_connector_output([P1, P2])


@pytest.mark.parametrize("is_deferred", [False, True], ids=["at once", "deferred"])
def test_a_preemption_ends_what_was_prepared_at_once(side: Side, *, is_deferred: bool) -> None:
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
    side.manager.tables["p1"] = ([1, 2, 3, 4, 5, 6], [0, 0, 0, 11, 12, 13])
    assert side.step((P1, range(20, 21))) == []
    with caplog.at_level(logging.INFO):
        assert side.finish(tables=side.manager.tables["p1"]) == (None, [])
    assert caplog.messages == ["request p1 is not offered: its prompt was not computed in a step"]
    assert side.manager.block_pool.pinned == set()


def test_a_window_whose_blocks_are_no_longer_pinned_is_not_offered(side: Side) -> None:
    side.arrive()
    nonce = side.compute().nonce
    side.blocks.unpin(side.scheduler._awaited[P1].pins)
    assert side.finish() == (None, [WithdrawOffer(nonce)])


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

    def __init__(self, num_blocks: int, share: float) -> None:
        self.manager = CacheManager()
        blocks = RequestBlocks([Paging(0, 1, 0)], num_blocks + 1, self.manager)  # and a null block
        share = num_blocks * share / (num_blocks + 1) + 1e-9
        self.scheduler = PrefillScheduler(blocks, share, lambda _: {}, is_decoding=lambda: True)
        self.scheduler.address = ADDRESS
        self._numbers: dict[Nonce, int] = {}

    def arrive(self, number: int, num_blocks: int) -> RequestId:
        request = RequestId(f"p{number}")
        self.scheduler.on_new_request(request, num_blocks, lambda nonce: nonce)
        return request

    def offer(self, number: int, blocks: set[int]) -> list[int]:
        """Publish an offer of these blocks; the offers that are revoked."""
        request, table = self.arrive(number, len(blocks)), [block + 1 for block in blocks]
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


def test_a_prompt_longer_than_the_share_is_offered_all_the_same() -> None:
    budget = Budget(10, 0.2)
    assert budget.offer(0, set(range(9))) == []
    assert budget.offer(1, {9}) == [0]


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
    budget.scheduler.request_finished(expected, [[]], reason="aborted")
    budget.offer(0, {1, 2})
    assert (budget.has_room(3), budget.has_room(4)) == (True, False)


def test_a_published_offer_counts_by_its_blocks_instead_of_the_expected_ones() -> None:
    budget = Budget(10, 0.5)
    request = budget.arrive(0, 4)
    budget.scheduler.update_state_after_alloc(request)
    budget.manager.tables[request] = [[1, 2, 3, 4]]
    budget.scheduler.build_connector_meta([(request, range(4))])
    budget.scheduler.request_finished(request, [[1, 2, 3, 4]], reason="")
    assert (budget.has_room(1), budget.has_room(2)) == (True, False)


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


# --- which waiting request may have blocks

BLOCK = 16
LASTS = 10
"""Steps from the beginning of a prefill to the end of its offer."""

LONG = RequestId("long")


class Queue:
    """A queue of which vLLM asks in order, in each step, on an engine of 100 blocks."""

    def __init__(self, *, is_decoding: bool = True) -> None:
        blocks = RequestBlocks([Paging(0, BLOCK, 0)], 100, CacheManager())
        self.prefill = PrefillScheduler(
            blocks, 0.5, lambda _: {}, is_decoding=lambda: is_decoding, clock=lambda: 0.0
        )
        self.waiting: dict[RequestId, int] = {}  # blocks
        self._ends: dict[RequestId, int] = {}  # in which step
        self._step = 0

    def arrive(self, name: str, num_blocks: int) -> None:
        request = RequestId(name)
        self.waiting[request] = num_blocks
        self.prefill.on_new_request(request, num_blocks * BLOCK, lambda nonce: nonce)

    def abort(self, request: RequestId) -> None:
        self.waiting.pop(request, None)
        self.prefill.request_finished(request, [[]], reason="it ended as FINISHED_ABORTED")

    def step(self) -> list[RequestId]:
        """The requests that begin."""
        self._step += 1
        for request in [request for request, step in self._ends.items() if step <= self._step]:
            del self._ends[request]
            self.abort(request)
        begun = [r for r, num in self.waiting.items() if self._begins(r, num * BLOCK)]
        for request in begun:
            del self.waiting[request]
        self.prefill.build_connector_meta()
        return begun

    def _begins(self, request: RequestId, num_tokens: int) -> bool:
        if not self.prefill.may_begin(request, num_tokens):
            return False
        self.prefill.update_state_after_alloc(request)
        self._ends[request] = self._step + LASTS
        return True


@pytest.mark.parametrize("num_blocks", [30, 40, 60], ids="a prompt of {} blocks".format)
@pytest.mark.parametrize("every", [1, 2, 5], ids="a short one every {} steps".format)
def test_a_long_prompt_begins_when_those_before_it_have_ended(num_blocks: int, every: int) -> None:
    """Offers may hold 50 blocks of 100. A prompt that is longer begins alone."""
    queue = Queue()
    for step in range(200):
        if step % every == 0:
            queue.arrive(f"s{step}", 5)
        if step == 50:
            queue.arrive(LONG, num_blocks)
        if LONG in queue.step():
            break
    else:
        pytest.fail("it has not begun in 150 steps")
    waited_behind = 10 * LASTS  # the requests before it in the queue
    assert step <= 50 + LASTS + waited_behind
    for _ in range(2 * LASTS):
        queue.step()
    assert not queue.waiting or every == 1, "the others begin behind it"


def test_requests_behind_a_long_prompt_begin_when_it_is_aborted() -> None:
    queue = Queue()
    queue.arrive("first", 30)
    assert queue.step() == ["first"]
    queue.arrive(LONG, 40)
    queue.arrive("short", 5)
    assert queue.step() == []
    queue.abort(LONG)
    assert queue.step() == ["short"]


def test_a_request_without_an_offer_passes() -> None:
    queue = Queue()
    queue.arrive("first", 30)
    queue.step()
    queue.arrive(LONG, 40)
    queue.waiting[RequestId("decodes")] = 40
    assert queue.step() == ["decodes"]


def test_an_engine_that_only_prefills_lets_all_begin() -> None:
    queue = Queue(is_decoding=False)
    for number in range(5):
        queue.arrive(f"p{number}", 30)
    assert len(queue.step()) == 5


# --- when a request waits for blocks

Step = Sequence[int | str]
"""What happens in it: so many blocks are asked for, or `progress`."""

WAITS: Step = [5]

OFFER_ENDS: Step = ["progress", 5]
IDLE: Step = []


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([(0, WAITS), (BLOCK_WAIT_S, WAITS)], [0, 5], id="patience ends"),
        pytest.param([(0, WAITS), (BLOCK_WAIT_S, IDLE)], [0, 0], id="nobody waits any more"),
        pytest.param(
            [(0, WAITS), (0.5, IDLE), (BLOCK_WAIT_S, WAITS)], [0, 0, 0], id="another one waits"
        ),
        pytest.param([(0, WAITS), (BLOCK_WAIT_S, OFFER_ENDS)], [0, 0], id="an offer has ended"),
        pytest.param(
            [
                (0, WAITS),
                (BLOCK_WAIT_S, WAITS),
                (1.5 * BLOCK_WAIT_S, WAITS),
                (2 * BLOCK_WAIT_S, [7]),
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
    blocks = RequestBlocks([Paging(0, 1, 0)], 20)
    scheduler = PrefillScheduler(blocks, 0.5, lambda ticket: ticket.params(KEY), clock=clock)
    needed = []
    for when, step in steps:
        clock.now = start + when
        for each in step:
            if isinstance(each, int):
                assert scheduler.may_begin(P1, each)
            else:
                scheduler.update_state_after_alloc(P2)
        needed.append(scheduler._pop_needed())
    assert needed == expected
