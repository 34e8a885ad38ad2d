"""With `overlap`, vLLM's scheduler hears of loads between steps. The test is its ranks."""

import itertools
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final

import pytest
from msgspec.structs import replace
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from nixl_kv.engine.trust import Trust
from nixl_kv.ids import Endpoint, EngineId, Rank, RequestId, new_nonce
from nixl_kv.protocol.events import PrepareLoad, SetEngine
from nixl_kv.protocol.messages import Reader, encode
from support.polling import wait_until
from support.records import landed, ready, teller, ticket_for
from support.vllm_scheduler import SteppedScheduler, hooked, load_reported, make_config, ours

PROMPT: Final = list(range(48))


class Chosen(AsyncScheduler):
    """An operator's class, or that of a platform."""


class Engine(SteppedScheduler):
    """A decode engine of two ranks, with asynchronous scheduling."""

    def __init__(
        self, overlap: str = "on", chosen: type[Scheduler] | None = None, **extra: Any
    ) -> None:
        transfer = KVTransferConfig(**ours("kv_consumer", overlap=overlap, **extra))
        config = make_config(transfer, 32, is_async=True, caches_prefixes=False)
        config.parallel_config.world_size = 2
        config.scheduler_config.scheduler_cls = chosen
        super().__init__(config, hooked(config))
        self.describe()
        self.add("first", PROMPT[:4], max_tokens=2)
        output = self.vllm.schedule()
        (first,) = output.kv_connector_metadata.commands
        assert isinstance(first, SetEngine)
        self.directory: Endpoint | None = first.directory
        self.end(output)
        self.end(self.vllm.schedule())
        assert not self.vllm.requests
        self.counts: Counter[str] = Counter()
        self.connector.stats.count = self._count

    def load(
        self, name: str = "d", *, max_tokens: int = 1, host: str = "127.0.0.1"
    ) -> tuple[Request, PrepareLoad]:
        """A request whose load has started."""
        params = ticket_for(PROMPT, new_nonce(), host=host).params(None)
        request = self.add(name, PROMPT, params, max_tokens=max_tokens)
        output = self.vllm.schedule()
        prepare, start = output.kv_connector_metadata.commands
        assert (type(prepare).__name__, type(start).__name__) == ("PrepareLoad", "StartLoad")
        self.end(output)
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        return request, prepare

    def _count(self, name: str, amount: float = 1, *_labels: str) -> None:
        self.counts[name] += int(amount)

    def hear(self, load: PrepareLoad, *ranks: int, kind: Callable[..., Any] = landed) -> None:
        for rank in ranks:
            reader = teller(rank, self.connector._engine_id)
            self.connector._directory._hints.append(kind(hint_key=load.hint_key, reader=reader))


def good(name: str) -> dict[str, Any]:
    """All ranks' reports of a good load, which come with a step's output."""
    return load_reported(name, len(PROMPT) - 1)


Make = Callable[..., Engine]


@pytest.fixture
def make(engines_of: Callable[[type[Engine]], Make]) -> Make:
    return engines_of(Engine)


@pytest.fixture
def engine(make: Make) -> Engine:
    return make()


def test_a_request_is_scheduled_in_the_step_after_its_load(engine: Engine) -> None:
    """When the workers report the load, its request may have ended: vLLM must not hear of it."""
    _, load = engine.load()
    engine.hear(load, 0, 1)
    output = engine.vllm.schedule()
    assert output.num_scheduled_tokens == {"d": 1}
    assert engine.connector._decode.num_open == 0
    assert engine.counts == {"early_ends": 1}
    (ended,) = engine.end(output, **good("d"))
    assert ended.finish_reason is not None
    assert not engine.vllm.requests
    tokens = len(PROMPT) - 1
    assert engine.counts == {"early_ends": 1, "loads": 1, "loaded_tokens": tokens}
    assert not engine.connector._decode.is_told(RequestId("d"))
    assert engine.free_blocks == engine.idle


@pytest.mark.parametrize(
    ("options", "steps"), [({"overlap": "off"}, 5), ({}, 3), ({"chosen": Chosen}, 3)]
)
def test_it_saves_two_steps_of_a_busy_engine(
    make: Make, options: dict[str, Any], steps: int
) -> None:
    """vLLM has two steps under way, and workers report ended loads as a step begins."""
    engine = make(**options)
    engine.add("busy", PROMPT[:4], max_tokens=60)
    first = engine.vllm.schedule()
    engine.add("d", PROMPT, ticket_for(PROMPT, new_nonce()).params(None))
    under_way = deque[tuple[SchedulerOutput, dict[str, Any]]]([(engine.vllm.schedule(), {})])
    load, _ = under_way[0][0].kv_connector_metadata.commands
    engine.end(first)
    for number in itertools.count(1):
        if number == 2:  # it has landed during the step before
            engine.hear(load, 0, 1)
        under_way.append((engine.vllm.schedule(), good("d") if number == 2 else {}))
        output, reported = under_way.popleft()
        if "d" in [each.request_id for each in engine.end(output, **reported)]:
            assert number == steps
            return


