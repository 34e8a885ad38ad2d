"""The launcher's knobs: what they may be, what they become, and who gets which GPU."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pd.accuracy_eval import Evaluation, Job
from pd.accuracy_machine import Machine, assign, detect, members
from pd.accuracy_models import Subject
from pd.accuracy_run import pair_spec, single_spec
from pd.accuracy_settings import OTHER_KNOBS, SHAPE_KNOBS, SettingError, Settings, parse
from pd.engines import Engine
from pd.processes import Ports

REPO = Path(__file__).resolve().parents[2]
CPU = Machine()
BACKENDS = ("FLASH_ATTN", "FLASHINFER")
ONE_GPU = Machine("cuda", ("0",), BACKENDS)
TWO_GPUS = Machine("cuda", ("0", "1"), BACKENDS)


def settings(machine: Machine = CPU, /, *flags: str, **env: str) -> Settings:
    return parse(flags, env, machine)


def job(found: Settings, tmp_path: Path) -> Job:
    return Job(Subject("m", "/models/m", "recall", 1.0, 0.02), found, tmp_path)


def test_the_defaults_are_those_of_vllms_launcher() -> None:
    found = settings(TWO_GPUS)
    for side in (found.prefill, found.decode):
        assert (side.instances, side.tensor_parallel, side.block_size) == (1, 1, 128)
        assert side.layout is None
    assert found.gpu_memory_utilization == 0.2
    assert found.attention_backend is None
    assert found.concurrent == 100
    assert found.models == ()
    assert found.verify == "all"
    assert (found.single, found.limit) == (False, None)


def test_every_knob_is_read() -> None:
    env = {
        "ATTENTION_BACKEND": "flashinfer",
        "DECODER_KV_LAYOUT": "NHD",
        "DECODER_TP_SIZE": "2",
        "DECODE_BLOCK_SIZE": "64",
        "EXPECTED_ACCURACY": "0.5",
        "GPU_MEMORY_UTILIZATION": "0.1",
        "MODEL_NAMES": "a/b  c/d,e/f, ",
        "NUM_CONCURRENT": "7",
        "NUM_DECODE_INSTANCES": "3",
        "NUM_PREFILL_INSTANCES": "4",
        "PREFILLER_KV_LAYOUT": "BHLNC",
        "PREFILLER_TP_SIZE": "1",
        "PREFILL_BLOCK_SIZE": "16",
        "TOLERANCE": "0",
        "VERIFY": " sample:0.1 ",
        "VLLM_ATTENTION_BACKEND": "FLASH_ATTN",
        "VLLM_KV_CACHE_LAYOUT": "HND",
        "VLLM_SERVE_EXTRA_ARGS": "--max-model-len, 8192,",
    }
    assert env.keys() == SHAPE_KNOBS | OTHER_KNOBS
    found = parse(["--single", "--limit", "20"], env, TWO_GPUS)
    assert found.models == ("a/b", "c/d", "e/f")
    assert (found.prefill.instances, found.decode.instances) == (4, 3)
    assert (found.prefill.tensor_parallel, found.decode.tensor_parallel) == (1, 2)
    assert (found.prefill.block_size, found.decode.block_size) == (16, 64)
    assert (found.prefill.layout, found.decode.layout) == ("BHLNC", "NHD")
    assert found.attention_backend == "FLASHINFER"
    assert found.gpu_memory_utilization == 0.1
    assert found.verify == "sample:0.1"
    assert found.concurrent == 7
    assert (found.expected, found.tolerance) == (0.5, 0.0)
    assert found.engine_args == ("--max-model-len", "8192")
    assert (found.single, found.limit) == (True, 20)


def test_the_flag_goes_before_the_variable_and_this_before_its_older_name() -> None:
    older = {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}
    assert settings(ONE_GPU, **older).attention_backend == "FLASHINFER"
    newer = older | {"ATTENTION_BACKEND": "FLASH_ATTN"}
    assert settings(ONE_GPU, **newer).attention_backend == "FLASH_ATTN"
    flags = ("--attention-backend", "FLASHINFER")
    assert settings(ONE_GPU, *flags, **newer).attention_backend == "FLASHINFER"


def test_one_layout_for_both_sides() -> None:
    found = settings(ONE_GPU, VLLM_KV_CACHE_LAYOUT="NHD", DECODER_KV_LAYOUT="HND")
    assert (found.prefill.layout, found.decode.layout) == ("NHD", "HND")


def test_empty_variables_are_not_set_but_verify_may_be_left_out() -> None:
    names = SHAPE_KNOBS | OTHER_KNOBS
    assert settings(**dict.fromkeys(names - {"VERIFY"}, "")) == settings()
    assert settings(VERIFY="").verify is None


@pytest.mark.parametrize(
    ("machine", "name", "value", "allowed"),
    [
        (CPU, "NUM_PREFILL_INSTANCES", "0", "from 1 to 64"),
        (CPU, "NUM_DECODE_INSTANCES", "-1", "from 1 to 64"),
        (CPU, "NUM_DECODE_INSTANCES", "two", "from 1 to 64"),
        (CPU, "PREFILLER_TP_SIZE", "1.5", "from 1 to 64"),
        (CPU, "DECODER_TP_SIZE", "²", "from 1 to 64"),
        (CPU, "PREFILL_BLOCK_SIZE", "100", "a multiple of 32"),
        (ONE_GPU, "DECODE_BLOCK_SIZE", "24", "a multiple of 16"),
        (CPU, "DECODE_BLOCK_SIZE", "2048", "to 1024"),
        (CPU, "GPU_MEMORY_UTILIZATION", "0", "above 0 up to 1"),
        (CPU, "GPU_MEMORY_UTILIZATION", "much", "above 0 up to 1"),
        (CPU, "GPU_MEMORY_UTILIZATION", "nan", "above 0 up to 1"),
        (CPU, "ATTENTION_BACKEND", "FLASHINFER", "on CPU allowed is one of CPU_ATTN"),
        (ONE_GPU, "VLLM_ATTENTION_BACKEND", "XFORMERS", "FLASH_ATTN, FLASHINFER"),
        (CPU, "VLLM_KV_CACHE_LAYOUT", "NHD", "HND, LBHNC"),
        (ONE_GPU, "DECODER_KV_LAYOUT", "DHN", "BHLNC"),
        (CPU, "NUM_CONCURRENT", "0", "from 1"),
        (CPU, "NUM_CONCURRENT", "9" * 5000, "from 1"),
        (CPU, "DP_EP", "1", "never data parallel"),
        (ONE_GPU, "CROSS_LAYERS_BLOCKS", "True", "do not span layers, allowed is False"),
        (ONE_GPU, "ENFORCE_EAGER", "0", "without CUDA graphs, allowed is 1"),
        (CPU, "VERIFY", "some", "off, sample:RATE"),
        (CPU, "VERIFY", "sample:2", "from 0 to 1"),
        (CPU, "EXPECTED_ACCURACY", "41", "from 0 up to 1"),
        (CPU, "TOLERANCE", "-0.1", "from 0 up to 1"),
        (ONE_GPU, "DECODER_TP_SIZE", "2", "up to 1, the number of GPUs"),
    ],
)
def test_what_is_not_allowed_is_named_with_its_value(
    machine: Machine, name: str, value: str, allowed: str
) -> None:
    with pytest.raises(SettingError) as raised:
        settings(machine, **{name: value})
    said = str(raised.value)
    assert said.startswith(f"{name}={value}: ")
    assert allowed in said


@pytest.mark.parametrize(
    ("machine", "flags", "said"),
    [
        (CPU, ("--kv_buffer_device", "cuda"), "--kv_buffer_device=cuda: .* allowed is cpu"),
        (ONE_GPU, ("--kv_buffer_device", "cpu"), "--kv_buffer_device=cpu: .* allowed is cuda"),
        (ONE_GPU, ("--attention-backend", "FOO"), "--attention-backend=FOO: .*FLASHINFER"),
        (CPU, ("--enable-cross-layers",), "--enable-cross-layers: there is no such flag"),
        (CPU, ("--sing",), "--sing: there is no such flag"),
        (CPU, ("--limit", "0"), "--limit=0: allowed is a whole number from 1"),
        (CPU, ("--limit",), "argument --limit: expected one argument: usage"),
        (CPU, ("--limit", ""), r"--limit=\(nothing\): allowed is a whole number from 1"),
        (CPU, ("--json", ""), "--json=: allowed is a file"),
        (CPU, ("--json", "/"), "--json=/: allowed is a file"),
        (CPU, ("--json", f"{__file__}/x.json"), "--json=.*: allowed is a file"),
        (CPU, ("--log-dir", ""), "--log-dir=: allowed is a folder"),
        (CPU, ("--log-dir", __file__), "--log-dir=.*: allowed is a folder"),
        (CPU, ("--log-dir", f"{__file__}/logs"), "--log-dir=.*: allowed is a folder"),
    ],
)
def test_flags_that_are_not_allowed(machine: Machine, flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        settings(machine, *flags)


def test_files_and_folders_may_be_there_or_not(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "a" / "b"):
        assert settings(CPU, "--log-dir", str(place)).log_dir == place
    for file in (Path(__file__), tmp_path / "a" / "b.json"):
        assert settings(CPU, "--json", str(file)).json_path == file


def test_knobs_of_vllms_launcher_that_change_nothing() -> None:
    same = {"DP_EP": "", "CROSS_LAYERS_BLOCKS": "False", "ENFORCE_EAGER": "1"}
    assert settings(ONE_GPU, **same) == settings(ONE_GPU)


def test_the_device_may_be_named() -> None:
    assert settings(CPU, "--kv_buffer_device", "cpu") == settings(CPU)
    assert settings(ONE_GPU, "--kv_buffer_device=cuda") == settings(ONE_GPU)


def test_prefill_takes_the_first_gpus_and_decode_goes_on_wrapping_round() -> None:
    # ATTENTION_BACKEND=FLASHINFER NUM_DECODE_INSTANCES=1 DECODER_TP_SIZE=2 on two GPUs
    found = settings(TWO_GPUS, ATTENTION_BACKEND="FLASHINFER", DECODER_TP_SIZE="2")
    assert found.gpus() == [("0",), ("1", "0")]
    assert settings(ONE_GPU).gpus() == [("0",), ("0",)]
    assert settings(CPU, DECODER_TP_SIZE="2").gpus() == [(), ()]


@pytest.mark.parametrize("count", range(2, 9))
def test_no_engine_gets_a_gpu_twice_and_none_is_idle_while_another_has_two(count: int) -> None:
    gpus = [str(number) for number in range(count)]
    given = assign(gpus, [2, 1, 2, 2])
    assert [len(set(mine)) for mine in given] == [2, 1, 2, 2]
    used = [gpu for mine in given for gpu in mine]
    shares = [used.count(gpu) for gpu in gpus]
    assert max(shares) - min(shares) <= 1


def test_engines_that_share_a_gpu_must_fit_into_it() -> None:
    assert settings(ONE_GPU, GPU_MEMORY_UTILIZATION="0.5").gpu_memory_utilization == 0.5
    with pytest.raises(SettingError, match=r"GPU_MEMORY_UTILIZATION=0.6: 2 engines .* up to 0.5"):
        settings(ONE_GPU, GPU_MEMORY_UTILIZATION="0.6")
    assert settings(TWO_GPUS, GPU_MEMORY_UTILIZATION="0.9").gpus() == [("0",), ("1",)]
    six = {"NUM_PREFILL_INSTANCES": "5"}
    with pytest.raises(SettingError, match=r"6 engines share a GPU, allowed is up to 0.166$"):
        settings(ONE_GPU, GPU_MEMORY_UTILIZATION="0.167", **six)
    assert settings(ONE_GPU, GPU_MEMORY_UTILIZATION="0.166", **six).gpus() == [("0",)] * 6


def test_gpus_are_named_as_the_environment_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert detect({}).gpus == ("0", "1")
    assert detect({"CUDA_VISIBLE_DEVICES": "5, 3"}).gpus == ("5", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect({"CUDA_VISIBLE_DEVICES": "5"}) == CPU


def test_the_names_of_an_enumeration() -> None:
    source = (
        'class A(Enum):\n    X = 1\nclass B(Enum):\n    """Doc."""\n    Y = "y"\n    Z = (\n1)\n'
    )
    assert members(source, "B") == ["Y", "Z"]


def test_engines_are_what_the_knobs_say(tmp_path: Path) -> None:
    env = {
        "DECODER_TP_SIZE": "2",
        "DECODE_BLOCK_SIZE": "64",
        "ATTENTION_BACKEND": "FLASHINFER",
        "DECODER_KV_LAYOUT": "NHD",
        "NUM_PREFILL_INSTANCES": "2",
    }
    spec = pair_spec(job(settings(TWO_GPUS, **env), tmp_path))
    assert [one.name for one in (*spec.prefill, *spec.decode)] == [
        "prefill-0",
        "prefill-1",
        "decode-0",
    ]
    (decode,) = spec.decode
    command = " ".join(Engine(decode, tmp_path, Ports()).command())
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
    assert spec.prefill[1].extra_env == {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize("machine", [CPU, ONE_GPU])
def test_engines_verify_and_recompute(machine: Machine, tmp_path: Path) -> None:
    spec = pair_spec(job(settings(machine), tmp_path))
    for one in (*spec.prefill, *spec.decode):
        transfer = Engine(one, tmp_path, Ports()).kv_transfer_config()
        assert transfer is not None
        assert transfer["kv_load_failure_policy"] == "recompute"
        extra = transfer["kv_connector_extra_config"]
        assert isinstance(extra, dict)
        assert extra["verify"] == "all"
    without = pair_spec(job(settings(machine, VERIFY=""), tmp_path))
    assert without.decode[0].connector_config["verify"] == "off"


def test_the_single_engine_has_no_connector(tmp_path: Path) -> None:
    spec = single_spec(job(settings(TWO_GPUS, PREFILLER_TP_SIZE="2"), tmp_path))
    assert Engine(spec, tmp_path, Ports()).kv_transfer_config() is None
    assert spec.tensor_parallel == 1
    assert spec.extra_env == {"CUDA_VISIBLE_DEVICES": "0"}


def test_an_engine_has_the_layout_of_its_side_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def layouts(**env: str) -> list[str | None]:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        mine = job(settings(ONE_GPU, **env), tmp_path)
        pair = pair_spec(mine)
        specs = (*pair.prefill, *pair.decode, single_spec(mine))
        found = [Engine(spec, tmp_path, Ports()).environment() for spec in specs]
        return [env.get("VLLM_KV_CACHE_LAYOUT") for env in found]

    assert layouts(VLLM_KV_CACHE_LAYOUT="") == [None, None, None]
    assert layouts(VLLM_KV_CACHE_LAYOUT="NHD") == ["NHD", "NHD", None]
    assert layouts(VLLM_KV_CACHE_LAYOUT="", DECODER_KV_LAYOUT="HND") == [None, "HND", None]


def test_arguments_for_a_model_are_not_for_its_substitute(tmp_path: Path) -> None:
    wanted = job(settings(VLLM_SERVE_EXTRA_ARGS="--max-model-len,8192"), tmp_path)
    instead = replace(wanted, subject=replace(wanted.subject, instead_of="a/b"))
    assert pair_spec(wanted).decode[0].extra_args[-2:] == ("--max-model-len", "8192")
    assert "--max-model-len" not in pair_spec(instead).decode[0].extra_args


def test_lm_eval_asks_the_router_and_no_hub(tmp_path: Path) -> None:
    evaluation = Evaluation("lm-eval", "http://127.0.0.1:1", job(settings(), tmp_path))
    command = " ".join(evaluation.command())
    assert '"base_url": "http://127.0.0.1:1/v1/completions"' in command
    assert "--model local-completions" in command
    assert '"tokenizer": "/models/m"' in command
    assert f"--tasks recall --include_path {REPO / 'configs/lm_eval'}" in command


def test_the_script_refuses_before_anything_starts(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ended = subprocess.run(
        [str(REPO / "scripts/run_accuracy_test.sh"), "--log-dir", str(tmp_path / "logs")],
        env=os.environ | {"NIXL_KV_PYTHON": sys.executable, "NUM_PREFILL_INSTANCES": "0"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.strip() == "NUM_PREFILL_INSTANCES=0: allowed is a whole number from 1 to 64"
    assert not (tmp_path / "logs").exists()


def test_the_document_has_every_knob() -> None:
    text = (REPO / "docs/accuracy.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    described = {row.split("`")[1] for row in rows}
    assert described >= SHAPE_KNOBS | OTHER_KNOBS | {"--kv_buffer_device DEVICE", "--single"}
