"""Digests of this rank's cache: for readers who want a proof, and of what was read here.

One after the other, each in steps of about a millisecond, so that the transfer thread stays free
for messages and reads. A digest that nobody waits for any more is dropped, so that under overload
those behind it are still in time. It only reads memory: until then it does no harm.
"""

import ctypes
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from nixl_kv.connector.holds import NULL_BLOCK
from nixl_kv.errors import DigestError
from nixl_kv.geometry import blocks, digest, excerpts
from nixl_kv.geometry.digest import Bytes, Digest, Key
from nixl_kv.geometry.excerpts import BlockTable, Strip
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.ids import Claim
from nixl_kv.protocol import proofs

Order = proofs.Digest | proofs.Verify
Ended = proofs.Digested | proofs.Verified
Steps = Generator[None, None, Digest]


class Compute(Protocol):
    """How strips are digested where the cache is."""

    nap_s: float
    """How long to wait between two steps, in seconds; 0 where each step is work."""

    def __call__(self, key: Key, found: Sequence[Strip]) -> Steps:
        """The digest, at the end of the steps.

        Raises:
            DigestError: if that cannot be digested; also in a step.
        """

    def close(self) -> None:
        """Return when the cache is not read any more."""


class OnHost:
    """Digests memory that this process can read itself."""

    nap_s = 0.0

    def __call__(self, key: Key, found: Sequence[Strip]) -> Steps:
        """See `geometry.digest.digest`."""
        return digest.digest(key, found, _window)

    def close(self) -> None:
        """Nothing: it reads in its steps only."""


class Nowhere:
    """Digests nothing: here it cannot be done."""

    nap_s = 0.0

    def __init__(self, reason: str) -> None:
        """Say this to whoever wants one."""
        self._reason = reason

    def __call__(self, key: Key, found: Sequence[Strip]) -> Steps:
        """Refuse.

        Raises:
            DigestError: always.
        """
        del key, found
        raise DigestError(self._reason)

    def close(self) -> None:
        """Nothing."""


@dataclass
class _Job:
    orders: list[tuple[Order, bytes]]  # of the same digest, each with its route
    strips: Sequence[Strip]
    steps: Steps
    begun_at: float | None = None


