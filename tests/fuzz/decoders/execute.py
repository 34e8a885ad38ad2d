"""Runs one input of a target, and measures: what it ended in, how long, how much memory."""

import contextlib
import resource
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from fuzz.decoders.targets import NoInputError, Target

MAX_SECONDS = 1.0
"""Of CPU time: this machine may be busy with something else."""

MAX_BYTES = 500 << 20
HANG_S: Final = 30.0
CLEAR_REFS: Final = Path("/proc/self/clear_refs")


class HangsError(BaseException):
    """An execution does not end. No Exception: those are caught where steps may fail."""


@dataclass(frozen=True)
class Execution:
    """What one input did; `crash` is None if all is well, else what it was and where."""

    crash: str | None
    seconds: float
    nbytes: int
    detail: str = ""


class Caught:
    """Whatever its block raises, but for what ends the program."""

    error: BaseException | None = None

    def __enter__(self) -> None:
        """Nothing is caught yet."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        """Keep it."""
        self.error = error
        return not isinstance(error, KeyboardInterrupt | SystemExit)


def execute(target: Target, data: bytes) -> Execution:
    """One input."""
    _forget_peak()
    resident = _peak_bytes()
    started_at = time.thread_time()
    crash, detail = _run(target, data)
    seconds = time.thread_time() - started_at
    nbytes = _peak_bytes() - resident
    if not crash and seconds > MAX_SECONDS:
        crash = f"took more than {MAX_SECONDS:g} s"
        detail = f"{seconds:.1f} s of CPU time"
    if not crash and nbytes > MAX_BYTES:
        crash = f"took more than {MAX_BYTES >> 20} MiB"
        detail = f"{nbytes >> 20} MiB"
    return Execution(crash, seconds, nbytes, detail)


def _run(target: Target, data: bytes) -> tuple[str | None, str]:
    """What an input ended in: None if that is allowed, else the error, and its traceback."""
    caught = Caught()
    with caught, _alarm():
        target.run(data)
    error = caught.error
    if error is None or isinstance(error, (*target.allowed, NoInputError)):
        return None, ""
    frames = traceback.extract_tb(error.__traceback__)
    detail = "".join(traceback.format_exception(error))
    return f"{type(error).__name__} at {_place(frames)}", detail


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    def ring(_number: int, _frame: FrameType | None) -> NoReturn:
        raise HangsError(f"has not ended after {HANG_S:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line of the package, if any."""
    inside = [frame for frame in frames if "nixl_kv/" in frame.filename] or frames[-1:]
    return f"{Path(inside[-1].filename).name}:{inside[-1].lineno}"


def _peak_bytes() -> int:
    """The most bytes of this process that were in memory since the peak was forgotten."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _forget_peak() -> None:
    """Linux alone can; elsewhere only an input that needs more than all before it is seen."""
    if CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")
