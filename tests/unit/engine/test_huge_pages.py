"""A cache in pages of 4 KiB is in pages of 2 MiB afterwards, where the kernel allows it."""

import mmap
import re
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nixl_kv.engine import huge_pages
from nixl_kv.engine.huge_pages import COLLAPSING_S, HUGE_PAGE, STEP, use_huge_pages
from nixl_kv.geometry.layout import Span

SMAPS = Path("/proc/self/smaps")


def in_huge_pages(address: int) -> int:
    """Bytes of the mapping with this address that are in huge pages."""
    text, is_there = SMAPS.read_text(encoding="utf-8"), False
    for line in text.splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_there = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_there and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_huge_pages_within_a_span_are_used() -> None:
    mapped = mmap.mmap(-1, 5 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapped, dtype=np.uint8)
    memory[:] = 7  # as torch allocates it, all in use
    address = memory.ctypes.data + -memory.ctypes.data % HUGE_PAGE
    use_huge_pages([Span(address + 1, 3 * HUGE_PAGE)])  # the inner two
    if not in_huge_pages(address + HUGE_PAGE):
        pytest.skip("this kernel does not collapse pages at once, or forbids it")
    assert in_huge_pages(address + HUGE_PAGE) == 2 * HUGE_PAGE
    assert in_huge_pages(address) == in_huge_pages(address + 3 * HUGE_PAGE) == 0
    assert (memory == 7).all()


def test_unused_memory_stays_unused() -> None:
    mapped = mmap.mmap(-1, 8 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
    use_huge_pages([Span(address, 8 * HUGE_PAGE)])
    assert in_huge_pages(address) == 0


ALL = [STEP * number for number in range(1, 5)]


@pytest.mark.parametrize(
    ("setting", "step_s", "huge", "collapsed"),
    [
        pytest.param("[always] madvise never", 0.0, ALL, ALL, id="all"),
        pytest.param("[always] madvise never", COLLAPSING_S / 2, ALL, ALL[:1], id="no late start"),
        pytest.param("always madvise [never]", 0.0, [], [], id="forbidden"),
        pytest.param(None, 0.0, [], [], id="unknown"),
    ],
)
def test_a_machine_is_asked_for_huge_pages_for_some_seconds(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    setting: str | None,
    step_s: float,
    huge: list[int],
    collapsed: list[int],
) -> None:
    advised: list[tuple[int, int]] = []

    def advise(address: Any, _: object, advice: int) -> None:
        advised.append((advice, address.value))

    file = tmp_path / "enabled"
    if setting is not None:
        file.write_text(setting, encoding="utf-8")
    monkeypatch.setattr(huge_pages, "SETTING", file)
    monkeypatch.setattr(huge_pages.ctypes, "CDLL", lambda _: SimpleNamespace(madvise=advise))
    seconds = count(0.0, step_s)
    monkeypatch.setattr(huge_pages.time, "monotonic", lambda: next(seconds))
    use_huge_pages([Span(STEP, 4 * STEP)])
    assert [at for advice, at in advised if advice == huge_pages.MADV_HUGEPAGE] == huge
    assert [at for advice, at in advised if advice == huge_pages.MADV_COLLAPSE] == collapsed
