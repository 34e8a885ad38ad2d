"""A cache in pages of 4 KiB is in pages of 2 MiB afterwards, where the kernel allows it."""

import mmap
import re
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from nixl_kv.engine import engine
from nixl_kv.engine.engine import LONGEST_S, PAGE, STEP, use_huge_pages
from nixl_kv.geometry.layout import Span

SMAPS = Path("/proc/self/smaps")
NOT_HUGE = 15  # MADV_NOHUGEPAGE


def in_huge_pages(address: int) -> int:
    """Bytes of the mapping with this address that are in huge pages."""
    text, is_there = SMAPS.read_text(encoding="utf-8"), False
    for line in text.splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_there = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_there and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"nothing is mapped at {address:#x}")


def small_pages(num_bytes: int) -> np.ndarray:
    """Memory as torch allocates it, all in use."""
    mapped = mmap.mmap(-1, num_bytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapped, dtype=np.uint8)
    memory[:] = 7
    return memory[-memory.ctypes.data % PAGE :][:num_bytes]


@pytest.fixture
def memory() -> np.ndarray:
    memory = small_pages(4 * PAGE)
    if not engine.SETTING.exists() or "[never]" in engine.SETTING.read_text():
        pytest.skip("this machine has no huge pages, or forbids them")
    return memory


def test_huge_pages_within_a_span_are_used(memory: np.ndarray) -> None:
    address = memory.ctypes.data
    use_huge_pages([Span(address + 1, 3 * PAGE)])  # the kernel makes a mapping of the inner two
    if not in_huge_pages(address + PAGE):
        pytest.skip("this kernel does not collapse pages at once")
    assert in_huge_pages(address + PAGE) == 2 * PAGE
    assert in_huge_pages(address) == in_huge_pages(address + 3 * PAGE) == 0
    assert (memory == 7).all()


def test_unused_memory_stays_unused() -> None:
    mapped = mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
    use_huge_pages([Span(address, 8 * PAGE)])
    assert in_huge_pages(address) == 0


@pytest.mark.parametrize("text", ["always madvise [never]", None], ids=["forbidden", "unknown"])
def test_a_machine_that_forbids_them_keeps_small_pages(
    memory: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    setting = tmp_path / "enabled"
    if text is not None:
        setting.write_text(text, encoding="utf-8")
    monkeypatch.setattr(engine, "SETTING", setting)
    before = in_huge_pages(memory.ctypes.data)
    use_huge_pages([Span(memory.ctypes.data, len(memory))])
    assert in_huge_pages(memory.ctypes.data) == before


def test_a_large_cache_does_not_delay_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    advised: list[tuple[int, int]] = []

    class Library:
        def __init__(self, _: object) -> None:
            pass

        @staticmethod
        def madvise(address: engine.ctypes.c_void_p, _: object, advice: int) -> int:
            advised.append((address.value or 0, advice))
            return 0

    monkeypatch.setattr(engine.ctypes, "CDLL", Library)
    setting = tmp_path / "enabled"
    setting.write_text("[always] madvise never", encoding="utf-8")
    monkeypatch.setattr(engine, "SETTING", setting)
    seconds = count(0.0, LONGEST_S / 2)
    monkeypatch.setattr(engine.time, "monotonic", lambda: next(seconds))
    use_huge_pages([Span(STEP, 4 * STEP)])
    assert [at for at, advice in advised if advice == engine.HUGEPAGE] == [
        STEP * n for n in (1, 2, 3, 4)
    ]
    assert [at for at, advice in advised if advice == engine.COLLAPSE] == [STEP]
