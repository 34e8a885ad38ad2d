"""New weights: what vLLM's own scheduler keeps of the KV from before; the test is its workers."""

import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from nixl_kv.connector.worker import Worker
from nixl_kv.ids import Incarnation, RequestId, new_nonce
from nixl_kv.protocol.events import (
    CancelLoad,
    Command,
    PrepareLoad,
    PrepareOffer,
    PublishOffer,
    RevokeAll,
    WithdrawOffer,
)
from nixl_kv.protocol.ticket import SealedTicket, Ticket
from support.records import hex32, ticket_for
from support.vllm_scheduler import WANT_TICKET, SteppedScheduler, make_config, ours

PROMPT: Final = 100
"""Tokens: six blocks and a bit."""
NUM_BLOCKS: Final = 60
LIFE: Final = Incarnation(hex32(0x11FE))


class Engine(SteppedScheduler):
    def __init__(self, role: str, **extra: Any) -> None:
        transfer = KVTransferConfig(**ours(role, **extra))
        super().__init__(make_config(transfer, NUM_BLOCKS, max_num_seqs=1))
        self.describe(LIFE)
        assert kinds(self.step()) == ["SetEngine"]

    @property
    def num_cached(self) -> int:
        """Blocks that a later prompt would find."""
        cached = self.vllm.kv_cache_manager.block_pool.cached_block_hash_to_block
        return len(cached)

    def request(
        self, name: str, params: object = None, *, first: int = 0, n: int = PROMPT, out: int = 1
    ) -> Request:
        return self.add(name, range(first, first + n), params, max_tokens=out)

    def schedule(self) -> tuple[SchedulerOutput, list[Command]]:
        output = self.vllm.schedule()
        return output, list(output.kv_connector_metadata.commands)

    def end(self, output: SchedulerOutput, **reported: Any) -> list[Any]:
        """The step's outputs, with what the workers report."""
        for request in output.kv_connector_metadata.failed:
            for key in ("finished_recving", "failed_recving"):
                reported[key] = reported.get(key, set()) | {request}
        return super().end(output, **reported)

    def step(self, **transferred: set[str]) -> list[Command]:
        output, commands = self.schedule()
        self.end(output, **transferred)
        return commands

    def set_label(self, label: str) -> None:
        """Set the label as the directory's thread does for `nixl-kv set-weights`."""
        self.connector._directory.weights = label

    def ticket(self, *, first: int = 0, **changed: Any) -> dict[str, Any]:
        """For the prompt of `add`."""
        tokens = range(first, first + PROMPT)
        ticket = ticket_for(tokens, new_nonce(), **{"incarnation": LIFE, **changed})
        params: dict[str, Any] = self.connector._trust.seal(ticket)
        return params


Make = Callable[..., Engine]


@pytest.fixture
def make(engines_of: Callable[[type[Engine]], Make]) -> Make:
    return engines_of(Engine)