def test_a_report_that_is_under_way_already_is_dropped(engine: Engine) -> None:
    request, load = engine.load(max_tokens=3)
    before = engine.vllm.schedule()
    engine.hear(load, 0, 1)
    output = engine.vllm.schedule()
    assert output.num_scheduled_tokens == {"d": 1}
    engine.end(before, **good("d"))
    assert request.status is RequestStatus.RUNNING
    assert request.num_computed_tokens == len(PROMPT)
    engine.end(output)


def test_a_hint_from_before_a_pause_ends_no_load(engine: Engine) -> None:
    """vLLM's `sleep` may have discarded the cache since the load landed; workers say so."""
    request, load = engine.load()
    engine.hear(load, 0, 1)
    for state in (PauseState.PAUSED_ALL, PauseState.UNPAUSED):
        engine.vllm.set_pause_state(state)
    output = engine.vllm.schedule()
    assert not output.num_scheduled_tokens
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.end(output, finished_recving={"d"}, failed_recving={"d"})
    assert engine.vllm.schedule().num_scheduled_tokens == {"d": len(PROMPT)}


def test_a_part_of_the_reports_is_counted_once(engine: Engine) -> None:
    """vLLM passes on what each rank says at once, but the end when all have said so."""
    _, load = engine.load(max_tokens=2)
    engine.end(engine.vllm.schedule(), **{**good("d"), "finished_recving": None})
    engine.hear(load, 0, 1)
    output = engine.vllm.schedule()
    engine.end(output, **good("d"))
    assert engine.counts["loads"] == 1


@pytest.mark.parametrize(
    "told",
    [
        pytest.param([], id="nothing"),
        pytest.param([(0, landed)], id="one rank of two"),
        pytest.param([(0, landed), (0, landed)], id="one rank, twice"),
        pytest.param([(0, landed), (1, ready)], id="the other is ready only"),
    ],
)
def test_a_load_that_has_not_landed_on_all_ranks_ends_with_their_reports(
    engine: Engine, told: list[tuple[int, Callable[..., Any]]]
) -> None:
    request, load = engine.load()
    for rank, kind in told:
        engine.hear(load, rank, kind=kind)
    output = engine.vllm.schedule()
    assert not output.num_scheduled_tokens
    engine.end(output, finished_recving={"d"}, failed_recving={"d"})
    engine.hear(load, 0, 1)  # too late
    output = engine.vllm.schedule()
    assert output.num_scheduled_tokens == {"d": len(PROMPT)}, "it computes them"
    engine.end(output)
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert engine.free_blocks == engine.idle


OWN: Final = EngineId("decode-1")


def _keys_a_peer_may_try(load: PrepareLoad) -> list[str]:
    """All that prefill learns of a load has the form of its key."""
    return [load.claim, load.ticket.nonce, load.ticket.context, load.ticket.incarnation]


def test_a_hint_without_the_key_of_the_load_ends_nothing(engine: Engine) -> None:
    """Only the ranks of this engine can say that bytes have landed."""
    _, load = engine.load()
    _, other = engine.load("e")
    for key in (*_keys_a_peer_may_try(load), landed().hint_key, other.hint_key):
        for rank in (0, 1):
            reader = teller(rank, engine.connector._engine_id)
            engine.connector._directory._hints.append(landed(hint_key=key, reader=reader))
    assert "d" not in engine.vllm.schedule().num_scheduled_tokens


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([teller(1, "decode-2")], id="a rank of another engine"),
        pytest.param([teller(2, OWN)], id="a rank that the engine does not have"),
        pytest.param([teller(0, OWN)], id="the same rank again"),
        pytest.param([replace(teller(0, OWN), rank=Rank(1))], id="one rank under two numbers"),
    ],
)
def test_each_rank_of_the_engine_says_so_itself(engine: Engine, others: list[Reader]) -> None:
    engine.connector._engine_id = OWN
    _, load = engine.load()
    engine.hear(load, 0)
    for reader in others:
        hint = landed(hint_key=load.hint_key, reader=reader)
        engine.connector._directory._hints.append(hint)
    assert not engine.vllm.schedule().num_scheduled_tokens
    engine.hear(load, 1)
    assert engine.vllm.schedule().num_scheduled_tokens == {"d": 1}


def reset(engine: Engine) -> None:
    assert engine.connector.reset_cache()


def set_label(engine: Engine) -> None:
    engine.connector._directory.weights = "step 8"


