"""What the connector's hooks take, beside what a step takes anyway; and the floor's figures."""

import argparse
import asyncio
from pathlib import Path
from typing import Any

import pytest

from lab.bench import engines, floor, hook_times, step
from lab.bench.__main__ import parse_arguments
from lab.bench.hook_times import Times
from lab.bench.streams import Stream
from lab.cluster.metrics import Loaded


def times(steps: int, seconds: float, *, hook: str = "bind_connector_metadata") -> Times:
    return Times(steps, {hook: seconds}, {hook: seconds / 2}, steps * 1e-5)


def test_a_request_costs_what_is_done_for_it_by_the_rank_that_does_most() -> None:
    added = {
        "decode-worker-1": times(200, 0.3),
        "decode-worker-2": times(200, 0.1),
        "decode-scheduler-1": times(20, 0.06, hook="build_connector_meta"),
        "prefill-worker-3": times(20, 0.4),
    }
    costs = hook_times.per_request(added, 10)
    assert {name: one.seconds for name, one in costs.items()} == {
        ("decode", "worker"): pytest.approx(0.03),
        ("decode", "scheduler"): pytest.approx(0.006),
        ("prefill", "worker"): pytest.approx(0.04),
    }
    assert all(one.cpu == pytest.approx(one.seconds / 2) for one in costs.values())
    assert costs["decode", "scheduler"].hook == "build_connector_meta"
    assert costs["prefill", "worker"].steps == 2
    assert costs["decode", "worker"].step_cpu == pytest.approx(1e-5)


def test_the_hook_that_costs_most_is_named() -> None:
    took = Times(10, {"one": 9.0, "other": 1.0}, {"one": 0.1, "other": 0.5})
    before = Times(10, {"other": 0.5}, {"other": 0.25})
    cost = hook_times.per_request({"decode-worker-1": took.since(before)}, 5)["decode", "worker"]
    assert (cost.hook, cost.hook_cpu) == ("other", pytest.approx(0.05))
    assert (cost.seconds, cost.cpu) == (pytest.approx(1.9), pytest.approx(0.07))
    assert cost.step_cpu == 0


def test_whiles_are_added_up() -> None:
    both = Times()
    for one in (times(3, 0.5), times(2, 0.25, hook="build_connector_meta")):
        both.add(one)
    assert both.steps == 5
    assert both.seconds == {"bind_connector_metadata": 0.5, "build_connector_meta": 0.25}
    assert both.cpu == {"bind_connector_metadata": 0.25, "build_connector_meta": 0.125}
    assert both.idle == pytest.approx(5e-5)


def test_both_roles_of_one_process_write_to_files_of_their_own(tmp_path: Path) -> None:
    for role, seconds in (("scheduler", 1.0), ("worker", 2.0)):
        name = hook_times.file_name("prefill", role, 7)
        hook_times.write_times(tmp_path / name, times(1, seconds))
    written = hook_times.read_times(tmp_path)
    assert set(written) == {"prefill-scheduler-7", "prefill-worker-7"}


def test_times_are_read_as_they_were_written(tmp_path: Path) -> None:
    hook_times.write_times(tmp_path / "12.json", times(3, 0.5))
    assert hook_times.read_times(tmp_path) == {"12": times(3, 0.5)}
    added = times(5, 0.75).since(times(3, 0.5))
    assert (added.steps, added.seconds, added.idle) == (
        2,
        {"bind_connector_metadata": 0.25},
        pytest.approx(2e-5),
    )


LENGTH = 64


def measured(*, loads: int = 4, cached: int = 4 * LENGTH, **of: step.Window) -> step.Measured:
    """Four requests have arrived in each window but the first; what is loaded counts as cached."""
    tokens = loads * LENGTH
    loaded = Loaded(loads=loads, tokens=tokens, descriptors=36 * loads, cached=cached + tokens)
    windows: dict[step.Kind, step.Window] = {
        "alone": of.get("alone", step.Window([0.001] * 10)),
        "cached": of.get("cached", step.Window([0.002] * 10, 4)),
        "loaded": of.get("loaded", step.Window([0.003] * 9 + [0.008], 4)),
    }
    return step.Measured(windows, {"decode-worker-1": times(100, 0.1)}, loaded)


