"""Huge pages for a cache in host memory, where the kernel allows them.

torch allocates pages of 4 KiB. To read another process's memory, the kernel pins each page of it.
So between processes of one host, loads from small pages took 1.5 times as long (`scripts/bench
transfer --device cpu --shape tiny --tokens 2048 --against DIR`).
"""

import ctypes
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from nixl_kv.geometry.layout import Span

HUGE_PAGE: Final = 2 << 20
STEP: Final = 32 * HUGE_PAGE
# An engine's start goes on with small pages for the rest. 64 MiB take 20 to 300 ms.
COLLAPSING_S: Final = 5.0
MADV_HUGEPAGE: Final = 14  # pages that do not exist yet will be huge
MADV_COLLAPSE: Final = 25  # move existing pages now; since Linux 6.1
SETTING: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def use_huge_pages(spans: Iterable[Span]) -> None:
    """Move memory into pages of 2 MiB. Call this before NIXL registers it."""
    try:
        setting = SETTING.read_text(encoding="utf-8")
    except OSError:  # a kernel without them, or a container that hides it
        return
    if "[never]" in setting:
        return
    advise = ctypes.CDLL(None).madvise
    until = time.monotonic() + COLLAPSING_S
    for span in spans:
        begin = -(-span.address // HUGE_PAGE) * HUGE_PAGE
        end = (span.address + span.length) // HUGE_PAGE * HUGE_PAGE
        for address in range(begin, end, STEP):
            pages = ctypes.c_void_p(address), ctypes.c_size_t(min(STEP, end - address))
            advise(*pages, MADV_HUGEPAGE)  # a refusal changes nothing
            if time.monotonic() < until:
                advise(*pages, MADV_COLLAPSE)
