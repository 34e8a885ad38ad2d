"""Requests that wait for prefill leave vLLM's queue, not its counts. The test is the workers."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from nixl_kv.connector import unpromised
from nixl_kv.ids import RequestId, new_nonce
from support.records import ticket_for
from support.vllm_scheduler import BLOCK, SteppedScheduler, hooked, make_config, ours

PROMPT: Final = list(range(3 * BLOCK))
ABORTED: Final = RequestStatus.FINISHED_ABORTED


class Engine(SteppedScheduler):
    """A decode engine that counts how often vLLM looks up a request's prompt."""

    def __init__(self, **scheduling: Any) -> None:
        transfer = KVTransferConfig(**ours("kv_consumer"))
        config = make_config(transfer, 64, **scheduling)
        super().__init__(config, hooked(config))
        self.describe()
        self.end(self.vllm.schedule())
        self.lookups: Counter[str] = Counter()
        look_up = self.vllm.kv_cache_manager.get_computed_blocks

        def count(request: Request) -> Any:
            self.lookups[request.request_id] += 1
            return look_up(request)

        self.vllm.kv_cache_manager.get_computed_blocks = count  # type: ignore[method-assign]

    def add_early(self, name: str, tokens: Sequence[int] = PROMPT, **more: Any) -> Request:
        params = ticket_for(list(tokens), new_nonce(), is_early=True).params(None)
        return self.add(name, tokens, params, **more)

    def step(self, **reported: Any) -> list[str]:
        """The requests that vLLM computes, and those whose load begins."""
        output = self.vllm.schedule()
        commands = output.kv_connector_metadata.commands
        begun = [one.request for one in commands if type(one).__name__ == "StartLoad"]
        names = [*begun, *output.num_scheduled_tokens]
        self.end(output, **reported)
        return names

    def compute(self, *names: str) -> None:
        """Prefill begins to compute these requests."""
        self.connector._decode.on_ready({RequestId(name) for name in names})

    @property
    def waiting(self) -> tuple[int, int]:
        """How many vLLM counts, and of these how many it skips."""
        stats = self.vllm.make_stats()
        assert stats is not None
        return self.vllm.get_request_counts()[1], stats.num_skipped_waiting_reqs


Make = Callable[..., Engine]


@pytest.fixture
def make(engines_of: Callable[[type[Engine]], Make]) -> Make:
    return engines_of(Engine)


@pytest.fixture
def engine(make: Make) -> Engine:
    return make()


def test_vllm_looks_up_the_prompt_once_before_prefill_begins_and_once_after(
    engine: Engine,
) -> None:
    for name in ("a", "b"):
        engine.add_early(name)
    for _ in range(5):
        assert engine.step() == []
        assert engine.waiting == (2, 2)
        assert not engine.vllm.waiting
        assert engine.vllm.has_unfinished_requests(), "else the engine would wait for its input"
        assert engine.vllm.has_requests()
        assert not engine.vllm.has_finished_requests()
    assert engine.lookups == {"a": 1, "b": 1}
    engine.compute("a", "b")
    assert engine.step() == ["a", "b"]
    assert engine.lookups == {"a": 2, "b": 2}


