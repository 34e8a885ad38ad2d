"""Runs targets with mutated inputs, and measures: what came of each, how long, how much memory.

An input is a seed and some steps, each of them a number that decides one mutation. What crashed is
made smaller by leaving out steps, and told as the bytes themselves.
"""

import contextlib
import hashlib
import random
import resource
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

import msgspec

from pd.fuzz_mutate import mutate_bytes, mutate_tree
from pd.fuzz_targets import NoInputError, Target

MOST_SECONDS = 1.0  # of CPU time: this machine may be busy with something else
MOST_BYTES = 500 << 20
HOPELESS_S = 30.0
PLAIN_BYTES = 0.25  # share of mutations that know nothing of the input's structure
MOST_STEPS = 4
SHOWN_BYTES = 1000
LARGE = 100_000  # bytes: what has grown so much is mutated no further
PEAK: Final = Path("/proc/self/clear_refs")


class HangsError(BaseException):
    """An execution does not end. No Exception: those are caught where steps may fail."""


@dataclass(frozen=True)
class Execution:
    """What one input did; `crash` is None if all is well, else what it was and where."""

    crash: str | None
    seconds: float
    nbytes: int
    detail: str = ""


@dataclass(frozen=True)
class Crash:
    """One input that does it, and how often it happened in all."""

    what: str
    detail: str
    data: bytes


@dataclass
class Findings:
    """Of one target."""

    executions: int = 0
    wall_s: float = 0.0
    slowest_s: float = 0.0
    slowest: bytes = b""
    most_bytes: int = 0
    crashes: dict[str, Crash] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)


def fuzz(target: Target, seconds: float, seed: int) -> Findings:
    """Run for so long; the same seed gives the same inputs."""
    rng = random.Random(f"{seed}/{target.name}")  # noqa: S311 - the same inputs every time
    findings = Findings()
    begin = time.monotonic()
    for data in target.seeds:
        _note(findings, execute(target, data), data)
    while (passed := time.monotonic() - begin) < seconds:
        number = rng.randrange(len(target.seeds))
        steps = [rng.getrandbits(64) for _ in range(rng.randint(1, MOST_STEPS))]
        data = build(target, number, steps)
        done = execute(target, data)
        if done.crash and done.crash not in findings.crashes:
            data = minimal(target, number, steps, crash=done.crash)
        _note(findings, done, data)
    findings.wall_s = passed
    return findings


def build(target: Target, number: int, steps: Sequence[int]) -> bytes:
    """Apply the steps to a seed."""
    data = target.seeds[number]
    for step in steps:
        rng = random.Random(step)  # noqa: S311 - the same inputs every time
        if len(data) < LARGE:
            data = _mutated(target, data, rng)
    return data


def minimal(target: Target, number: int, steps: Sequence[int], *, crash: str) -> bytes:
    """The input with the steps that the crash does not need left out."""
    kept = list(steps)
    for step in steps:
        fewer = [other for other in kept if other != step]
        if execute(target, build(target, number, fewer)).crash == crash:
            kept = fewer
    return build(target, number, kept)


def execute(target: Target, data: bytes) -> Execution:
    """One input."""
    _forget_peak()
    resident = _peak()
    begin = time.thread_time()
    crash, detail = _outcome(target, data)
    seconds = time.thread_time() - begin
    nbytes = _peak() - resident
    if not crash and seconds > MOST_SECONDS:
        crash = f"took more than {MOST_SECONDS:g} s"
        detail = f"{seconds:.1f} s of CPU time"
    if not crash and nbytes > MOST_BYTES:
        crash = f"took more than {MOST_BYTES >> 20} MiB"
        detail = f"{nbytes >> 20} MiB"
    return Execution(crash, seconds, nbytes, detail)


def _outcome(target: Target, data: bytes) -> tuple[str | None, str]:
    """What an input ended in: None if that is allowed, else the error, and its traceback."""
    caught = Caught()
    with caught, _alarm():
        target.run(data)
    error = caught.error
    if error is None or isinstance(error, (*target.allowed, NoInputError)):
        return None, ""
    frames = traceback.extract_tb(error.__traceback__)
    told = "".join(traceback.format_exception(error))
    return f"{type(error).__name__} at {_place(frames)}", told


class Caught:
    """Whatever its block raises, but for what ends the program."""

    error: BaseException | None = None

    def __enter__(self) -> None:
        """Nothing is caught yet."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        """Keep it."""
        self.error = error
        return not isinstance(error, KeyboardInterrupt | SystemExit)


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    def ring(_number: int, _frame: FrameType | None) -> NoReturn:
        raise HangsError(f"not over after {HOPELESS_S:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, HOPELESS_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line of the package, if any."""
    inside = [frame for frame in frames if "nixl_kv/" in frame.filename] or frames[-1:]
    return f"{Path(inside[-1].filename).name}:{inside[-1].lineno}"


def _mutated(target: Target, data: bytes, rng: random.Random) -> bytes:
    """One mutation; what is no tree any more is mutated as bytes."""
    if rng.random() > PLAIN_BYTES:
        with contextlib.suppress(ValueError, RecursionError, msgspec.MsgspecError):
            return target.write(mutate_tree(rng, target.parse(data)))
    return mutate_bytes(rng, data)


def _note(findings: Findings, done: Execution, data: bytes) -> None:
    findings.executions += 1
    findings.most_bytes = max(findings.most_bytes, done.nbytes)
    if done.seconds > findings.slowest_s:
        findings.slowest_s, findings.slowest = done.seconds, data
    if done.crash:
        findings.crashes.setdefault(done.crash, Crash(done.crash, done.detail, data))
        findings.repeats[done.crash] = findings.repeats.get(done.crash, 0) + 1


def keep(data: bytes, crash_dir: Path | None) -> str:
    """An input in hex, or where a long one was written, as --replay takes them."""
    if len(data) < SHOWN_BYTES or crash_dir is None:
        return data.hex()
    crash_dir.mkdir(parents=True, exist_ok=True)
    path = crash_dir / f"{hashlib.sha256(data).hexdigest()[:16]}.bin"
    path.write_bytes(data)
    return f"@{path}"


def _peak() -> int:
    """The most bytes of this process that were in memory since the peak was forgotten."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        PEAK.write_text("5")
