"""Which engines a job has, and what is made of what they count."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from harness.cluster.client import Client
from harness.cluster.engines import PATIENT, Engine, EngineSpec
from harness.cluster.metrics import CACHED_TOKENS, LOADS, PROMPT_TOKENS, CountersSince
from harness.cluster.processes import Ports
from harness.cluster.router import Router
from lab.accuracy import __main__ as main
from lab.accuracy import run
from lab.accuracy.evaluation import Evaluation, Job, Score
from lab.accuracy.machine import Machine
from lab.accuracy.models import Subject
from lab.accuracy.outcome import Outcome
from lab.accuracy.run import add_up, clear, compare, judge_pair, pair_specs, single_spec
from lab.accuracy.settings import parse

CPU = Machine()
ONE_GPU = Machine("cuda", ("0",), ("FLASHINFER",))
TWO_GPUS = Machine("cuda", ("0", "1"), ("FLASHINFER",))
SUBJECT = Subject("m", "/models/m", "recall", 0.9, 0.02)
MakeJob = Callable[..., Job]


@pytest.fixture
def job(tmp_path: Path) -> MakeJob:
    def make(machine: Machine = CPU, **env: str) -> Job:
        return Job(SUBJECT, parse([], env, machine), tmp_path)

    return make


def engine_of(spec: EngineSpec) -> Engine:
    return Engine(spec, Path("logs"), Ports())


def score(*answers: str, accuracy: float = 0.9) -> Score:
    return Score(accuracy, 10, {str(at): answer for at, answer in enumerate(answers)}, 0, 1.0)


def test_engines_are_what_the_knobs_say(job: MakeJob) -> None:
    env = {
        "DECODER_TP_SIZE": "2",
        "DECODE_BLOCK_SIZE": "64",
        "ATTENTION_BACKEND": "FLASHINFER",
        "DECODER_KV_LAYOUT": "NHD",
        "NUM_PREFILL_INSTANCES": "2",
    }
    prefill, (decode,) = pair_specs(job(TWO_GPUS, **env))
    assert [one.name for one in (*prefill, decode)] == ["prefill-0", "prefill-1", "decode-0"]
    command = " ".join(engine_of(decode).arguments())
    for words in (
        "--model /models/m --served-model-name m",
        "--tensor-parallel-size 2",
        "--block-size 64",
        "--attention-backend FLASHINFER",
        "--gpu-memory-utilization 0.2",
        "--enforce-eager",
    ):
        assert words in command
    assert decode.extra_env == {"CUDA_VISIBLE_DEVICES": "0,1", "VLLM_KV_CACHE_LAYOUT": "NHD"}
    assert prefill[1].extra_env == {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize("machine", [CPU, ONE_GPU], ids=["cpu", "cuda"])
def test_engines_verify(job: MakeJob, machine: Machine) -> None:
    for (spec,) in pair_specs(job(machine)):
        transfer = engine_of(spec).kv_transfer_config()
        assert transfer is not None
        extra = transfer["kv_connector_extra_config"]
        assert isinstance(extra, dict)
        assert extra["verify"] == "all"
        assert (extra.items() >= PATIENT.items()) == (machine is CPU)


def test_nothing_is_verified_where_that_is_not_asked_for(job: MakeJob) -> None:
    _, (decode,) = pair_specs(job(VERIFY=""))
    assert decode.connector_config["verify"] == "off"


def test_single_engine_has_one_rank_and_no_connector(job: MakeJob) -> None:
    spec = single_spec(job(TWO_GPUS, PREFILLER_TP_SIZE="2", PREFILL_BLOCK_SIZE="64"))
    assert engine_of(spec).kv_transfer_config() is None
    assert (spec.tensor_parallel, spec.block_size) == (1, 64)
    assert spec.extra_env == {"CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize(
    ("env", "layouts"),
    [
        ({"VLLM_KV_CACHE_LAYOUT": ""}, [None, None, None]),
        ({"VLLM_KV_CACHE_LAYOUT": "NHD"}, ["NHD", "NHD", None]),
        ({"VLLM_KV_CACHE_LAYOUT": "", "DECODER_KV_LAYOUT": "HND"}, [None, "HND", None]),
    ],
    ids=["none", "of both sides", "of decode"],
)
def test_engine_has_the_layout_of_its_side_alone(
    job: MakeJob,
    monkeypatch: pytest.MonkeyPatch,
    env: dict[str, str],
    layouts: list[str | None],
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    mine = job(ONE_GPU, **env)
    prefill, decode = pair_specs(mine)
    environments = [
        engine_of(spec).environment() for spec in (*prefill, *decode, single_spec(mine))
    ]
    assert [one.get("VLLM_KV_CACHE_LAYOUT") for one in environments] == layouts


def test_arguments_for_a_model_are_not_for_its_substitute(job: MakeJob) -> None:
    wanted = job(VLLM_SERVE_EXTRA_ARGS="--max-model-len,8192")
    instead = replace(wanted, subject=replace(SUBJECT, instead_of="a/b"))
    assert pair_specs(wanted)[1][0].extra_args[-2:] == ("--max-model-len", "8192")
    assert "--max-model-len" not in pair_specs(instead)[1][0].extra_args


def test_gsm8k_on_cpu_has_a_context_that_fits_into_memory(job: MakeJob) -> None:
    for machine, arguments in ((CPU, ("--max-model-len", "4096")), (ONE_GPU, ("--enforce-eager",))):
        gsm8k = replace(job(machine), subject=replace(SUBJECT, task="gsm8k"))
        _, (decode,) = pair_specs(gsm8k)
        assert decode.extra_args == arguments
        assert ("VLLM_CPU_KVCACHE_SPACE" in decode.extra_env) == (machine is CPU)


def test_decode_computed_what_it_neither_had_nor_read(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {LOADS: 5.0, PROMPT_TOKENS: 500.0, CACHED_TOKENS: 480.0}
    monkeypatch.setattr(Client, "counters", lambda _: {})
    monkeypatch.setattr(CountersSince, "changed", lambda _: changed)
    monkeypatch.setattr(Evaluation, "run", lambda *_: score())
    _, (spec,) = pair_specs(job())
    router = Router(Path("logs/r.log"), [], [engine_of(spec)] * 2, ports=Ports())
    outcome, _ = judge_pair(job(), router)
    assert (outcome.computed, outcome.counters) == (40, {"loads_total": 10.0})
    assert (outcome.accuracy, outcome.items) == (0.9, 10)


def test_counters_are_added_up_over_engines() -> None:
    one = {"vllm:nixl_kv_loads_total": 2.0, "vllm:nixl_kv_loads_created": 9.0, "vllm:other": 1.0}
    assert add_up([one, one]) == {"loads_total": 4.0}


def test_answers_that_differ_from_the_single_engines_are_counted(job: MakeJob) -> None:
    pair, single = score("yes", "no", "yes"), score("yes", "yes", accuracy=1.0)
    outcome = compare(Outcome.before(job()), pair, single)
    assert (outcome.single, outcome.differing) == (1.0, 2)


def test_what_an_earlier_run_left_is_cleared(tmp_path: Path) -> None:
    old = tmp_path / "lm-eval" / "m"
    old.mkdir(parents=True)
    for path in (tmp_path / "lm-eval.log", tmp_path / "decode-0.log", old / "results_1.json"):
        path.write_text("API request failed\n", encoding="utf-8")
    (tmp_path / "notes.txt").touch()
    clear(tmp_path)
    clear(tmp_path / "nowhere")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (RuntimeError("http://decode: HTTP 500: no\nmore"), "http://decode: HTTP 500: no"),
        (httpx.ReadTimeout(""), "ReadTimeout"),
        (KeyError("exact_match,none"), "KeyError: 'exact_match,none'"),
        (PermissionError(13, "Permission denied"), "PermissionError: [Errno 13] Permission denied"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_trouble_with_one_model_is_its_verdict_and_the_next_one_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    verdict: str,
) -> None:
    def run_pair(job: Job, _: object) -> tuple[Outcome, Score]:
        if job.subject.name == "bad":
            raise error
        counters = {"loads_total": 10, "tokens_loaded_total": 90, "bytes_read_total": 1}
        good = replace(Outcome.before(job), accuracy=0.9, items=10, counters=counters)
        return good, score()

    monkeypatch.setattr(run, "run_pair", run_pair)
    result = tmp_path / "new" / "result.json"
    settings = parse(["--json", str(result)], {"VERIFY": "off"}, CPU)
    evaluated = [replace(SUBJECT, name=name) for name in ("bad", "good")]
    assert main.run_all(evaluated, settings, tmp_path) == 1
    written = json.loads(result.read_text(encoding="utf-8"))
    assert [one["verdict"] for one in written] == [verdict, "ok"]
    assert capsys.readouterr().out.endswith("1/2 models are good\n")