@pytest.mark.parametrize("end_weights", [reset, set_label])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_load_from_before_a_reset_is_computed_again(
    engine: Engine, end_weights: Callable[[Engine], None], *, is_first: bool
) -> None:
    request, load = engine.load()
    if is_first:
        end_weights(engine)
    engine.hear(load, 0, 1)
    if not is_first:
        end_weights(engine)
    output = engine.vllm.schedule()
    assert not output.num_scheduled_tokens
    engine.end(output, **good("d"))
    output = engine.vllm.schedule()
    assert output.kv_connector_metadata.failed == ["d"]
    engine.end(output, finished_recving={"d"}, failed_recving={"d"})
    assert engine.vllm.schedule().num_scheduled_tokens == {"d": len(PROMPT)}
    assert request.num_preemptions == 0


def test_an_aborted_request_keeps_its_blocks_until_the_workers_report(engine: Engine) -> None:
    _, load = engine.load()
    engine.vllm.finish_requests("d", RequestStatus.FINISHED_ABORTED)
    engine.hear(load, 0, 1)
    output = engine.vllm.schedule()
    assert engine.free_blocks < engine.idle
    engine.end(output, **good("d"))
    assert not engine.vllm.requests
    assert engine.free_blocks == engine.idle


def test_a_request_that_is_aborted_after_its_load_ends_once(engine: Engine) -> None:
    _, load = engine.load(max_tokens=4)
    engine.hear(load, 0, 1)
    output = engine.vllm.schedule()
    engine.vllm.finish_requests("d", RequestStatus.FINISHED_ABORTED)
    engine.end(output, **good("d"))
    assert not engine.vllm.requests
    assert engine.free_blocks == engine.idle


def test_the_next_request_with_its_id_loads_as_well(engine: Engine) -> None:
    """The first one was aborted while the workers' reports of its load were under way."""
    _, load = engine.load(max_tokens=4)
    engine.hear(load, 0, 1)
    first = engine.vllm.schedule()
    engine.vllm.finish_requests("d", RequestStatus.FINISHED_ABORTED)
    engine.add("d", PROMPT, ticket_for(PROMPT, new_nonce()).params(None), max_tokens=4)
    second = engine.vllm.schedule()
    prepare = next(c for c in second.kv_connector_metadata.commands if isinstance(c, PrepareLoad))
    engine.hear(prepare, 0, 1)
    third = engine.vllm.schedule()
    assert not third.num_scheduled_tokens, "the report of the first load comes first"
    engine.end(first, **good("d"))
    assert engine.connector._decode.num_open == 1, "a reset would concern the second load"
    engine.end(second, **good("d"))
    engine.end(third)
    assert engine.vllm.schedule().num_scheduled_tokens == {"d": 1}


def test_a_request_whose_prefill_computes_gets_blocks_in_the_next_step(engine: Engine) -> None:
    pair = ticket_for(PROMPT, is_early=True).params(None)
    engine.add("d", PROMPT, pair)
    output = engine.vllm.schedule()
    (prepare,) = output.kv_connector_metadata.commands
    assert prepare.ticket.is_early
    engine.hear(prepare, 0, kind=ready)
    (start,) = engine.vllm.schedule().kv_connector_metadata.commands
    assert type(start).__name__ == "StartLoad"
    engine.end(output)


def test_a_load_that_has_not_begun_has_not_landed(engine: Engine) -> None:
    """Whatever a rank says. vLLM's engine would end."""
    engine.add("d", PROMPT, ticket_for(PROMPT, is_early=True).params(None))
    (prepare,) = engine.vllm.schedule().kv_connector_metadata.commands
    engine.hear(prepare, 0, 1)
    (start,) = engine.vllm.schedule().kv_connector_metadata.commands
    assert type(start).__name__ == "StartLoad"
    engine.hear(prepare, 0)
    assert not engine.vllm.schedule().num_scheduled_tokens


def test_ranks_tell_by_message(make: Make) -> None:
    """At the address that the first step names, even if the engine's own host is not a peer."""
    engine = make(peers=["10.0.0.0/8"])
    _, load = engine.load(host="10.0.0.1")
    assert engine.directory is not None
    control = Trust.of(engine.connector._config).control()
    heard = engine.connector._directory._hints
    own, key = engine.connector._engine_id, load.hint_key
    hints = [kind(hint_key=key, reader=teller(n, own)) for kind in (ready, landed) for n in (0, 1)]
    for hint in hints:
        control.send(engine.directory, encode(hint))
    wait_until(lambda: len(heard) == len(hints) or control.poll(0.01))
    assert list(heard) == hints
    assert engine.vllm.schedule().num_scheduled_tokens == {"d": 1}
    control.close()