def kinds(commands: Iterable[Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("nixl_kv")]


RESETS: Final = ["reset", "label"]
"""The two ways to say that the weights are others."""


def end_weights(engine: Engine, how: str) -> None:
    if how == "reset":
        assert engine.connector.reset_cache() is True
    else:
        engine.set_label("step 8")


# --- decode


@pytest.mark.parametrize("how", RESETS)
def test_a_load_that_was_asked_for_never_starts(make: Make, how: str) -> None:
    decode = make("kv_consumer")
    decode.request("running", first=3000, n=40, out=2)
    output, _ = decode.schedule()
    decode.request("asked", decode.ticket())
    decode.end(output)
    assert kinds(decode.step()) == ["PrepareLoad"]
    end_weights(decode, how)
    output, commands = decode.schedule()
    assert output.num_scheduled_tokens == {"asked": PROMPT}
    assert kinds(commands) == ["CancelLoad"]


@pytest.mark.parametrize("how", RESETS)
@pytest.mark.parametrize("report", ["good", "failed", "good, on its way"])
def test_a_load_under_way_is_computed_again(make: Make, how: str, *, report: str) -> None:
    """Whatever the workers report, or have reported: vLLM hears of one end, and it is a failure."""
    decode = make("kv_consumer")
    request = decode.request("d", decode.ticket())
    assert kinds(decode.step()) == ["PrepareLoad", "StartLoad"]
    on_its_way, _ = decode.schedule()
    end_weights(decode, how)
    if report == "good, on its way":  # that step's output has it, and comes after the reset
        decode.end(on_its_way, finished_recving={"d"})
        output, commands = decode.schedule()
        decode.end(output)
    else:
        decode.end(on_its_way)
        output, commands = decode.schedule()
        failed = {"failed_recving": {"d"}} if report == "failed" else {}
        decode.end(output, finished_recving={"d"}, **failed)
        if report == "good":
            decode.step()
    assert commands == [CancelLoad(RequestId("d"))]
    assert not output.num_scheduled_tokens
    assert decode.num_cached == 0
    output, _ = decode.schedule()
    assert output.num_scheduled_tokens == {"d": PROMPT}
    decode.end(output)
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    decode.step()
    assert not decode.vllm.requests


def test_the_worker_reports_the_loads_held_back(make: Make) -> None:
    decode = make("kv_consumer")
    decode.request("d", decode.ticket())
    decode.step()
    assert decode.connector.reset_cache()
    decode.step(finished_recving={"d"})
    output, _ = decode.schedule()
    worker = Worker(decode.vllm.vllm_config, decode.vllm.kv_cache_config)
    worker.bind_connector_metadata(output.kv_connector_metadata)
    results = worker.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == ({"d"}, {"d"})
    results = worker.get_transfer_results(set())
    assert not results.finished_recving


def test_an_engine_that_wakes_up_takes_tickets_again(make: Make) -> None:
    """vLLM 0.33 resets caches before each sleep, also if the weights stay."""
    decode = make("kv_consumer")
    decode.request("met", decode.ticket())
    decode.step()
    assert decode.connector.reset_cache()
    decode.describe(LIFE)
    decode.request("new", decode.ticket())
    assert "PrepareLoad" in kinds(decode.step())


@pytest.mark.parametrize(("theirs", "ours"), [("7", "8"), ("", "8")])
def test_other_weights_are_not_read(
    make: Make, caplog: pytest.LogCaptureFixture, theirs: str, ours: str
) -> None:
    """One line names both labels, and prefill need not wait."""
    decode = make("kv_consumer", weights=ours)
    ticket = decode.ticket(weights=theirs)
    with caplog.at_level(logging.WARNING, "nixl_kv"):
        decode.request("d", ticket)
    output, commands = decode.schedule()
    assert output.num_scheduled_tokens == {"d": PROMPT}
    opened = SealedTicket.parse(ticket).open()
    prepare, cancel = commands
    assert isinstance(prepare, PrepareLoad)
    assert (prepare.ticket, cancel) == (opened, CancelLoad(RequestId("d")))
    (line,) = warned(caplog)
    assert line == (
        f"request d is computed here: kv_transfer_params: weights is {theirs!r}; this engine's "
        f"weights are {ours!r}"
    )
    assert decode.connector.stats.data["refused_tickets"] == {"weights": 1}
    decode.end(output)
    decode.request("good", decode.ticket(first=500, weights=ours), first=500)
    assert kinds(decode.step()) == ["PrepareLoad", "StartLoad"]


def test_a_label_that_comes_while_blocks_are_found_ends_the_load(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two hooks that vLLM calls for one request: it waits for a load, so one ends."""
    decode = make("kv_consumer")
    manager = decode.vllm.kv_cache_manager
    allocate = manager.allocate_slots

    def and_set(*arguments: Any, **named: Any) -> Any:
        decode.set_label("8")
        return allocate(*arguments, **named)

    decode.request("d", decode.ticket())
    monkeypatch.setattr(manager, "allocate_slots", and_set)
    commands = decode.step()
    assert kinds(commands) == ["PrepareLoad", "StartLoad", "CancelLoad"]
    decode.step(finished_recving={"d"}, failed_recving={"d"})
    output, _ = decode.schedule()
    assert output.num_scheduled_tokens == {"d": PROMPT}


# --- prefill


def offered(engine: Engine, name: str = "p") -> Ticket:
    """A prompt is computed, and its ticket is out."""
    engine.request(name, WANT_TICKET)
    output, commands = engine.schedule()
    assert "PrepareOffer" in kinds(commands)
    (finished,) = engine.end(output)
    return SealedTicket.parse(finished.kv_transfer_params).open()


@pytest.mark.parametrize("how", RESETS)
def test_prefill_takes_its_offers_back_with_the_next_step(make: Make, how: str) -> None:
    prefill = make("kv_producer")
    before = offered(prefill)
    end_weights(prefill, how)
    assert prefill.step() == [PublishOffer(before.nonce, RequestId("p")), RevokeAll()]
    prefill.step(finished_sending={"p"})
    assert prefill.vllm.reset_prefix_cache()
    after = offered(prefill)
    assert after.incarnation == before.incarnation
    assert after.epoch == before.epoch + 1
    assert after.weights == ("" if how == "reset" else "step 8")


@pytest.mark.parametrize("how", RESETS)
def test_a_prompt_that_is_half_computed_is_not_offered(make: Make, how: str) -> None:
    """It has KV of both weights. vLLM has said that the reset failed, and goes on with it."""
    prefill = make("kv_producer")
    prefill.request("p", WANT_TICKET, n=300)
    prefill.step()
    end_weights(prefill, how)
    output, commands = prefill.schedule()
    assert commands == []
    (finished,) = prefill.end(output)
    assert finished.finish_reason is not None
    assert finished.kv_transfer_params is None
    prefill.step()
    assert not prefill.vllm.requests


def test_a_prompt_that_finishes_with_a_new_label_is_not_offered(make: Make) -> None:
    """It was computed before, and its output comes after."""
    prefill = make("kv_producer")
    prefill.request("p", WANT_TICKET)
    output, (prepare,) = prefill.schedule()
    assert isinstance(prepare, PrepareOffer)
    prefill.set_label("step 8")
    (finished,) = prefill.end(output)
    assert finished.kv_transfer_params is None
    assert prefill.step() == [WithdrawOffer(prepare.nonce)]
    assert not prefill.vllm.requests


def test_a_prompt_that_is_computed_anew_is_offered(make: Make) -> None:
    """The pause took its blocks away."""
    prefill = make("kv_producer")
    prefill.request("p", WANT_TICKET, n=300)
    prefill.step()
    prefill.vllm.set_pause_state(PauseState.PAUSED_ALL)
    assert prefill.vllm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    prefill.vllm.set_pause_state(PauseState.UNPAUSED)
    finished: list[Any] = []
    for _ in range(4):
        output, _ = prefill.schedule()
        finished += [one for one in prefill.end(output) if one.finish_reason is not None]
    (last,) = finished
    assert SealedTicket.parse(last.kv_transfer_params).open().epoch == 1
