"""Puts memory of the host into pages of 2 MiB, as far as the machine allows it.

What reads another process's memory has the kernel look up and pin each page of it, and what torch
allocates has pages of 4 KiB, unless the whole machine is told otherwise.
"""

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from nixl_kv.geometry.layout import Span

PAGE: Final = 2 << 20
STEP: Final = 32 * PAGE
LONGEST_S: Final = 5.0
"""An engine's start waits for it: 20 to 300 ms for each 64 MiB were measured."""

HUGEPAGE: Final = 14
"""MADV_HUGEPAGE: pages that are not there yet come so, others when the kernel finds time."""
COLLAPSE: Final = 25
"""MADV_COLLAPSE, since Linux 6.1: those that are there, now."""

SETTING: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FORBIDDEN: Final = "[never]"


def use_huge_pages(spans: Iterable[Span], *, clock: Callable[[], float] = time.monotonic) -> None:
    """Ask for them; what the machine refuses stays as it is. Takes `LONGEST_S`, and a step more.

    Args:
        spans: memory of this process.
        clock: monotonic seconds.
    """
    steps = [step for span in spans for step in _steps(span)]
    if not steps or not _is_allowed():
        return
    advise = ctypes.CDLL(None).madvise
    until = clock() + LONGEST_S
    for address, length in steps:
        advise(address, length, HUGEPAGE)
        if clock() < until:
            advise(address, length, COLLAPSE)


def _steps(span: Span) -> Iterator[tuple[ctypes.c_void_p, ctypes.c_size_t]]:
    """Address and length of the huge pages that lie in it, some at a time."""
    end = (span.address + span.length) // PAGE * PAGE
    for address in range(-(-span.address // PAGE) * PAGE, end, STEP):
        yield ctypes.c_void_p(address), ctypes.c_size_t(min(STEP, end - address))


def _is_allowed() -> bool:
    try:
        return FORBIDDEN not in SETTING.read_text(encoding="utf-8")
    except OSError:  # no Linux, or one without such pages
        return False
