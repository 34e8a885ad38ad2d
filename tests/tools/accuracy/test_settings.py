"""The launcher's knobs: what they may be, and what they become."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.cluster.engines import Device
from harness.cluster.models.files import REPO
from lab.accuracy import settings as module
from lab.accuracy.machine import Machine
from lab.accuracy.settings import (
    REFUSED,
    SHAPE_KNOBS,
    Knobs,
    SettingError,
    Settings,
    parse,
)

CPU = Machine()
BACKENDS = ("FLASH_ATTN", "FLASHINFER")
ONE_GPU = Machine("cuda", ("0",), BACKENDS)
TWO_GPUS = Machine("cuda", ("0", "1"), BACKENDS)
EVERY_KNOB = {
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


def settings(machine: Machine = CPU, /, *flags: str, **env: str) -> Settings:
    return parse(flags, env, machine)


def test_defaults_are_those_of_vllms_launcher() -> None:
    default = settings(TWO_GPUS)
    for side in (default.prefill, default.decode):
        assert (side.instances, side.tensor_parallel, side.block_size) == (1, 1, 128)
        assert side.layout is None
    assert default.gpu_memory_utilization == 0.2
    assert default.attention_backend is None
    assert default.concurrent == 100
    assert default.models == ()
    assert default.verify == "all"
    assert (default.single, default.limit) == (False, None)


def test_every_knob_is_used() -> None:
    given = parse(["--single", "--limit", "20"], EVERY_KNOB, TWO_GPUS)
    assert given.models == ("a/b", "c/d", "e/f")
    assert (given.prefill.instances, given.decode.instances) == (4, 3)
    assert (given.prefill.tensor_parallel, given.decode.tensor_parallel) == (1, 2)
    assert (given.prefill.block_size, given.decode.block_size) == (16, 64)
    assert (given.prefill.layout, given.decode.layout) == ("BHLNC", "NHD")
    assert given.attention_backend == "FLASHINFER"
    assert given.gpu_memory_utilization == 0.1
    assert given.verify == "sample:0.1"
    assert given.concurrent == 7
    assert (given.expected, given.tolerance) == (0.5, 0.0)
    assert given.engine_args == ("--max-model-len", "8192")
    assert (given.single, given.limit) == (True, 20)


def test_document_has_exactly_the_knobs_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()

    class Recorder(dict[str, str]):
        def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
            read.add(name)
            return super().get(name, default)

    class RecordingKnobs(Knobs):
        def __init__(self, values: Mapping[str, str], device: Device) -> None:
            super().__init__(Recorder(values), device)

    monkeypatch.setattr(module, "Knobs", RecordingKnobs)
    settings()
    variables = {name for name in read if not name.startswith("-")} - REFUSED.keys()
    text = (REPO / "docs/accuracy.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([A-Z_]+)`", text, re.MULTILINE)) == variables == EVERY_KNOB.keys()
    assert variables >= SHAPE_KNOBS
    assert set(re.findall(r"^\| `(--\S+?)[ `]", text, re.MULTILINE)) == {
        *("--attention-backend", "--json", "--kv_buffer_device", "--limit", "--log-dir"),
        "--single",
    }


def test_flag_goes_before_the_variable_and_this_before_its_older_name() -> None:
    older = {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}
    assert settings(ONE_GPU, **older).attention_backend == "FLASHINFER"
    newer = older | {"ATTENTION_BACKEND": "FLASH_ATTN"}
    assert settings(ONE_GPU, **newer).attention_backend == "FLASH_ATTN"
    flags = ("--attention-backend", "FLASHINFER")
    assert settings(ONE_GPU, *flags, **newer).attention_backend == "FLASHINFER"


def test_layout_of_one_side_goes_before_that_of_both() -> None:
    given = settings(ONE_GPU, VLLM_KV_CACHE_LAYOUT="NHD", DECODER_KV_LAYOUT="HND")
    assert (given.prefill.layout, given.decode.layout) == ("NHD", "HND")


def test_empty_variables_are_not_set_but_verify_may_be_empty() -> None:
    names = EVERY_KNOB.keys() - {"VERIFY"}
    assert settings(**dict.fromkeys(names, "")) == settings()
    assert settings(VERIFY="").verify is None


@pytest.mark.parametrize(
    ("machine", "name", "value", "allowed"),
    [
        (CPU, "NUM_PREFILL_INSTANCES", "0", "a whole number from 1 to 64"),
        (CPU, "NUM_DECODE_INSTANCES", "-1", "from 1 to 64"),
        (CPU, "NUM_DECODE_INSTANCES", "two", "from 1 to 64"),
        (CPU, "PREFILLER_TP_SIZE", "1.5", "from 1 to 64"),
        (CPU, "PREFILLER_TP_SIZE", "1_0", "from 1 to 64"),
        (CPU, "DECODER_TP_SIZE", "²", "from 1 to 64"),
        (CPU, "PREFILL_BLOCK_SIZE", "100", "from 32 to 1024, a multiple of 32"),
        (ONE_GPU, "DECODE_BLOCK_SIZE", "24", "from 16 to 1024, a multiple of 16"),
        (CPU, "DECODE_BLOCK_SIZE", "2048", "to 1024"),
        (CPU, "GPU_MEMORY_UTILIZATION", "0", "above 0 up to 1"),
        (CPU, "GPU_MEMORY_UTILIZATION", "much", "above 0 up to 1"),
        (CPU, "GPU_MEMORY_UTILIZATION", "nan", "above 0 up to 1"),
        (CPU, "ATTENTION_BACKEND", "FLASHINFER", "on CPU allowed is one of CPU_ATTN"),
        (ONE_GPU, "VLLM_ATTENTION_BACKEND", "XFORMERS", "on CUDA .* FLASH_ATTN, FLASHINFER"),
        (CPU, "VLLM_KV_CACHE_LAYOUT", "NHD", "HND, LBHNC"),
        (ONE_GPU, "DECODER_KV_LAYOUT", "DHN", "BHLNC"),
        (CPU, "NUM_CONCURRENT", "0", "from 1 to 1024"),
        (CPU, "NUM_CONCURRENT", "9" * 5000, "from 1 to 1024"),
        (CPU, "DP_EP", "1", "never data parallel"),
        (ONE_GPU, "CROSS_LAYERS_BLOCKS", "True", "do not span layers, allowed is False"),
        (ONE_GPU, "ENFORCE_EAGER", "0", "without CUDA graphs, allowed is 1"),
        (CPU, "VERIFY", "some", "off, sample:RATE"),
        (CPU, "VERIFY", "sample:2", "from 0 to 1"),
        (CPU, "EXPECTED_ACCURACY", "41", "from 0 up to 1"),
        (CPU, "TOLERANCE", "-0.1", "from 0 up to 1"),
        (ONE_GPU, "DECODER_TP_SIZE", "2", "up to 1, the number of GPUs"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else value.device,
)
def test_value_that_is_not_allowed_is_named_with_what_is(
    machine: Machine, name: str, value: str, allowed: str
) -> None:
    with pytest.raises(SettingError) as raised:
        settings(machine, **{name: value})
    words = str(raised.value)
    assert words.startswith(f"{name}={value}: ")
    assert re.search(allowed, words)


@pytest.mark.parametrize(
    ("machine", "flags", "words"),
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
    ids=lambda value: value.device if isinstance(value, Machine) else "",
)
def test_flag_that_is_not_allowed_is_named_with_what_is(
    machine: Machine, flags: tuple[str, ...], words: str
) -> None:
    with pytest.raises(SettingError, match=words):
        settings(machine, *flags)


def test_files_and_folders_may_be_there_or_not(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "a" / "b"):
        assert settings(CPU, "--log-dir", str(place)).log_dir == place
    for file in (Path(__file__), tmp_path / "a" / "b.json"):
        assert settings(CPU, "--json", str(file)).json_path == file


def test_knobs_of_vllms_launcher_may_have_values_that_change_nothing() -> None:
    same = {"DP_EP": "", "CROSS_LAYERS_BLOCKS": "False", "ENFORCE_EAGER": "1"}
    assert settings(ONE_GPU, **same) == settings(ONE_GPU)


def test_device_at_hand_may_be_named() -> None:
    assert settings(CPU, "--kv_buffer_device", "cpu") == settings(CPU)
    assert settings(ONE_GPU, "--kv_buffer_device=cuda") == settings(ONE_GPU)


def test_prefill_gets_the_first_gpus_and_decode_the_next_wrapping_round() -> None:
    # ATTENTION_BACKEND=FLASHINFER NUM_DECODE_INSTANCES=1 DECODER_TP_SIZE=2 on two GPUs
    given = settings(TWO_GPUS, ATTENTION_BACKEND="FLASHINFER", DECODER_TP_SIZE="2")
    assert given.gpus() == [("0",), ("1", "0")]
    assert settings(ONE_GPU).gpus() == [("0",), ("0",)]
    assert settings(CPU, DECODER_TP_SIZE="2").gpus() == [(), ()]


def test_engines_that_share_a_gpu_must_fit_into_it() -> None:
    assert settings(ONE_GPU, GPU_MEMORY_UTILIZATION="0.5").gpu_memory_utilization == 0.5
    with pytest.raises(SettingError, match=r"GPU_MEMORY_UTILIZATION=0.6: 2 engines .* up to 0.5"):
        settings(ONE_GPU, GPU_MEMORY_UTILIZATION="0.6")
    assert settings(TWO_GPUS, GPU_MEMORY_UTILIZATION="0.9").gpus() == [("0",), ("1",)]
    six = {"NUM_PREFILL_INSTANCES": "5"}
    with pytest.raises(SettingError, match=r"6 engines share a GPU, allowed is up to 0.166$"):
        settings(ONE_GPU, GPU_MEMORY_UTILIZATION="0.167", **six)
    assert settings(ONE_GPU, GPU_MEMORY_UTILIZATION="0.166", **six).gpus() == [("0",)] * 6
