"""vLLM's own scheduler classes with hooks that end single requests. The test is the workers."""

import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from nixl_kv.connector.scheduler_hooks import SchedulerHooks, hook_scheduler
from nixl_kv.errors import ConfigError
from nixl_kv.ids import RequestId
from support.records import ticket_for
from support.vllm_scheduler import SteppedScheduler, make_config, ours

PROMPT: Final = list(range(48))


class Chosen(Scheduler):
    """An operator's class."""


class Engine(SteppedScheduler):
    def __init__(
        self,
        chosen: Any = None,
        *,
        is_async: bool = False,
        is_nested: bool = False,
        overlap: str = "off",
    ) -> None:
        fields = ours("kv_consumer", overlap=overlap)
        for _ in range(2 if is_nested else 0):
            fields = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_consumer",
                "kv_connector_extra_config": {"connectors": [fields]},
            }
        transfer = KVTransferConfig(**fields)
        config = make_config(transfer, 32, is_async=is_async, caches_prefixes=False)
        config.scheduler_config.scheduler_cls = chosen
        hook_scheduler(config)
        super().__init__(config, config.scheduler_config.get_scheduler_cls())
        self.config = config
        while not hasattr(self.connector, "_decode"):
            (self.connector,) = self.connector._connectors
        if not is_nested:
            self.describe()
        self.counts: Counter[str] = Counter()
        self.connector.stats.count = self._count

    def _count(self, name: str, amount: float = 1, *labels: str) -> None:
        if name == "failed_requests":
            self.counts["".join(labels)] += int(amount)

    @property
    def must_load(self) -> Any:
        return self.connector._decode.must_load

    def step(self, **reported: Any) -> dict[str, FinishReason]:
        """The requests that end with a step, and how vLLM's API server hears of them."""
        outputs = self.end(self.vllm.schedule(), **reported)
        return {each.request_id: each.finish_reason for each in outputs if each.finish_reason}


