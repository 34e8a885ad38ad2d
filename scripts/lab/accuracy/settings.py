"""The launcher's knobs: environment variables and flags, all checked before anything starts."""

import argparse
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from pd.accuracy_machine import Machine, assign
from pd.engines import Device

USAGE: Final = """\
bash scripts/run_accuracy_test.sh [--kv_buffer_device DEVICE] [--attention-backend NAME]
       [--single] [--limit N] [--json FILE] [--log-dir DIR]"""
LAYOUTS: Final[Mapping[Device, Sequence[str]]] = {
    "cpu": ("HND", "LBHNC"),
    "cuda": ("HND", "NHD", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"),
}
BLOCK_MULTIPLE: Final[Mapping[Device, int]] = {"cpu": 32, "cuda": 16}
CONCURRENT: Final[Mapping[Device, int]] = {"cpu": 4, "cuda": 100}
DEFAULT_BLOCK = 128
DEFAULT_MEMORY = 0.2
MOST_INSTANCES = 64
MOST_TOKENS_IN_A_BLOCK = 1024
MOST_REQUESTS = 1024
SHAPE_KNOBS: Final = frozenset(
    {
        "ATTENTION_BACKEND",
        "DECODER_KV_LAYOUT",
        "DECODER_TP_SIZE",
        "DECODE_BLOCK_SIZE",
        "GPU_MEMORY_UTILIZATION",
        "NUM_DECODE_INSTANCES",
        "NUM_PREFILL_INSTANCES",
        "PREFILLER_KV_LAYOUT",
        "PREFILLER_TP_SIZE",
        "PREFILL_BLOCK_SIZE",
        "VLLM_ATTENTION_BACKEND",
        "VLLM_KV_CACHE_LAYOUT",
    }
)
"""Those that say which engines there are, and how they store KV."""

OTHER_KNOBS: Final = frozenset(
    {
        "EXPECTED_ACCURACY",
        "MODEL_NAMES",
        "NUM_CONCURRENT",
        "TOLERANCE",
        "VERIFY",
        "VLLM_SERVE_EXTRA_ARGS",
    }
)
REFUSED: Final[Mapping[str, tuple[Sequence[str], str]]] = {
    "CROSS_LAYERS_BLOCKS": (("0", "FALSE"), "blocks do not span layers, allowed is False"),
    "DP_EP": ((), "decode is never data parallel here, allowed is nothing"),
    "ENFORCE_EAGER": (("1", "TRUE"), "engines run without CUDA graphs, allowed is 1"),
}
"""Knobs of vLLM's launcher: the values that change nothing, and why no others are allowed."""

VERIFY = re.compile(r"off|all|sample:(0?\.\d+|1(\.0+)?|0)")


class SettingError(ValueError):
    """A knob with a value that is not allowed: names it, its value and what is allowed."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        """Takes the variable or flag, its value if it has one, and what is allowed."""
        super().__init__(f"{name}: {allowed}" if value is None else f"{name}={value}: {allowed}")


@dataclass(frozen=True)
class Side:
    """All prefill engines, or all decode engines."""

    instances: int
    tensor_parallel: int
    block_size: int
    layout: str | None  # None: the connector's choice


@dataclass(frozen=True)
class Settings:
    """Every knob, checked. None is the default of whoever uses it."""

    machine: Machine
    models: tuple[str, ...]
    prefill: Side
    decode: Side
    gpu_memory_utilization: float
    attention_backend: str | None
    verify: str | None
    concurrent: int
    expected: float | None
    tolerance: float | None
    engine_args: tuple[str, ...]
    single: bool
    limit: int | None
    json_path: Path | None
    log_dir: Path | None

    @property
    def ranks(self) -> list[int]:
        """Of each engine: prefill first, then decode."""
        sides = (self.prefill, self.decode)
        return [side.tensor_parallel for side in sides for _ in range(side.instances)]

    def gpus(self) -> list[tuple[str, ...]]:
        """Of each engine, in the order of `ranks`; empty ones on CPU."""
        return assign(self.machine.gpus, self.ranks)


class Knobs:
    """Reads environment variables; an empty one counts as one that is not set."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Takes the environment."""
        self._env = env

    def text(self, name: str) -> str | None:
        """As it stands; None if not set."""
        return self._env.get(name, "").strip() or None

    def whole(self, name: str, default: int, *, most: int, multiple: int = 1) -> int:
        """A whole number from `multiple` on, in its steps."""
        text = self.text(name)
        if text is None:
            return default
        steps = f", a multiple of {multiple}" if multiple > 1 else ""
        allowed = f"allowed is a whole number from {multiple} to {most}{steps}"
        if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
            raise SettingError(name, text, allowed)
        value = int(text)
        if not multiple <= value <= most or value % multiple:
            raise SettingError(name, text, allowed)
        return value

    def share(self, name: str, *, zero: bool = False) -> float | None:
        """A number above 0, or from 0 on, up to 1; None if not set."""
        text = self.text(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not (0 < value <= 1 or (zero and value == 0)):
            least = "from 0" if zero else "above 0"
            raise SettingError(name, text, f"allowed is a number {least} up to 1")
        return value

    def choice(self, name: str, allowed: Sequence[str], device: Device) -> str | None:
        """One of these, in any case of letters; anything where nobody knows; None if not set."""
        text = self.text(name)
        if text is None or not allowed or text.upper() in allowed:
            return text and text.upper()
        place = "CPU" if device == "cpu" else "CUDA"
        raise SettingError(name, text, f"on {place} allowed is one of {', '.join(allowed)}")


class FlagParser(argparse.ArgumentParser):
    """Says what is wrong as all other knobs do."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting."""
        raise SettingError(message, None, f"usage: {USAGE}")


def parse(arguments: Sequence[str], env: Mapping[str, str], machine: Machine) -> Settings:
    """All knobs.

    Raises:
        SettingError: for the first one that is not allowed.
    """
    flags = _flags(arguments)
    knobs = Knobs(env)
    device = machine.device
    _check_refused(knobs)
    _check_buffer(flags.kv_buffer_device, device)
    settings = Settings(
        machine=machine,
        models=tuple(re.findall(r"[^\s,]+", knobs.text("MODEL_NAMES") or "")),
        prefill=_side(knobs, "PREFILL", "PREFILLER", device=device),
        decode=_side(knobs, "DECODE", "DECODER", device=device),
        gpu_memory_utilization=knobs.share("GPU_MEMORY_UTILIZATION") or DEFAULT_MEMORY,
        attention_backend=_backend(flags.attention_backend, knobs, machine),
        verify=_verify(env),
        concurrent=knobs.whole("NUM_CONCURRENT", CONCURRENT[device], most=MOST_REQUESTS),
        expected=knobs.share("EXPECTED_ACCURACY", zero=True),
        tolerance=knobs.share("TOLERANCE", zero=True),
        engine_args=_engine_args(knobs),
        single=flags.single,
        limit=_limit(flags.limit),
        json_path=place("--json", flags.json, folder=False),
        log_dir=place("--log-dir", flags.log_dir, folder=True),
    )
    _check_gpus(settings)
    return settings


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = FlagParser(prog="run_accuracy_test.sh", usage=USAGE, allow_abbrev=False)
    parser.add_argument("--kv_buffer_device", "--kv-buffer-device", metavar="DEVICE")
    parser.add_argument("--attention-backend", metavar="NAME")
    parser.add_argument("--single", action="store_true", help="also one engine without connector")
    parser.add_argument("--limit", metavar="N", help="only the first N items")
    parser.add_argument("--json", metavar="FILE", help="the results, for programs")
    parser.add_argument("--log-dir", metavar="DIR", help="default: a new folder")
    found, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise SettingError(unknown[0], None, f"there is no such flag; usage: {USAGE}")
    return found


def place(flag: str, text: str | None, *, folder: bool) -> Path | None:
    """Where results go; None if the flag is not given.

    Raises:
        SettingError: if it can be no file, or no folder.
    """
    if text is None:
        return None
    path = Path(text)
    whole = path.absolute()
    there = next(place for place in (whole, *whole.parents) if place.exists())
    if not text.strip() or there.is_dir() != (folder or there != whole):
        kind = "a folder" if folder else "a file"
        raise SettingError(flag, text, f"allowed is {kind} that is there or can be made")
    return path


def _side(knobs: Knobs, side: str, role: str, *, device: Device) -> Side:
    """The names are vLLM's: NUM_DECODE_INSTANCES and DECODE_BLOCK_SIZE, but DECODER_TP_SIZE."""
    multiple = BLOCK_MULTIPLE[device]
    layout = knobs.choice(f"{role}_KV_LAYOUT", LAYOUTS[device], device)
    return Side(
        instances=knobs.whole(f"NUM_{side}_INSTANCES", 1, most=MOST_INSTANCES),
        tensor_parallel=knobs.whole(f"{role}_TP_SIZE", 1, most=MOST_INSTANCES),
        block_size=knobs.whole(
            f"{side}_BLOCK_SIZE", DEFAULT_BLOCK, most=MOST_TOKENS_IN_A_BLOCK, multiple=multiple
        ),
        layout=layout or knobs.choice("VLLM_KV_CACHE_LAYOUT", LAYOUTS[device], device),
    )


def _backend(flag: str | None, knobs: Knobs, machine: Machine) -> str | None:
    """The flag before the variable, and this before its older name."""
    given = Knobs({"--attention-backend": flag or ""})
    sources = (
        (given, "--attention-backend"),
        (knobs, "ATTENTION_BACKEND"),
        (knobs, "VLLM_ATTENTION_BACKEND"),
    )
    found = [where.choice(name, machine.backends, machine.device) for where, name in sources]
    return next(filter(None, found), None)


def _verify(env: Mapping[str, str]) -> str | None:
    """Unlike the others, it may be set to nothing: the connector's own default."""
    value = env.get("VERIFY", "all").strip()
    if value and not VERIFY.fullmatch(value):
        allowed = "allowed is off, sample:RATE with a rate from 0 to 1, all, or nothing"
        raise SettingError("VERIFY", value, allowed)
    return value or None


def _engine_args(knobs: Knobs) -> tuple[str, ...]:
    parts = (part.strip() for part in (knobs.text("VLLM_SERVE_EXTRA_ARGS") or "").split(","))
    return tuple(part for part in parts if part)


def _limit(text: str | None) -> int | None:
    if text is None:
        return None
    # Nothing is no number either: whoever gives the flag wants a limit.
    return Knobs({"--limit": text.strip() or "(nothing)"}).whole("--limit", 0, most=10**6)


def _check_refused(knobs: Knobs) -> None:
    for name, (harmless, words) in REFUSED.items():
        text = knobs.text(name)
        if text is not None and text.upper() not in harmless:
            raise SettingError(name, text, words)


def _check_buffer(wanted: str | None, device: Device) -> None:
    if wanted not in (None, device):
        raise SettingError(
            "--kv_buffer_device",
            wanted,
            f"KV is read from and into the memory of the engines' own device, allowed is {device}",
        )


def _check_gpus(settings: Settings) -> None:
    """Each rank of an engine needs a GPU of its own, and all that share one must fit."""
    gpus = settings.machine.gpus
    if settings.machine.device == "cpu":
        return
    for name, side in (("PREFILLER", settings.prefill), ("DECODER", settings.decode)):
        if side.tensor_parallel > len(gpus):
            allowed = f"allowed is up to {len(gpus)}, the number of GPUs here"
            raise SettingError(f"{name}_TP_SIZE", side.tensor_parallel, allowed)
    most = max(Counter(itertools.chain.from_iterable(settings.gpus())).values())
    if most * settings.gpu_memory_utilization > 1:
        allowed = f"{most} engines share a GPU, allowed is up to {math.floor(1000 / most) / 1000:g}"
        raise SettingError("GPU_MEMORY_UTILIZATION", settings.gpu_memory_utilization, allowed)
