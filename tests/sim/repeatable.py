"""Schedules that repeat: seeded secrets and small sizes; and violations with a name."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Final
from unittest.mock import patch

from harness.local.engine import HAS_VERIFY
from nixl_kv import ids
from nixl_kv.connector import paging
from nixl_kv.protocol import read_queue
from nixl_kv.reading import agent as read_agent
from nixl_kv.reading import paths

WINDOW_EDGE: Final = 4
"""In place of 256 tokens: prompts are short here."""

QUEUE_BYTES: Final = 250
"""In place of 1 GiB that is read at a time: a prompt has 208 bytes at most, of two heads."""


class Violation(Exception):  # noqa: N818 - it is what the simulator looks for
    def __init__(self, check: str, detail: str) -> None:
        super().__init__(f"{check}: {detail}")
        self.check = check


class SeededSecrets:
    """In place of the module `secrets`: a schedule's random names are the same each time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - not a secret

    def token_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def token_hex(self, count: int) -> str:
        return self._random.randbytes(count).hex()


@contextmanager
def repeatable(seed: int = 0) -> Iterator[None]:
    """Random names repeat, and sizes are those of small caches.

    A digest takes a step for each block, so that much happens while it is made.
    """
    with (
        patch.object(ids, "secrets", SeededSecrets(seed)),
        patch("nixl_kv.verify.digest.STEP_BYTES", 1) if HAS_VERIFY else nullcontext(),
        patch.object(paging, "WINDOW_EDGE", WINDOW_EDGE),
        patch.object(read_queue, "MAX_BYTES", QUEUE_BYTES),
        patch.object(read_agent, "SAMPLE_BYTES", 4),
        patch.object(paths, "SLICE_RUNS", 1),
        patch.object(paths, "RUNS_PER_TURN", 2),
    ):
        yield
