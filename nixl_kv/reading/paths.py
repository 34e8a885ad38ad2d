"""The ways that bytes can take from a peer's cache into this one, and which one is the shortest.

    direct   NIXL reads each run: a descriptor each
    gather   a kernel reads the peer's memory, which is mapped here: only for GPUs of one host
    staged   the peer packs it, NIXL reads that in long runs, and it is scattered here

How long a read takes on each is estimated as

    start + a * runs + b * bytes

The numbers that a link begins with were measured: between GPUs see docs/benchmarks.md. Those of
direct reads are then measured again, when its host is met for the first time (`probes`). Every read
that began while its rank read nothing else corrects them; others say more of what was beside them.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry.layout import Memory

Path: TypeAlias = Literal["direct", "gather", "staged"]

Floats: TypeAlias = npt.NDArray[np.float64]

FIRST: Final[dict[tuple[Path, Memory], tuple[float, float, float]]] = {
    ("direct", "VRAM"): (100e-6, 3.3e-6, 1 / 390e9),
    ("gather", "VRAM"): (150e-6, 0.0, 1 / 368e9),
    ("staged", "VRAM"): (600e-6, 0.0, 1 / 44e9),
    ("direct", "DRAM"): (50e-6, 1.5e-6, 1 / 8e9),
    ("staged", "DRAM"): (2e-3, 20e-9, 1 / 0.3e9),
}
"""Seconds for a read, for a run of it, for a byte: between two GPUs on NVLink, or two processes."""


KEPT: Final = 0.9
"""What an observation still weighs after the next one of the same path."""

KEPT_UNUSED: Final = 0.99
"""What it still weighs after a read by another path. So a path that was slow once, for whatever
reason, is tried again after some hundreds of reads."""

TRUST: Final = 0.05
"""What each of the first numbers weighs before the first read, which itself weighs at most 1: a
slow one, as on a busy machine, weighs less and does not turn the choice; some tens of them do."""

PRIOR: Final = 1e-6
"""What it weighs in the end, as a share of what was observed: where reads of one kind only were
observed, many numbers fit, and those near the expected ones are taken."""

LEAST: Final = 0.02
"""No number falls below this share of its first one."""


@dataclass
class Estimate:
    """Of one path over one link: by least squares of relative errors, older ones weighing less."""

    first: tuple[float, float, float]
    _expected: Floats = field(default_factory=lambda: np.ones(3))  # times the first numbers
    _trust: float = TRUST  # what each of these weighs
    _products: Floats = field(default_factory=lambda: np.zeros((3, 3)))  # of what was observed
    _sums: Floats = field(default_factory=lambda: np.zeros(3))
    _costs: tuple[float, float, float] = field(init=False)
    """What is thought now, in seconds, as `first`."""

    def __post_init__(self) -> None:
        """Nothing is known but the first numbers."""
        self._costs = self.first

    def expect(self, factors: tuple[float, float, float]) -> None:
        """Reads aside, the numbers are so many times the first ones; that fades, too."""
        self._expected = np.array(factors)
        self._fit()

    def seconds(self, num_runs: int, num_bytes: int) -> float:
        """How long a read of so many runs and bytes takes."""
        start, run, byte = self._costs
        return start + run * num_runs + byte * num_bytes

    def correct(self, num_runs: int, num_bytes: int, seconds: float) -> None:
        """A read took so long."""
        terms = self._terms(num_runs, num_bytes) / max(seconds, 1e-6)
        self._forget(KEPT)
        self._products += np.outer(terms, terms)
        self._sums += terms
        self._fit()

    def fade(self) -> None:
        """Another path was taken: what is known of this one comes closer to the first numbers."""
        self._forget(KEPT_UNUSED)
        trust = self._trust + (1 - KEPT_UNUSED) * TRUST
        self._expected = 1 + (self._expected - 1) * self._trust / trust
        self._trust = trust
        self._fit()

    def _forget(self, kept: float) -> None:
        self._products *= kept
        self._sums *= kept
        self._trust *= kept

    def _fit(self) -> None:
        """In units of what is expected, so that a slow link's numbers weigh as a fast one's."""
        expected = self._expected
        products = self._products * np.outer(expected, expected)
        trust = self._trust + PRIOR * (np.trace(products) + self._trust)
        factors = np.linalg.solve(products + trust * np.eye(3), self._sums * expected + trust)
        start, run, byte = (np.maximum(factors * expected, LEAST) * self.first).tolist()
        self._costs = start, run, byte

    def _terms(self, num_runs: int, num_bytes: int) -> Floats:
        start, run, byte = self.first
        return np.array([start, run * num_runs, byte * num_bytes])


class Link:
    """What is known of the way to one host's caches of one kind of memory."""

    def __init__(self, memory: Memory, wanted: str = "auto") -> None:
        """Start with what is known of all links; `wanted` is taken wherever it can be."""
        self.is_probed = False
        """Whether it was measured, or is being measured, how fast direct reads are."""
        self._memory = memory
        self._wanted = wanted
        self._estimates: dict[Path, Estimate] = {}

    def estimate(self, path: Path) -> Estimate:
        """Of one path."""
        if path not in self._estimates:
            self._estimates[path] = Estimate(FIRST[path, self._memory])
        return self._estimates[path]

    def correct(self, path: Path, num_runs: int, num_bytes: int, seconds: float) -> None:
        """A read by a path took so long."""
        self.estimate(path).correct(num_runs, num_bytes, seconds)
        for other, estimate in self._estimates.items():
            if other != path:
                estimate.fade()

    @property
    def has_choice(self) -> bool:
        """Whether it counts how fast paths are."""
        return self._wanted == "auto"

    def on_probed(self, costs: tuple[float, float, float]) -> None:
        """Direct reads were measured; what is packed crosses the same link."""
        direct, staged = self.estimate("direct"), self.estimate("staged")
        start, run, byte = (cost / first for cost, first in zip(costs, direct.first, strict=True))
        direct.expect((start, run, byte))
        staged.expect((1.0, 1.0, max(1.0, costs[2] / staged.first[2])))

    def choose(self, paths: Collection[Path], num_runs: int, num_bytes: int) -> Path:
        """Of these paths the one that is wanted, or takes least time; the first one of equals."""
        paths = [path for path in paths if path == self._wanted] or paths
        if len(paths) == 1:
            return next(iter(paths))
        return min(paths, key=lambda path: self.estimate(path).seconds(num_runs, num_bytes))
