"""Values that a client nests: vLLM's scheduler pickles a step for its workers, by recursion."""

import pickle
from collections.abc import Iterator
from copy import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.output import SchedulerOutput

from nixl_kv.connector.vllm_config import PARAMS, for_workers
from nixl_kv.protocol.params import MAX_SIZE
from nixl_kv.protocol.ticket import FIELD
from support.records import ticket, ticket_for
from support.vllm_scheduler import (
    TIER,
    WANT_TICKET,
    SteppedScheduler,
    make_config,
    make_request,
    multi,
    ours,
)

PROMPT = list(range(40))
FOREIGN = {"lmcache.tag": "a", "hidden_states_path": "x"}
BOUNDED = {"do_remote_prefill": True, **FOREIGN, **ticket().params(None)}


def nested(depth: int, *, in_objects: bool = False) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if in_objects else [value]
    return value


class Engine(SteppedScheduler):
    """Alone, or first or last in a MultiConnector."""

    def __init__(self, place: str) -> None:
        transfers = {
            "alone": KVTransferConfig(**ours()),
            "first": multi(ours(), TIER),
            "last": multi(TIER, ours()),
        }
        super().__init__(make_config(transfers[place], 32))
        connectors = getattr(self.connector, "_connectors", [self.connector])
        self.own: Any = next(each for each in connectors if hasattr(each, "end_landed"))
        if place != "last":
            self.describe()

    def step(self) -> SchedulerOutput:
        """Schedule a step, and send it to the workers as vLLM does."""
        output = self.vllm.schedule()
        sent: SchedulerOutput = pickle.loads(pickle.dumps(output, protocol=5))  # noqa: S301
        self.end(output)
        return sent


def extra_args(output: SchedulerOutput) -> Any:
    (new,) = output.scheduled_new_reqs
    return new.sampling_params.extra_args


@pytest.fixture(params=["alone", "first", "last"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(request.param)
    yield engine
    engine.connector.shutdown()


@pytest.mark.parametrize("params", [WANT_TICKET, {"do_remote_prefill": True}], ids=str)
@pytest.mark.parametrize(
    "value",
    [*map(nested, (50, 1000, 10_000)), nested(1000, in_objects=True), "x" * MAX_SIZE],
    ids=["50", "1000", "10000", "objects", "large"],
)
def test_deep_and_large_values_are_refused_and_go_no_further(
    engine: Engine, params: dict[str, Any], value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    given = {**params, **FOREIGN, "x": value}
    request = engine.add("deep", PROMPT, given)
    assert engine.own.stats.data["refused_tickets"] == {"malformed": 1}
    assert request.kv_transfer_params == {}
    assert request.sampling_params.extra_args is None
    assert extra_args(engine.step()) is None
    assert engine.vllm.requests == {}
    assert "request deep is computed here: kv_transfer_params: it has more than" in caplog.text
    assert max(map(len, caplog.messages)) < 500
    engine.add("next", PROMPT, BOUNDED)  # no stop, no state left behind


def test_workers_do_not_get_our_fields_and_others_do(engine: Engine) -> None:
    given = BOUNDED | {FIELD: ticket_for(PROMPT).params(None)[FIELD]}
    request = engine.add("a", PROMPT, WANT_TICKET | FOREIGN)
    assert request.kv_transfer_params == WANT_TICKET | FOREIGN
    assert extra_args(engine.step()) == {PARAMS: FOREIGN}
    engine.add("b", PROMPT[1:], given | {"do_remote_prefill": None})
    request = engine.vllm.requests["b"]
    assert request.kv_transfer_params[FIELD] == given[FIELD]


def test_a_running_request_may_get_deep_values_too(engine: Engine) -> None:
    """Streaming input: vLLM calls no hook for an update, and sends the request again."""
    request = engine.add("a", PROMPT, None, resumable=True)
    engine.step()
    assert engine.vllm.requests == {"a": request}
    update = make_request("a", PROMPT[:3], {"x": nested(1000)}, resumable=True)
    update.sampling_params.extra_args["y"] = nested(1000)
    engine.vllm.add_request(update)
    assert extra_args(engine.step()) is None


def test_foreign_values_are_dropped_only_if_they_would_end_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine("alone")
    kept = {"window": 3, "list": [0] * (MAX_SIZE + 1), "deep": nested(100)}
    request = make_request("a", PROMPT)
    request.sampling_params.extra_args = kept | {"ec_transfer_params": nested(1000)}
    engine.vllm.add_request(request)
    assert extra_args(engine.step()) == kept
    assert "request a: the workers do not get ec_transfer_params of" in caplog.text
    engine.connector.shutdown()


@given(
    st.dictionaries(
        st.sampled_from([PARAMS, "a", "b"]),
        st.builds(nested, st.integers(0, 600), in_objects=st.booleans())
        | st.sampled_from([None, "text", BOUNDED, FOREIGN, WANT_TICKET, {}]),
    )
)
def test_parameters_for_workers_can_be_pickled_and_change_no_others(given: dict[str, Any]) -> None:
    """In one process, the front end and the children of a request share them."""
    before = copy(given)
    params = SamplingParams(max_tokens=1, extra_args=given)
    sent, dropped = for_workers(params)
    pickle.dumps(sent)
    assert params.extra_args is given
    assert given.keys() == before.keys()
    assert all(given[name] is before[name] for name in given)
    assert set(dropped) <= given.keys() - {PARAMS}
    kept = sent.extra_args or {}
    assert given.keys() - kept.keys() - {PARAMS} == set(dropped)
    assert not any(name.startswith(("nixl_kv_", "remote_")) for name in kept.get(PARAMS, ()))


def test_a_request_without_arguments_keeps_its_parameters() -> None:
    for params in (None, SamplingParams(max_tokens=1), SamplingParams(extra_args={"a": 1})):
        sent, dropped = for_workers(params)
        assert sent is params
        assert dropped == []
