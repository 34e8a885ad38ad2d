"""`on_load_failure: fail` ends the same requests whether `conversations` is on or off.

With it on, vLLM's own policy is to compute what cannot be loaded. So this connector ends requests.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from vllm.config import KVTransferConfig

from nixl_kv.ids import new_nonce
from nixl_kv.protocol.events import Failure, FailureKind
from support.records import ticket_for
from support.vllm_scheduler import (
    BLOCK,
    SteppedScheduler,
    hooked,
    load_reported,
    make_config,
    make_request,
    ours,
)

PROMPT: Final = list(range(4 * BLOCK + 1))
"""Its KV can be in the cache but for the last token, which is computed anyway."""
OTHER: Final = [token + 900 for token in PROMPT]


class Engine(SteppedScheduler):
    """An engine of both roles, whose workers fail the loads that they are told to fail."""

    def __init__(self, conversations: str) -> None:
        extra = {"conversations": conversations, "on_load_failure": "fail"}
        transfer = KVTransferConfig(**ours(**extra))
        config = make_config(transfer, 128, max_num_batched_tokens=512)
        super().__init__(config, hooked(config))
        self.describe()
        self.ends: dict[str, str] = {}
        self.step()

    def step(self, **reported: Any) -> None:
        output = self.vllm.schedule()
        failed = set(output.kv_connector_metadata.failed)
        if failed:
            reported |= {"finished_recving": failed, "failed_recving": failed}
        ends = [one for one in self.end(output, **reported) if one.finish_reason]
        self.ends |= {one.request_id: str(one.finish_reason) for one in ends}

    def end_of(self, name: str) -> str:
        for _ in range(12):
            if name in self.ends:
                break
            self.step()
        return self.ends[name]

    def load(self, name: str, params: object, *, fails: bool = False) -> None:
        """Let a load begin and end."""
        self.add(name, PROMPT, params)
        self.step()
        self.report(name, fails=fails)

    def report(self, name: str, *, fails: bool) -> None:
        failure = Failure(FailureKind.FENCED, "prefill has restarted") if fails else None
        self.step(**load_reported(name, len(PROMPT) - 1, failure))


def ticket(tokens: list[int] = PROMPT) -> Any:
    return ticket_for(tokens, new_nonce(), host="127.0.0.1").params(None)


def refused(engine: Engine) -> None:
    engine.add("x", PROMPT, ticket(OTHER))


def refused_but_cached(engine: Engine) -> None:
    engine.add("warm", PROMPT)
    engine.end_of("warm")
    refused(engine)


def used_twice(engine: Engine) -> None:
    params = ticket()
    engine.load("first", params, fails=True)
    engine.add("x", PROMPT, params)


def used_twice_but_cached(engine: Engine) -> None:
    """A request with n > 1 does this."""
    params = ticket()
    engine.load("first", params)
    engine.end_of("first")
    engine.add("x", PROMPT, params)


def without_a_ticket(engine: Engine) -> None:
    engine.add("x", PROMPT, {"do_remote_prefill": True, "remote_block_ids": [[1]]})


def reset_in_the_queue(engine: Engine) -> None:
    engine.add("x", PROMPT, ticket())
    assert engine.vllm.reset_prefix_cache(reset_connector=True)


def refused_and_reset_in_the_queue(engine: Engine) -> None:
    refused(engine)
    assert engine.vllm.reset_prefix_cache(reset_connector=True)


def other_weights_in_the_queue(engine: Engine) -> None:
    engine.add("x", PROMPT, ticket())
    engine.connector._directory.weights = "2"


def with_prompt_logprobs(engine: Engine) -> None:
    """VLLM computes the prompt, and loads none of it."""
    request = make_request("x", PROMPT, ticket())
    assert request.sampling_params is not None
    request.sampling_params.prompt_logprobs = 1
    request.skip_reading_prefix_cache = True  # as SamplingParams has it then
    engine.vllm.add_request(request)


def loaded(engine: Engine) -> None:
    engine.load("x", ticket())


def failed(engine: Engine) -> None:
    engine.load("x", ticket(), fails=True)


def reset_while_it_loads(engine: Engine) -> None:
    engine.add("x", PROMPT, ticket())
    engine.step()
    engine.connector.reset_cache()
    engine.report("x", fails=False)  # the workers have not heard of it
    engine.step()


Case = Callable[[Engine], None]
ENDS: Final[dict[Case, str]] = {
    refused: "error",
    refused_but_cached: "length",
    without_a_ticket: "error",
    used_twice: "error",
    used_twice_but_cached: "length",
    reset_in_the_queue: "length",
    refused_and_reset_in_the_queue: "length",
    other_weights_in_the_queue: "length",
    with_prompt_logprobs: "length",
    loaded: "length",
    failed: "error",
    reset_while_it_loads: "error",
}


@pytest.fixture(params=["off", "on"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(request.param)
    yield engine
    engine.connector.shutdown()


@pytest.mark.parametrize("case", ENDS, ids=lambda case: case.__name__)
def test_a_request_ends_alike_with_and_without_conversations(engine: Engine, case: Case) -> None:
    case(engine)
    assert engine.end_of("x") == ENDS[case]
    for _ in range(2):
        engine.step()
    assert "x" not in engine.connector._decode.must_load
    assert not engine.connector._decode.num_open
