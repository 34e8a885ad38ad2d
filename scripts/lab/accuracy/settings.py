"""The launcher's knobs: environment variables and flags, all checked before anything starts.

They are read by hand. Measured against pydantic-settings 2.16, on the good and bad values of
tests/tools/accuracy/test_settings.py: `Knobs` has 76 lines, the same with it 115 and 0.8 s of
import on top. Its errors name one bound, never all that is allowed, so that each field needs its
words beside its bounds; it takes `1_0`, `+5` and `1.0` for whole numbers; and what the device at
hand allows, which flag goes before which variable, and an environment other than ours stay hand
work.
"""

import argparse
import contextlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from harness.cluster.engines import Device
from lab.accuracy.machine import Machine, assign

USAGE: Final = """\
bash scripts/run_accuracy_test.sh [--kv_buffer_device DEVICE] [--attention-backend NAME]
       [--single] [--limit N] [--json FILE] [--log-dir DIR]"""
LAYOUTS: Final[Mapping[Device, Sequence[str]]] = {
    "cpu": ("HND", "LBHNC"),
    "cuda": ("HND", "NHD", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"),
}
BLOCK_SIZES: Final[Mapping[Device, range]] = {
    "cpu": range(32, 1025, 32),
    "cuda": range(16, 1025, 16),
}
CONCURRENT: Final[Mapping[Device, int]] = {"cpu": 4, "cuda": 100}
INSTANCES: Final = range(1, 65)
REQUESTS: Final = range(1, 1025)
LIMITS: Final = range(1, 10**6 + 1)
DEFAULT_BLOCK_SIZE: Final = 128
DEFAULT_MEMORY: Final = 0.2
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
"""Variables that say which engines there are, and how they store KV."""

REFUSED: Final[Mapping[str, tuple[Sequence[str], str]]] = {
    "CROSS_LAYERS_BLOCKS": (("0", "FALSE"), "blocks do not span layers, allowed is False"),
    "DP_EP": ((), "decode is never data parallel here, allowed is nothing"),
    "ENFORCE_EAGER": (("1", "TRUE"), "engines run without CUDA graphs, allowed is 1"),
}
"""Knobs of vLLM's launcher: the values that change nothing, and why no others are allowed."""

VERIFY: Final = re.compile(r"off|all|sample:(0?\.\d+|1(\.0+)?|0)")


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
    layout: str | None
    """None: the connector's choice."""


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

    def gpus(self) -> list[tuple[str, ...]]:
        """Of each engine, prefill first, then decode; empty ones on CPU."""
        sides = (self.prefill, self.decode)
        ranks = [side.tensor_parallel for side in sides for _ in range(side.instances)]
        return assign(self.machine.gpus, ranks)

    def __str__(self) -> str:
        """The two sides in a few words."""
        sides = {"prefill": self.prefill, "decode": self.decode}
        words = [
            f"{side.instances} {name} TP{side.tensor_parallel} block {side.block_size}"
            + (f" {side.layout}" if side.layout else "")
            for name, side in sides.items()
        ]
        backend = [self.attention_backend] if self.attention_backend else []
        return ", ".join([*words, *backend, f"on {self.machine.device}"])


class Knobs:
    """Reads variables and flags by their names; an empty one counts as one that is not set."""

    def __init__(self, values: Mapping[str, str], device: Device) -> None:
        """Takes the environment, perhaps with flags among it."""
        self._values = values
        self._device: Device = device

    def text(self, name: str) -> str:
        """As it stands, without spaces around it."""
        return self._values.get(name, "").strip()

    def words(self, name: str, separators: str) -> tuple[str, ...]:
        """What stands between the separators, a regular expression, and is not empty."""
        parts = (part.strip() for part in re.split(separators, self.text(name)))
        return tuple(part for part in parts if part)

    def whole(self, name: str, default: int, allowed: range) -> int:
        """A whole number."""
        text = self.text(name)
        if not text:
            return default
        # A few digits: int() takes more than these, and as many as there are.
        if re.fullmatch(r"[0-9]{1,9}", text) and int(text) in allowed:
            return int(text)
        steps = f", a multiple of {allowed.step}" if allowed.step > 1 else ""
        words = f"allowed is a whole number from {allowed[0]} to {allowed[-1]}{steps}"
        raise SettingError(name, text, words)

    def share(self, name: str, *, zero: bool = True) -> float | None:
        """A number from 0 on, or above 0, up to 1; None if not set."""
        text = self.text(name)
        if not text:
            return None
        with contextlib.suppress(ValueError):
            if 0 < float(text) <= 1 or (zero and float(text) == 0):
                return float(text)
        least = "from 0" if zero else "above 0"
        raise SettingError(name, text, f"allowed is a number {least} up to 1")

    def choice(self, name: str, allowed: Sequence[str]) -> str | None:
        """One of these, in any case of letters; anything where there are none; None if not set."""
        text = self.text(name)
        if text and allowed and text.upper() not in allowed:
            words = f"on {self._device.upper()} allowed is one of {', '.join(allowed)}"
            raise SettingError(name, text, words)
        return text.upper() or None

    def side(self, side: str, role: str) -> Side:
        """The names are vLLM's: NUM_DECODE_INSTANCES and DECODE_BLOCK_SIZE, but DECODER_TP_SIZE."""
        layouts = LAYOUTS[self._device]
        both = self.choice("VLLM_KV_CACHE_LAYOUT", layouts)
        return Side(
            instances=self.whole(f"NUM_{side}_INSTANCES", 1, INSTANCES),
            tensor_parallel=self.whole(f"{role}_TP_SIZE", 1, INSTANCES),
            block_size=self.whole(
                f"{side}_BLOCK_SIZE", DEFAULT_BLOCK_SIZE, BLOCK_SIZES[self._device]
            ),
            layout=self.choice(f"{role}_KV_LAYOUT", layouts) or both,
        )

    def backend(self, allowed: Sequence[str]) -> str | None:
        """The flag before the variable, and this before its older name."""
        names = ("--attention-backend", "ATTENTION_BACKEND", "VLLM_ATTENTION_BACKEND")
        return next(filter(None, [self.choice(name, allowed) for name in names]), None)

    def verify(self) -> str | None:
        """Unlike the others, it may be set to nothing: the connector's own default."""
        text = self._values.get("VERIFY", "all").strip()
        if text and not VERIFY.fullmatch(text):
            allowed = "allowed is off, sample:RATE with a rate from 0 to 1, all, or nothing"
            raise SettingError("VERIFY", text, allowed)
        return text or None


def parse(arguments: Sequence[str], env: Mapping[str, str], machine: Machine) -> Settings:
    """All knobs.

    Raises:
        SettingError: for the first one that is not allowed.
    """
    flags = _flags(arguments)
    device = machine.device
    knobs = Knobs({**env, "--attention-backend": flags.attention_backend or ""}, device)
    _check_refused(knobs)
    _check_buffer(flags.kv_buffer_device, device)
    settings = Settings(
        machine=machine,
        models=knobs.words("MODEL_NAMES", r"[\s,]"),
        prefill=knobs.side("PREFILL", "PREFILLER"),
        decode=knobs.side("DECODE", "DECODER"),
        gpu_memory_utilization=knobs.share("GPU_MEMORY_UTILIZATION", zero=False) or DEFAULT_MEMORY,
        attention_backend=knobs.backend(machine.backends),
        verify=knobs.verify(),
        concurrent=knobs.whole("NUM_CONCURRENT", CONCURRENT[device], REQUESTS),
        expected=knobs.share("EXPECTED_ACCURACY"),
        tolerance=knobs.share("TOLERANCE"),
        engine_args=knobs.words("VLLM_SERVE_EXTRA_ARGS", ","),
        single=flags.single,
        limit=_limit(flags.limit, device),
        json_path=_place("--json", flags.json, folder=False),
        log_dir=_place("--log-dir", flags.log_dir, folder=True),
    )
    _check_gpus(settings)
    return settings


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)
    parser.add_argument("--kv_buffer_device", "--kv-buffer-device")
    parser.add_argument("--single", action="store_true")
    for name in ("--attention-backend", "--limit", "--json", "--log-dir"):
        parser.add_argument(name)
    try:
        flags, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise SettingError(str(error), None, f"usage: {USAGE}") from error
    if unknown:
        raise SettingError(unknown[0], None, f"there is no such flag; usage: {USAGE}")
    return flags


def _limit(text: str | None, device: Device) -> int | None:
    """An empty one is no number either: whoever gives the flag wants a limit."""
    if text is None:
        return None
    return Knobs({"--limit": text.strip() or "(nothing)"}, device).whole("--limit", 0, LIMITS)


def _place(flag: str, text: str | None, *, folder: bool) -> Path | None:
    """Where results go; None if the flag is not given.

    Raises:
        SettingError: if it can be no file, or no folder.
    """
    if text is None:
        return None
    path = Path(text).absolute()
    there = next(place for place in (path, *path.parents) if place.exists())
    if not text.strip() or there.is_dir() != (folder or there != path):
        kind = "a folder" if folder else "a file"
        raise SettingError(flag, text, f"allowed is {kind} that is there or can be made")
    return Path(text)


def _check_refused(knobs: Knobs) -> None:
    for name, (harmless, words) in REFUSED.items():
        text = knobs.text(name)
        if text and text.upper() not in harmless:
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
