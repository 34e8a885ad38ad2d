"""How `bench ttft` compares two checkouts."""

import argparse
import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.bench import checkouts, engines, ttft
from lab.bench.__main__ import parse_arguments
from lab.cluster import metrics
from lab.cluster.metrics import LOADS, NBYTES, SECONDS
from lab.results import Verdict


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A checkout of nixl_kv."""
    (tmp_path / "nixl_kv" / "connector").mkdir(parents=True)
    (tmp_path / "nixl_kv" / "__init__.py").touch()
    return tmp_path


def test_against_refuses_a_folder_without_nixl_kv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["ttft", "--against", str(tmp_path)])
    assert "has no nixl_kv/connector" in capsys.readouterr().err


def test_engines_of_a_checkout_import_it(other: Path) -> None:
    env = checkouts.environment_of(other)
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(other)


def test_checkout_that_is_not_imported_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="nixl_kv is imported from"):
        checkouts.environment_of(tmp_path)


def test_both_sides_differ_in_nothing_but_the_checkout(
    other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "ensure_tiny_model", lambda **_: Path("model"))
    command = ["ttft", "--against", str(other), "--device", "cuda", "--tp", "1", "2"]
    command += ["--shape", "qwen3-8b", "--", "--max-model-len", "20000"]
    cluster = Cluster()
    with ttft.running_pairs(cluster, "nixl-kv", parse_arguments(command)) as pairs:  # type: ignore[arg-type]
        assert list(pairs) == ["nixl-kv", ttft.AGAINST]
    ours, theirs = cluster.started[:2], cluster.started[2:]
    assert [spec.tensor_parallel for spec in ours] == [1, 2]
    assert sum(spec.gpu_memory_utilization for spec in cluster.started) == pytest.approx(
        engines.GPU_SHARE
    )
    for one, another in zip(ours, theirs, strict=True):
        assert one.extra_args == another.extra_args
        assert one.extra_args[-2:] == ("--max-model-len", "20000")
        assert one.connector_config == another.connector_config
        assert one.extra_env["PYTHONPATH"].startswith(str(ttft.REPO))
        assert another.extra_env["PYTHONPATH"].startswith(str(other))
    assert cluster.ended == cluster.started


class Cluster:
    """Starts nothing."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.ended: list[Any] = []

    def start(self, *specs: Any) -> list[Any]:
        self.started += specs
        return [SimpleNamespace(url="http://127.0.0.1:1", spec=spec) for spec in specs]

    def end(self, *engines: Any) -> None:
        self.ended += [engine.spec for engine in engines]


class Pair:
    """Answers at once; so many ranks of decode, of two, then have read 1 MiB each."""

    def __init__(
        self, name: str, asked: list[tuple[str, str]], *, seconds: float, reading: int = 2
    ) -> None:
        self.to_prefill = self.to_decode = self
        self.decode = SimpleNamespace(
            name=name, log_path="decode.log", spec=SimpleNamespace(ranks=2)
        )
        self._name = name
        self._asked = asked
        self._step = {LOADS: reading, NBYTES: reading << 20, SECONDS: reading * seconds}
        self._num_answers = 0

    def complete(self, prompt: str, max_tokens: int) -> SimpleNamespace:
        self._asked.append((self._name, prompt))
        self._num_answers += 1
        return SimpleNamespace(seconds=0.5, tokens=(prompt, max_tokens))

    def counters(self) -> dict[str, float]:
        return {name: self._num_answers * value for name, value in self._step.items()}


def pairs_of(asked: list[tuple[str, str]], reading: int = 2) -> dict[str, Any]:
    """Ours, whose transfers take 2 ms, and one whose transfers take 1 ms."""
    return {
        "nixl-kv": Pair("nixl-kv", asked, seconds=0.002, reading=reading),
        ttft.AGAINST: Pair(ttft.AGAINST, asked, seconds=0.001),
    }


def test_both_sides_are_asked_the_same_prompts_and_take_turns_to_be_first() -> None:
    asked: list[tuple[str, str]] = []
    ttft.ask_in_turn(pairs_of(asked), "nixl-kv", [4, 4], itertools.count())
    names = [name for name, _ in asked]
    assert names == [*["against"] * 2, *["nixl-kv"] * 4, *["against"] * 2]
    prompts = {name: [p for n, p in asked if n == name] for name in names}
    assert prompts["against"] == prompts["nixl-kv"]
    assert len(set(prompts["against"])) == 4


def test_ratio_is_of_ours_to_theirs() -> None:
    options = argparse.Namespace(lengths=[4], repeat=3, shape="tiny")
    ours, theirs = ttft.measure(pairs_of([]), "nixl-kv", options)
    assert ours.figures["engines"] == "nixl-kv"
    assert ours.figures["transfer ms"] == pytest.approx(2.0)
    assert ours.figures["MiB"] == 2
    assert ours.figures["GB/s"] == pytest.approx(2 * 2**20 / 0.002 / 1e9)
    assert ours.figures["transfer ratio"] == "2.00 (2.00 to 2.00)"
    assert "transfer ratio" not in theirs.figures
    assert ours.verdict == Verdict("good", "4/4 answers match")


def test_rank_of_decode_that_has_not_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics.CountersSince, "wait_for", lambda self, *_: self.changed())
    with pytest.raises(RuntimeError, match=r"1 of 2 ranks of nixl-kv have read; see decode\.log"):
        ttft.ask_in_turn(pairs_of([], reading=1), "nixl-kv", [4], itertools.count())


def test_answer_that_differs_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttft, "count_matches", lambda *_: 3)
    options = argparse.Namespace(lengths=[4], repeat=2, shape="tiny")
    (ours, _) = ttft.measure(pairs_of([]), "nixl-kv", options)
    assert ours.verdict == Verdict("bad", "3/4 answers match")