def test_without_the_hooks_it_stays_in_vllms_queue(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpromised, "is_off", lambda absence: absence is unpromised.OVERLAP)
    engine = make()
    engine.add_early("a")
    for _ in range(3):
        assert engine.step() == []
    assert engine.lookups == {"a": 3}
    assert engine.waiting == (1, 1)
    engine.compute("a")
    assert engine.step() == ["a"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_requests_come_back_in_the_order_of_their_arrival_or_priority(
    make: Make, policy: str
) -> None:
    engine = make(policy=policy, max_num_seqs=1)
    names = ["a", "b", "c", "d"]
    for number, name in enumerate(names):
        engine.add_early(name, [*PROMPT, number], arrival_time=float(number), priority=-number)
    engine.step()
    engine.add("late", [1, 2, 3], arrival_time=9.0, priority=-2)
    engine.compute("d", "a", "c")
    begun = engine.step()
    order = {"fcfs": ["a", "c", "d", "late"], "priority": ["d", "c", "late", "a"]}[policy]
    assert begun == order[: len(begun)]
    assert engine.waiting[0] >= 1, "b"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_comes_back_behind_an_older_one_that_vllm_has_preempted(
    make: Make, policy: str
) -> None:
    engine = make(policy=policy)
    for number, name in enumerate(("oldest", "older")):
        engine.add(name, [9, 8, number], arrival_time=float(number), max_tokens=9)
    engine.step()
    for number, name in ((2, "early"), (4, "later")):
        engine.add_early(name, [*PROMPT, number], arrival_time=float(number), priority=-number)
    engine.step()
    vllm = engine.vllm
    for request in (vllm.running.pop(), vllm.running.pop()):
        vllm._preempt_request(request, 0.0, drop_stale_output=True)
    engine.add("latest", [1, 2, 3], arrival_time=5.0)
    engine.add("between", [1, 2, 4], arrival_time=3.0)
    engine.compute("early", "later")
    vllm._return_from_aside()  # type: ignore[attr-defined]
    names = {
        "fcfs": ["oldest", "older", "early", "later", "latest", "between"],
        "priority": ["later", "early", "oldest", "older", "between", "latest"],
    }
    assert [request.request_id for request in vllm.waiting] == names[policy]


def test_a_prompt_that_decode_has_cached_does_not_wait(engine: Engine) -> None:
    engine.add("first", [*PROMPT, 1])
    engine.step()
    engine.add_early("a", [*PROMPT, 1])
    assert engine.step() == ["a"]


def test_a_running_request_goes_on_meanwhile(engine: Engine) -> None:
    engine.add("running", [9, 8, 7], max_tokens=8)
    for number in range(3):
        engine.add_early(f"early{number}", [*PROMPT, number])
    for _ in range(4):
        assert engine.step() == ["running"]
    assert engine.waiting == (3, 3)


@pytest.mark.parametrize("names", [["a"], None], ids=["one", "all"])
def test_an_aborted_request_leaves_nothing(engine: Engine, names: list[str] | None) -> None:
    engine.add_early("a")
    engine.step()
    engine.vllm.finish_requests(names, ABORTED)
    assert engine.waiting == (0, 0)
    assert not engine.vllm.has_unfinished_requests()
    engine.step()
    assert not engine.vllm.requests
    assert not engine.vllm.has_requests()
    assert not engine.connector.aside
    assert engine.free_blocks == engine.idle


def test_a_reset_of_the_cache_lets_it_compute(engine: Engine) -> None:
    engine.add_early("a")
    engine.step()
    assert engine.vllm.reset_prefix_cache(reset_connector=True)
    assert engine.step() == ["a"]
    assert not engine.vllm.requests


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_paused_engine_begins_it_afterwards(engine: Engine, state: PauseState) -> None:
    engine.add_early("a")
    engine.step()
    engine.vllm.set_pause_state(state)
    assert not engine.vllm.has_unfinished_requests(), "vLLM waits until an engine is idle"
    engine.compute("a")
    assert engine.step() == []
    engine.vllm.set_pause_state(PauseState.UNPAUSED)
    assert engine.step() == ["a"]


def test_no_more_requests_run_than_the_engine_has_seats(make: Make) -> None:
    engine = make(max_num_seqs=2)
    for number in range(2):
        engine.add(f"running{number}", [9, 8, number], max_tokens=9)
    engine.step()
    engine.add_early("a")
    assert len(engine.step()) == 2
    assert engine.lookups["a"] == 0, "vLLM does not ask without a seat"
    engine.compute("a")
    assert "a" not in engine.step()
    engine.vllm.finish_requests(["running0"], ABORTED)
    assert "a" in engine.step()
