"""The slots of cached blocks under two real threads: a valid slot proves the bytes that were read.

One thread is vLLM's: it reuses blocks, tells the slots so, and then overwrites them. The other one
grants blocks as of the steps that it has seen, and reads them as a reader does: bytes, then slot.
"""

import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator

import numpy as np
import pytest

from nixl_kv.conversations.runs import Run
from nixl_kv.conversations.slots import ContentSlots
from nixl_kv.ids import Nonce
from nixl_kv.protocol import events
from nixl_kv.transport.base import SlotPage
from support.records import hex32

BLOCKS, SLOTS, MOST_TAKEN, LONGEST = 60, 8, 4, 6
SECONDS = 4.0
MANY_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Cache:
    """A cache of one number per block: the step that has written it."""

    def __init__(self, slots: ContentSlots) -> None:
        self.slots, self.page = slots, SlotPage(SLOTS)
        slots.bind(self.page, 0)
        self.born = np.zeros(BLOCKS, np.int64)  # as the scheduler knows it
        self.bytes = np.zeros(BLOCKS, np.int64)  # as the GPU has written it
        self.built = self.epoch = 0
        self.unwritten: deque[tuple[list[int], int]] = deque()  # on the GPU's stream
        self.written = 0
        self.stop = threading.Event()

    def step(self, rng: random.Random) -> None:
        """A step of vLLM's: schedule, the rank's hooks, and the forward, some of it later."""
        ids, number = rng.sample(range(BLOCKS), rng.randrange(MOST_TAKEN + 1)), self.built + 1
        if rng.random() < 0.001:
            self.epoch += 1
        self.born[ids] = number
        self.built = number
        packed = np.asarray(ids, "<i4").tobytes()
        self.slots.before_step([events.BlocksTaken(number, packed, self.epoch)])
        self.unwritten.append((ids, number))
        self.slots.end_step(lambda: self.written >= number)
        while len(self.unwritten) > rng.randrange(3):
            ids, written = self.unwritten.popleft()
            self.bytes[ids] = written
            self.written = written

    def run(self) -> None:
        rng = random.Random(1)  # noqa: S311 - not a secret
        while not self.stop.is_set():
            self.step(rng)

    def find(self, rng: random.Random) -> tuple[Run, np.ndarray] | None:
        """The index's answer, and the bytes of its blocks."""
        epoch, steps = self.epoch, self.built
        ids = rng.sample(range(BLOCKS), rng.randrange(1, LONGEST))
        born = self.born[ids]
        if (born > steps).any() or epoch != self.epoch:
            return None
        packed, need = np.asarray(ids, "<i4").tobytes(), int(born.max())
        return Run(first_block=0, ids=packed, steps=steps, need=need, epoch=epoch), born

    def read(self, rng: random.Random, number: int) -> str:
        """Ask, read the bytes, then the slot; a valid slot with other bytes is wrong."""
        found = self.find(rng)
        if found is None:
            return "not found"
        run, born = found
        if not self.slots.is_written(run):
            return "not written"
        fence = self.slots.open(run, Nonce(hex32(number)))
        if fence is None:
            return "refused"
        time.sleep(0)
        got = self.bytes[run.block_ids]
        is_valid = self.page.read(fence.slot) == fence.token
        self.slots.close(fence.slot)
        if not is_valid:
            return "cleared"
        return "proven" if (got == born).all() else "WRONG"


def play(slots: ContentSlots, seconds: float, *, until: str = "") -> Counter[str]:
    cache, rng, counts = Cache(slots), random.Random(2), Counter[str]()  # noqa: S311
    thread = threading.Thread(target=cache.run)
    thread.start()
    try:
        ends_at, number = time.monotonic() + seconds, 0
        while time.monotonic() < ends_at and not counts[until]:
            number += 1
            counts[cache.read(rng, number)] += 1
    finally:
        cache.stop.set()
        thread.join()
    counts["steps"] = cache.built
    print(dict(counts))
    return counts


@pytest.mark.parametrize(
    "seconds", [SECONDS, pytest.param(MANY_SECONDS, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_a_valid_slot_proves_the_bytes(seconds: float) -> None:
    counts = play(ContentSlots(BLOCKS, SLOTS), seconds)
    assert not counts["WRONG"]
    assert min(counts[each] for each in ("proven", "cleared", "refused", "not written")) > 0
