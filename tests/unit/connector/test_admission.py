"""Which waiting request may have blocks. It needs no vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest

from nixl_kv.connector.admission import Admission
from nixl_kv.connector.block_pinning import PinnedBlocks
from nixl_kv.connector.block_shortage import BlockShortage
from nixl_kv.connector.offer_quota import OfferQuota
from nixl_kv.connector.paging import Paging
from nixl_kv.connector.prefill import PrefillScheduler
from nixl_kv.ids import RequestId
from support.cache_manager import CacheManager

BLOCK = 16
NUM_BLOCKS = 100
LASTS = 10
"""Steps from the beginning of a prefill to the end of its offer."""

LONG = RequestId("long")


class Engine:
    """Both halves, and a queue of which vLLM asks in order, in each step."""

    def __init__(self, *, share: float = 0.5, is_in_use: bool = True) -> None:
        blocks = PinnedBlocks([Paging(0, BLOCK, 0)], CacheManager())
        self.prefill = PrefillScheduler(blocks, OfferQuota(NUM_BLOCKS, share), lambda _: {})
        decode: Any = SimpleNamespace(is_in_use=is_in_use)
        self.admission = Admission(blocks, self.prefill, decode, BlockShortage(lambda: 0.0))
        self.queue: dict[RequestId, int] = {}  # blocks
        self._ends: dict[RequestId, int] = {}  # in which step
        self._step = 0

    def arrive(self, name: str, num_blocks: int) -> None:
        request = RequestId(name)
        self.queue[request] = num_blocks
        self.prefill.on_arrival(request, num_blocks * BLOCK, lambda: pytest.fail("not computed"))

    def abort(self, request: RequestId) -> None:
        del self.queue[request]
        self.prefill.on_finish(request, [[]], reason="it ended as FINISHED_ABORTED")

    def step(self) -> list[RequestId]:
        """The requests that begin."""
        self._step += 1
        ended = [request for request, step in self._ends.items() if step <= self._step]
        for request in ended:
            del self._ends[request]
        self.admission.on_offers_ended(ended)
        begun = [r for r, num in self.queue.items() if self._begins(r, num * BLOCK)]
        for request in begun:
            del self.queue[request]
        self.admission.on_step()
        return begun

    def _begins(self, request: RequestId, num_tokens: int) -> bool:
        if not self.admission.may_begin(request, num_tokens):
            return False
        self.admission.on_begin(request)
        self._ends[request] = self._step + LASTS
        return True


@pytest.mark.parametrize("num_blocks", [30, 40, 60], ids="a prompt of {} blocks".format)
@pytest.mark.parametrize("every", [1, 2, 5], ids="a short one every {} steps".format)
def test_a_long_prompt_begins_when_those_before_it_have_ended(num_blocks: int, every: int) -> None:
    """Offers may hold 50 blocks of 100. A prompt that is longer begins alone."""
    engine = Engine()
    for step in range(200):
        if step % every == 0:
            engine.arrive(f"s{step}", 5)
        if step == 50:
            engine.arrive(LONG, num_blocks)
        if LONG in engine.step():
            break
    else:
        pytest.fail("it has not begun in 150 steps")
    waited_behind = 10 * LASTS  # what was in the queue before it
    assert step <= 50 + LASTS + waited_behind
    for _ in range(2 * LASTS):
        engine.step()
    assert not engine.queue or every == 1, "the others begin behind it"


def test_who_waits_behind_a_long_prompt_begins_when_that_is_aborted() -> None:
    engine = Engine()
    engine.arrive("first", 30)
    assert engine.step() == ["first"]
    engine.arrive(LONG, 40)
    engine.arrive("short", 5)
    assert engine.step() == []
    engine.abort(LONG)
    assert engine.step() == ["short"]


def test_what_is_not_offered_passes() -> None:
    engine = Engine()
    engine.arrive("first", 30)
    engine.step()
    engine.arrive(LONG, 40)
    engine.queue[RequestId("decodes")] = 40
    assert engine.step() == ["decodes"]


def test_an_engine_that_only_prefills_lets_all_begin() -> None:
    engine = Engine(is_in_use=False)
    for number in range(5):
        engine.arrive(f"p{number}", 30)
    assert len(engine.step()) == 5