@pytest.fixture(
    params=[
        pytest.param({}, id="vLLM's class"),
        pytest.param({"is_async": True}, id="vLLM's asynchronous class"),
        pytest.param({"chosen": Chosen}, id="the operator's"),
        pytest.param({"is_nested": True}, id="in two MultiConnectors"),
    ]
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(**request.param)
    yield engine
    engine.connector.shutdown()


def test_the_hooks_come_before_the_chosen_class(engine: Engine) -> None:
    assert isinstance(engine.vllm, SchedulerHooks)
    chosen = engine.config.scheduler_config.scheduler_cls
    assert chosen in (None, Chosen), "as it was"
    pickle.dumps(engine.config.scheduler_config)
    expected = chosen or (
        AsyncScheduler if engine.config.scheduler_config.async_scheduling else Scheduler
    )
    assert isinstance(engine.vllm, expected)


def test_a_request_that_decode_may_not_compute_ends_before_it_is_scheduled(engine: Engine) -> None:
    first = engine.add("first", PROMPT, client_index=1)
    other = engine.add("other", PROMPT)
    engine.must_load.add("first", "it has stand-ins")
    engine.must_load.fail("first", "media", "its ticket was refused")
    output = engine.vllm.schedule()
    assert list(output.num_scheduled_tokens) == ["other"]
    assert first.status is RequestStatus.FINISHED_ERROR
    ended = {each.request_id: each.finish_reason for each in engine.end(output)}
    assert ended["first"] is FinishReason.ERROR
    while engine.vllm.requests:
        ended |= engine.step()
    assert ended["other"] is FinishReason.LENGTH
    assert other.request_id not in engine.must_load
    assert engine.free_blocks == engine.idle


def test_a_request_that_loaded_is_not_computed_again_after_a_preemption(engine: Engine) -> None:
    request = engine.add("d", PROMPT, max_tokens=8)
    engine.must_load.add("d", "it has stand-ins")
    engine.must_load.on_loaded("d", 0)
    assert engine.step() == {}
    assert engine.vllm.reset_prefix_cache(reset_running_requests=True)
    assert request.status is RequestStatus.PREEMPTED
    output = engine.vllm.schedule()
    assert output.num_scheduled_tokens == {}
    (ended,) = engine.end(output)
    assert (ended.request_id, ended.finish_reason) == ("d", FinishReason.ERROR)
    assert engine.counts == {"preempted": 1}
    assert engine.free_blocks == engine.idle


@pytest.mark.parametrize("engine", [{}, {"is_async": True}], indirect=True)
def test_a_request_whose_load_failed_is_not_computed(engine: Engine) -> None:
    engine.add("d", PROMPT, ticket_for(PROMPT).params(None))
    engine.must_load.add("d", "it has stand-ins")
    assert engine.step() == {}
    loading = engine.step()
    assert (loading, len(engine.blocks_of("d"))) == ({}, 3)
    engine.step(finished_recving={"d"}, failed_recving={"d"})
    output = engine.vllm.schedule()
    assert output.num_scheduled_tokens == {}
    (ended,) = engine.end(output)
    assert (ended.request_id, ended.finish_reason) == ("d", FinishReason.ERROR)
    assert engine.counts == {"load": 1}
    assert engine.free_blocks == engine.idle
    assert RequestId("d") not in engine.must_load


@pytest.mark.parametrize("may_compute", [True, False])
def test_workers_get_the_media_of_a_request_that_they_may_have_to_compute(
    engine: Engine, *, may_compute: bool
) -> None:
    """vLLM preempts it, and has its workers compute media whose data it had left out."""
    field = MultiModalBatchedField(keep_on_cpu=False)
    data = MultiModalKwargsItem({"pixels": MultiModalFieldElem(torch.zeros(3), field)})
    place = PlaceholderRange(offset=2, length=6)
    picture = MultiModalFeatureSpec(data, "image", "a picture", place)
    first = engine.add("first", PROMPT, mm_features=[picture])
    if not may_compute:
        engine.must_load.add("first", "it has stand-ins")
        engine.must_load.on_loaded("first", 0)
    (sent,) = sent_after_a_load(engine, first)
    assert (sent.data is data) == may_compute


def sent_after_a_load(engine: Engine, request: Any) -> list[MultiModalFeatureSpec]:
    """The media that workers get of a request whose KV they have but for its last token."""
    loaded = len(PROMPT) - 1

    def load(_: Any, num_computed: int) -> tuple[int, bool]:
        return loaded - num_computed, False

    connector = engine.vllm.connector
    connector.get_num_new_matched_tokens = load
    (new,) = engine.vllm.schedule().scheduled_new_reqs
    assert (new.req_id, new.num_computed_tokens) == (request.request_id, loaded)
    return list(new.mm_features)


def test_a_request_that_fails_during_a_step_gives_no_token(engine: Engine) -> None:
    """Another connector of a MultiConnector may load its KV in the step that begins it."""
    engine.add("d", PROMPT, max_tokens=1)
    other = engine.add("other", PROMPT[:20])
    engine.must_load.add("d", "it has stand-ins")
    output = engine.vllm.schedule()
    assert set(output.num_scheduled_tokens) == {"d", "other"}
    engine.must_load.fail("d", "other_load", "another connector loads its KV")
    ended = {each.request_id: each for each in engine.end(output)}
    assert ended["d"].finish_reason is FinishReason.ERROR
    assert ended["d"].new_token_ids == []
    while engine.vllm.requests:
        engine.step()
    assert other.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert engine.free_blocks == engine.idle


@pytest.mark.parametrize("params", ["x", ["a"], 7, 1.5, True, "", 0])
def test_parameters_other_than_an_object_end_no_engine(engine: Engine, params: Any) -> None:
    """VLLM's scheduler reads them as an object, right after the connector's hook."""
    engine.add("d", PROMPT, params)
    ended: dict[str, FinishReason] = {}
    while engine.vllm.requests:
        ended |= engine.step()
    assert ended == {"d": FinishReason.LENGTH}


def test_hooks_are_mixed_in_once() -> None:
    config = make_config(None, 32)
    hook_scheduler(config)
    hooked = config.scheduler_config.scheduler_cls
    hook_scheduler(config)
    assert config.scheduler_config.scheduler_cls is hooked


@pytest.mark.parametrize(
    ("setting", "role", "takes_media", "starts"),
    [
        ("auto", "kv_consumer", True, False),
        ("ticket", "kv_both", True, False),
        ("own", "kv_consumer", True, True),
        ("auto", "kv_producer", True, False),  # decode's requests may come here by mistake
        ("auto", "kv_consumer", False, True),
    ],
)
def test_without_the_hooks_an_engine_that_takes_media_does_not_decode(
    monkeypatch: pytest.MonkeyPatch, setting: str, role: str, *, takes_media: bool, starts: bool
) -> None:
    monkeypatch.setattr("nixl_kv.connector.vllm_config.takes_media", lambda _: takes_media)
    config = make_config(KVTransferConfig(**ours(role, media=setting)), 32)
    if starts:
        SteppedScheduler(config).connector.shutdown()
        return
    with pytest.raises(ConfigError, match=r"media is not 'own', but nixl_kv's hooks"):
        SteppedScheduler(config)
    hook_scheduler(config)
    SteppedScheduler(config, config.scheduler_config.get_scheduler_cls()).connector.shutdown()


@pytest.mark.parametrize("state", PauseState)
def test_the_connector_hears_whether_vllm_pauses(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, state: PauseState
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(engine.connector, "on_pause", lambda *, is_paused: told.append(is_paused))
    engine.vllm.set_pause_state(state)
    assert told == [state is not PauseState.UNPAUSED]


@pytest.mark.parametrize("is_nested", [False, True])
def test_no_hint_ends_a_load_inside_a_multi_connector(*, is_nested: bool) -> None:
    """It would pass vLLM's report on to a child that has not loaded."""
    engine = Engine(is_nested=is_nested, overlap="on")
    assert engine.connector.may_take_hints
    assert engine.connector.takes_hints is not is_nested
    engine.connector.shutdown()
