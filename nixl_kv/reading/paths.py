"""The ways in which bytes come from a remote cache into this one, and the rule that chooses one.

    gather   a kernel on decode's GPU reads memory of the remote rank that is mapped here
    direct   NIXL reads each contiguous run: one descriptor per run
    staged   prefill packs the runs, NIXL reads them in one piece, decode scatters them

The rule: gather if the memory is mapped, direct if the runs are long or few, staged otherwise. The
setting `path` overrides it wherever the chosen way is possible.
"""

from collections.abc import Collection
from typing import Final, Literal, TypeAlias

from nixl_kv.geometry.layout import Memory

Path: TypeAlias = Literal["direct", "gather", "staged"]

LONG_RUN: Final[dict[Memory, int]] = {"VRAM": 128 << 10, "DRAM": 512}
"""Bytes per run from which a direct read takes less time than a staged one. A descriptor costs 3.3
us between two H200, where a staged read moves 40 to 58 GB/s with 256 MiB of staging memory: equal
at 130 to 190 KB. In host memory 1.5 us per run at 8 GB/s equal 0.3 GB/s at 470 bytes. See
docs/benchmarks.md."""

LONG_TCP_RUN: Final = 64 << 10
"""The same over TCP, where 129,024 runs of a host cache took 58 s directly and 0.2 s staged."""

FEW_RUNS: Final[dict[Memory, int]] = {"VRAM": 150, "DRAM": 1300}
"""Up to so many runs cost less than a staged read does before its first byte: 0.5 ms between GPUs,
2 ms in host memory."""


def choose(
    paths: Collection[Path],
    num_runs: int,
    num_bytes: int,
    *,
    memory: Memory,
    is_tcp: bool,
    wanted: str = "auto",
) -> Path:
    """One of the possible `paths`; "direct" is always among them.

    Args:
        paths: what the remote rank and this one can do.
        num_runs: contiguous runs of the read.
        num_bytes: of all of them.
        memory: where this rank's cache is.
        is_tcp: whether NIXL reads the rank over TCP.
        wanted: the setting `path`.
    """
    for path in paths:
        if path == wanted:
            return path
    if "gather" in paths:
        return "gather"
    long_run = max(LONG_RUN[memory], LONG_TCP_RUN if is_tcp else 0)
    are_few = num_runs <= FEW_RUNS[memory] and not is_tcp
    if "staged" in paths and not are_few and num_bytes < num_runs * long_run:
        return "staged"
    return "direct"