class Digests:
    """See the module's head. Runs on the transfer thread alone."""

    def __init__(
        self,
        layout: CacheLayout,
        compute: Compute | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with none."""
        self._layout = layout
        self._compute = compute or OnHost()
        self._clock = clock
        self._jobs: deque[_Job] = deque()
        self._counts: dict[str, float] = {}

    def __repr__(self) -> str:
        """How many are to be made."""
        return f"<Digests: {len(self._jobs)} to be made>"

    @property
    def patience(self) -> float | None:
        """How long the thread may wait before the next step, in seconds; None for ever."""
        return self._compute.nap_s if self._jobs else None

    def begin(self, order: Order, route: bytes = b"") -> Ended | None:
        """Take an order; an event if it cannot be carried out. `route` comes back with the end."""
        pending = [(job, one) for job in self._jobs for one, _ in job.orders]
        if any(_whose(one) == _whose(order) for _, one in pending):
            return None  # asked again, since it takes long; one at a time for each claim and rank
        for job, one in pending:
            if _what(one) == _what(order):
                job.orders.append((order, route))
                return None
        try:
            strips = self._strips(order)
            steps = self._compute(_key(order), strips)
        except (DigestError, ValueError) as error:
            return _refused(order, str(error))
        self._jobs.append(_Job([(order, route)], strips, steps))
        return None

    def poll(self, is_awaited: Callable[[Order], bool]) -> list[tuple[Ended, bytes]]:
        """Do one step for whom it is awaited; what has ended, with its route."""
        if not self._jobs:
            return []
        job = self._jobs[0]
        if not any(is_awaited(order) for order, _ in job.orders):
            return self._failed("nobody waits for it any more")
        job.begun_at = job.begun_at or self._clock()
        try:
            next(job.steps)
        except StopIteration as end:
            self._jobs.popleft()
            self._count(job, self._clock() - job.begun_at)
            return [(_ended(order, job.strips, end.value), route) for order, route in job.orders]
        except (DigestError, MemoryError) as error:
            return self._failed(str(error) or type(error).__name__)
        return []

    def clear(self) -> None:
        """Forget all orders."""
        self._jobs.clear()

    def close(self) -> None:
        """Return when the cache is not read any more."""
        self._compute.close()

    def take_counts(self) -> dict[str, float]:
        """What was counted since the last call."""
        counts, self._counts = self._counts, {}
        return counts

    def _failed(self, reason: str) -> list[tuple[Ended, bytes]]:
        job = self._jobs.popleft()
        return [(_refused(order, reason), route) for order, route in job.orders]

    def _count(self, job: _Job, seconds: float) -> None:
        found = {
            "digests": 1,
            "digest_bytes": sum(strip.num_bytes for strip in job.strips),
            "digest_seconds": seconds,
        }
        for name, amount in found.items():
            self._counts[name] = self._counts.get(name, 0) + amount

    def _strips(self, order: Order) -> list[Strip]:
        """What is to be digested.

        Raises:
            ValueError: if it is not all here.
        """
        if isinstance(order, proofs.Verify):
            begin, end, wanted = order.begin, order.end, order.excerpts
        else:
            begin, end, wanted = 0, order.prove.end, order.prove.excerpts
        tables = block_tables(self._layout, order.tables, begin)
        return excerpts.strips(self._layout, wanted, tables, end=end)


def block_tables(layout: CacheLayout, tables: Sequence[bytes], begin: int) -> list[BlockTable]:
    """Each group's, as vLLM has them; they start at the entry that holds token `begin`."""
    return [
        BlockTable(mark_absent(blocks.block_ids(table)), begin // group.entry_size)
        for group, table in zip(layout.groups, tables, strict=True)
    ]


def mark_absent(ids: blocks.BlockIds) -> blocks.BlockIds:
    """The null block stands where a sliding window has passed."""
    return np.where(ids == NULL_BLOCK, np.int32(blocks.ABSENT), ids)


def _whose(order: Order) -> tuple[object, ...]:
    if isinstance(order, proofs.Verify):
        return order.request, order.source, order.proof.claim
    return order.prove.reader, order.prove.claim


def _what(order: Order) -> tuple[object, ...]:
    """Several readers of the same heads are told the same."""
    if isinstance(order, proofs.Verify):
        return _whose(order)
    return order.prove.claim, order.prove.end, order.prove.excerpts, order.tables


def _key(order: Order) -> Key:
    """The claim is random, and both sides know it."""
    message = order.proof if isinstance(order, proofs.Verify) else order.prove
    return Key(message.claim)


def _ended(order: Order, strips: Sequence[Strip], made: Digest) -> Ended:
    if isinstance(order, proofs.Digest):
        return proofs.Digested(order.prove, _to_bytes(made.rows), _to_bytes(made.columns))
    theirs = Digest(*(_from_bytes(sums) for sums in (order.proof.rows, order.proof.columns)))
    return _verified(order, difference=digest.difference(made, theirs, strips))


def _refused(order: Order, reason: str) -> Ended:
    if isinstance(order, proofs.Digest):
        return proofs.Digested(order.prove, refusal=reason)
    return _verified(order, refusal=reason)


def _verified(
    order: proofs.Verify, *, difference: str | None = None, refusal: str | None = None
) -> proofs.Verified:
    claim = Claim(order.proof.claim)
    return proofs.Verified(order.request, order.source, claim, difference, refusal)


def _to_bytes(sums: digest.U64) -> bytes:
    return sums.astype("<u8", copy=False).tobytes()


def _from_bytes(payload: bytes) -> digest.U64:
    """Of a length that is no whole number of sums the rest is cut, and differs by that."""
    return np.frombuffer(payload[: len(payload) // 8 * 8], dtype="<u8").astype(np.uint64)


def _window(address: int, length: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))
