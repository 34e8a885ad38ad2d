"""Moves a cache in host memory into pages of 2 MiB where the kernel allows it.

torch allocates pages of 4 KiB. To read another process's memory, the kernel pins each page of it,
so reads between processes of one host take a quarter to a third longer from small pages.
"""

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from nixl_kv.geometry.layout import Span

PAGE: Final = 2 << 20
STEP: Final = 32 * PAGE
# An engine's start waits for it: 64 MiB take 20 to 300 ms.
LONGEST_S: Final = 5.0

HUGEPAGE: Final = 14  # MADV_HUGEPAGE: pages that do not exist yet will be huge
COLLAPSE: Final = 25  # MADV_COLLAPSE, since Linux 6.1: move existing pages now

SETTING: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def use_huge_pages(spans: Iterable[Span], *, clock: Callable[[], float] = time.monotonic) -> None:
    """Ask the kernel for huge pages, for about `LONGEST_S` at most. A refusal changes nothing.

    `spans` are memory of this process. `clock` returns monotonic seconds.
    """
    if not is_allowed():
        return
    advise = ctypes.CDLL(None).madvise
    until = clock() + LONGEST_S
    for address, length in (step for span in spans for step in _steps(span)):
        advise(address, length, HUGEPAGE)
        if clock() < until:
            advise(address, length, COLLAPSE)


def is_allowed() -> bool:
    try:
        return "[never]" not in SETTING.read_text(encoding="utf-8")
    except OSError:  # not Linux, or a kernel without huge pages
        return False


def _steps(span: Span) -> Iterator[tuple[ctypes.c_void_p, ctypes.c_size_t]]:
    """The huge pages that lie within a span, some at a time: address and length."""
    end = (span.address + span.length) // PAGE * PAGE
    for address in range(-(-span.address // PAGE) * PAGE, end, STEP):
        yield ctypes.c_void_p(address), ctypes.c_size_t(min(STEP, end - address))