def test_gaps_beside_loads_are_compared_with_those_beside_hits() -> None:
    figures = step.figures(measured())
    assert figures["gap p99 ms alone"] == figures["gap max ms alone"] == 1
    assert figures["p99 loaded to cached"] == figures["max loaded to cached"] == 4
    assert figures["descriptors"] == 36
    assert figures["worker ms a request"] == 25
    assert figures["worker CPU us a step"] == pytest.approx(10)
    assert not any(step.faults(measured(), LENGTH))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        pytest.param(measured(loads=3), "1 were not loaded", id="not loaded"),
        pytest.param(
            measured(cached=4 * LENGTH - 16), "16 tokens were not in the cache", id="no hit"
        ),
        pytest.param(measured(alone=step.Window()), "no stream gave two tokens", id="no stream"),
        pytest.param(
            measured(loaded=step.Window([1.0], 4, ["gone"])), "1 failed: gone", id="failed"
        ),
    ],
)
def test_figures_of_what_did_not_run_are_bad(bad: step.Measured, words: str) -> None:
    assert [fault for fault in step.faults(bad, LENGTH) if fault] == [words]


class Asker:
    """Answers of one token; each of the first prompts in turn fails with one of the errors."""

    def __init__(self, *errors: str) -> None:
        self.prompts: list[list[int]] = []
        self.was_asked = asyncio.Event()
        self._errors = errors

    async def ask(self, tokens: list[int], *_: object, **__: object) -> Stream:
        self.prompts.append(tokens)
        self.was_asked.set()
        if len(self.prompts) <= len(self._errors):
            return Stream(0.0, error=self._errors[len(self.prompts) - 1])
        await asyncio.Event().wait()  # goes on until it is cancelled
        raise AssertionError


def run_streams(asker: Any, seed: str = "") -> None:
    async def run() -> None:
        async with step.Streams(asker, 3, (16, 8), seed).running():
            await asker.was_asked.wait()

    asyncio.run(run())


def test_stream_that_fails_is_an_error_at_the_end() -> None:
    with pytest.raises(RuntimeError, match="gone"):
        run_streams(Asker("", "gone"))


def test_streams_end_with_the_block_and_have_prompts_of_their_own() -> None:
    askers = Asker(), Asker()
    for number, asker in enumerate(askers):
        run_streams(asker, str(number))
    prompts = [tuple(tokens) for asker in askers for tokens in asker.prompts]
    assert len(set(prompts)) == len(prompts) == 6


def test_hooks_are_timed_and_steps_are_counted(tmp_path: Path) -> None:
    timer = hook_times.HookTimer(tmp_path / "1.json")
    add = timer.timed("on_new_request", lambda one, other: one + other)
    build = timer.timed(
        "build_connector_meta", lambda *, commands: commands, lambda given, _: bool(given[0])
    )
    assert add(1, other=2) == 3
    assert build(commands=[1]) == [1]
    assert hook_times.read_times(tmp_path) == {"1": timer.times}
    assert timer.times.idle == 0
    assert build(commands=[]) == []
    assert timer.times.steps == 2
    assert timer.times.idle > 0
    assert set(timer.times.seconds) == {"on_new_request", "build_connector_meta"}
    assert all(timer.times.seconds.values())
    assert set(timer.times.cpu) == set(timer.times.seconds)


def test_floor_compares_each_leg_with_its_own_hit() -> None:
    samples = {
        "off": [floor.Sample(0.020, 0.018, 0.001), floor.Sample(0.030, 0.029, 0.003)],
        "all": [floor.Sample(0.025, 0.019, 0.001), floor.Sample(0.036, 0.030, 0.003)],
    }
    assert floor.figures(samples) == {
        "leg ms": pytest.approx(25),
        "hit ms": pytest.approx(23.5),
        "leg over hit ms": pytest.approx(1.5),
        "transfer ms": pytest.approx(2),
        "leg, verify all ms": pytest.approx(30.5),
        "verify adds ms": pytest.approx(4.5),
    }


def options_of(*arguments: str) -> argparse.Namespace:
    return parse_arguments(arguments)


def test_floor_has_a_decode_engine_for_each_kind_of_verify() -> None:
    options = options_of("floor", "--tp", "1", "2", "--decode-gpus", "1,2")
    prefill, off, everything = floor.specs(options)
    assert [one.connector_config["verify"] for one in (off, everything)] == ["off", "all"]
    assert off.name != everything.name
    assert (prefill.tensor_parallel, off.tensor_parallel) == (1, 2)
    assert "CUDA_VISIBLE_DEVICES" not in prefill.extra_env
    assert off.extra_env["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert "--no-enable-prefix-caching" not in off.extra_args


def test_plain_engine_stands_in_decodes_place() -> None:
    options = options_of("load", "--device", "cuda", "--tp", "1", "2", "--decode-gpus", "1,2")
    plain = engines.plain_engine(options)
    _, decode = engines.pair_of("in-tree", options)
    assert plain.tensor_parallel == decode.tensor_parallel == 2
    assert plain.extra_env["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert plain.extra_args == decode.extra_args
    assert engines.DECODE_GRAPHS[0] in plain.extra_args
