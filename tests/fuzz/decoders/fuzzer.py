"""Fuzzes a target for some time.

An input is a seed and some steps, each of them a number that decides one mutation. A crash is made
smaller by leaving out steps, and shown as the bytes themselves.

By hand, since it was measured: of 8 mistakes planted into decoders and machines, in 12 s of CPU
time each, this found 5; hypothesis 6.170 found 1 when it drew mutations of its own, and 1 when it
fed the random numbers to these; atheris 3.0, guided by coverage, found 2 with these mutations.
"""

import contextlib
import hashlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fuzz.decoders.execute import Execution, execute
from fuzz.decoders.mutate import mutate_bytes, mutate_tree
from fuzz.decoders.targets import Target

PLAIN_BYTES = 0.25
"""Share of mutations that know nothing of the input's structure."""

MAX_STEPS = 4
SHOWN_BYTES = 1000
LARGE = 100_000
"""Bytes: what has grown so much is mutated no further."""


@dataclass(frozen=True)
class Crash:
    """One input that does it, the smallest of the first one's steps."""

    what: str
    detail: str
    data: bytes


@dataclass
class Findings:
    """Of one target. `repeats` counts how often each crash happened."""

    executions: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    slowest: bytes = b""
    most_bytes: int = 0
    crashes: dict[str, Crash] = field(default_factory=dict)
    repeats: Counter[str] = field(default_factory=Counter)

    def add(self, execution: Execution, data: bytes) -> None:
        """Count one input."""
        self.executions += 1
        self.most_bytes = max(self.most_bytes, execution.nbytes)
        if execution.seconds > self.slowest_s:
            self.slowest_s, self.slowest = execution.seconds, data
        if execution.crash:
            crash = Crash(execution.crash, execution.detail, data)
            self.crashes.setdefault(execution.crash, crash)
            self.repeats[execution.crash] += 1


def fuzz(target: Target, seconds: float, seed: int) -> Findings:
    """Run for so long; the same seed gives the same inputs."""
    rng = random.Random(f"{seed}/{target.name}")  # noqa: S311 - the same inputs every time
    findings = Findings()
    started_at = time.monotonic()
    for data in target.seeds:
        findings.add(execute(target, data), data)
    while time.monotonic() < started_at + seconds:
        number = rng.randrange(len(target.seeds))
        steps = [rng.getrandbits(64) for _ in range(rng.randint(1, MAX_STEPS))]
        data = build(target, number, steps)
        execution = execute(target, data)
        if execution.crash and execution.crash not in findings.crashes:
            data = minimal(target, number, steps, crash=execution.crash)
        findings.add(execution, data)
    findings.seconds = time.monotonic() - started_at
    return findings


def build(target: Target, number: int, steps: Sequence[int]) -> bytes:
    """Apply the steps to a seed."""
    data = target.seeds[number]
    for step in steps:
        rng = random.Random(step)  # noqa: S311 - the same inputs every time
        if len(data) < LARGE:
            data = _mutate(target, data, rng)
    return data


def minimal(target: Target, number: int, steps: Sequence[int], *, crash: str) -> bytes:
    """The input without the steps that the crash does not need."""
    kept = list(steps)
    for step in steps:
        fewer = [other for other in kept if other != step]
        if execute(target, build(target, number, fewer)).crash == crash:
            kept = fewer
    return build(target, number, kept)


def _mutate(target: Target, data: bytes, rng: random.Random) -> bytes:
    """One mutation; what is no tree any more is mutated as bytes."""
    if rng.random() > PLAIN_BYTES:
        with contextlib.suppress(ValueError, RecursionError, msgspec.MsgspecError):
            return target.write(mutate_tree(rng, target.parse(data)))
    return mutate_bytes(rng, data)


def as_argument(data: bytes) -> str:
    """An input in hex, or @FILE where a long one was written: as --replay reads them."""
    if len(data) < SHOWN_BYTES:
        return data.hex()
    name = f"nixl-kv-{hashlib.sha256(data).hexdigest()[:16]}.bin"
    path = Path(tempfile.gettempdir()) / name
    path.write_bytes(data)
    return f"@{path}"
