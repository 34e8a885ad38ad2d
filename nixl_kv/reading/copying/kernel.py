"""A kernel that copies runs from GPU memory to GPU memory, which may be another GPU's.

It takes any runs, in one launch per alignment, with few of the GPU's processors: what bounds it is
how many bytes are under way, see docs/benchmarks.md. This module is imported only where the cache
is in GPU memory: Triton is only there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl

from nixl_kv.errors import TransportError, get_logger
from nixl_kv.geometry.digest import Digest
from nixl_kv.geometry.plan import Ints
from nixl_kv.gpu import UNABLE, on, translated
from nixl_kv.reading.copying import contents, tiles
from nixl_kv.reading.copying.contents import DigestInput
from nixl_kv.reading.copying.tiles import Launch
from nixl_kv.verify.gpu_sums import mixed, position

logger = get_logger(__name__)

PROGRAMS: Final = 24
"""Of one launch, at most: each has a processor of the GPU to itself while it runs."""

TILE_BYTES: Final = 1 << 16
"""What a program has under way."""

NUM_WARPS: Final = 16

DIGESTING_PROGRAMS: Final = 64
DIGESTING_WARPS: Final = 8
"""The same where copies are digested. A head's token has several threads, and each of them finds
out where it is: by fewer threads that have more of them less is done twice. A program copies 10
GB/s, and one that does nothing else 23: so many of each fill an H200's NVLink, see
docs/benchmarks.md."""

LEAST_NUMBERS: Final = 1 << 13
MAX_FREE: Final = 8
"""Kept of what copies have used."""


@triton.jit(do_not_specialize=["num_jobs", "num_tiles"])  # type: ignore[untyped-decorator]
# Triton reads these annotations, and takes no others.
def _copy(numbers, rows, sums, num_jobs, num_tiles, cut: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Copy tile after tile. `numbers` is a `tiles.Launch`, `rows` are a `tiles.Tiling`'s.

    If it digests, `sums` is a `contents.DigestInput`, and `rows` are a `contents.Contents`'.
    """
    unit: tl.constexpr = cut[0]
    items: tl.constexpr = cut[1]
    size: tl.constexpr = cut[2]  # units of an item: of a head's token, if it digests
    digests: tl.constexpr = cut[3]
    # Of 16 bytes Triton makes one access of a thread, if it knows how they are aligned.
    words: tl.constexpr = 2 * size if unit == 16 else size  # noqa: PLR2004
    word: tl.constexpr = _word(unit)
    places = tl.arange(0, words)[None, :]
    if digests:
        # 16 bytes are four words: each int64 has two of them, which have multipliers of their own.
        low = tl.load(sums + 8 + places).to(tl.uint64, bitcast=True)
        high = tl.load(sums + 8 + words + places).to(tl.uint64, bitcast=True)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        job = numbers + _job_of(tile, numbers, num_jobs) * 9
        num_rows, width = tl.load(job + 2).to(tl.int32), tl.load(job + 3).to(tl.int32) // size
        num_pieces = tl.load(job + 7).to(tl.int32)
        start = (tile - tl.load(job)) * items
        first = start // width
        within = (start - first * width).to(tl.int32) + tl.arange(0, items)
        run = first.to(tl.int32) + within // width
        item = within % width
        number = run % num_rows
        piece = run // num_rows
        inside = piece < num_pieces
        row = rows + (tl.load(job + 1) + number) * 2
        ids = numbers + tl.load(job + 6) + piece * 2
        local = tl.load(row, mask=inside, other=0) + item * (unit * size)
        local += tl.load(ids, mask=inside, other=0) * tl.load(job + 4)
        remote = tl.load(row + 1, mask=inside, other=0) + item * (unit * size)
        remote += tl.load(ids + 1, mask=inside, other=0) * tl.load(job + 5)
        source = tl.multiple_of(remote.to(tl.pointer_type(word)), unit)
        target = tl.multiple_of(local.to(tl.pointer_type(word)), unit)
        if digests:
            # Which tokens these are is asked for before the bytes, which take longer.
            label = rows + tl.load(sums + 7) + tl.load(job + 8) // (unit * size)
            label = tl.load(label + number * width + item, mask=inside, other=0)
            token = sums + tl.load(sums + 4) + (tl.load(job + 6) - num_jobs * 9) // 2 + piece
            token = tl.load(token, mask=inside, other=0) + (label & 0xFFFFFFFF)
        value = tl.load(source[:, None] + places, mask=inside[:, None], other=0)
        tl.store(target[:, None] + places, value, mask=inside[:, None])
        if digests:
            wide = value.to(tl.uint64, bitcast=True)
            products = (wide & 0xFFFFFFFF) * low + (wide >> 32) * high
            _add(tl.sum(products, axis=1), label >> 32, token, inside, sums)


@triton.jit
def _job_of(tile, numbers, num_jobs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """The last job that begins with this tile, or before."""
    low = 0
    high = num_jobs - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_later = tl.load(numbers + middle * 9) > tile
        high = tl.where(is_later, middle - 1, high)
        low = tl.where(is_later, low, middle)
    return low


@triton.jit
def _add(terms, head, token, inside, sums):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Add a `head` and `token` each, whose words times multipliers are `terms`, to the sums."""
    row = sums + tl.load(sums + 3) + head * 3
    which = tl.load(row, mask=inside, other=0)
    begin, end = tl.load(row + 1, mask=inside, other=0), tl.load(row + 2, mask=inside, other=0)
    known = inside & (token >= begin) & (token < end)
    terms = mixed(terms + position(tl.load(sums), tl.load(sums + 1), token))
    total = terms.to(tl.int64, bitcast=True)
    tl.atomic_add(sums + tl.load(sums + 5) + which, total, mask=known, sem="relaxed")
    column = sums + tl.load(sums + 6) + (token >> tl.load(sums + 2))
    # `geometry.digest.weight`.
    tl.atomic_add(column, total * (2 * which + 1), mask=known, sem="relaxed")


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _word(unit: int) -> tl.dtype:
    """The type that a thread loads."""
    return {1: tl.int8, 2: tl.int16, 4: tl.int32}.get(unit, tl.int64)


def launch_copy(
    launch: Launch,
    numbers: torch.Tensor,
    rows: torch.Tensor,
    digested: tuple[torch.Tensor, int] | None = None,
    *,
    programs: int | None = None,
) -> None:
    """Start it on the current stream.

    Args:
        launch: what is copied.
        numbers: the launch's.
        rows: the tiling's; of its `Contents` where it is digested.
        digested: the numbers of a `DigestInput`, and the bytes of a head's token.
        programs: at most so many, in place of the usual number.
    """
    sums, content = digested or (numbers, launch.unit)
    size = content // launch.unit
    cut = launch.unit, TILE_BYTES // content, size, digested is not None
    usual = PROGRAMS if digested is None else DIGESTING_PROGRAMS
    warps = NUM_WARPS if digested is None else DIGESTING_WARPS
    grid = (min(programs or usual, launch.num_tiles),)
    _copy[grid](numbers, rows, sums, launch.num_jobs, launch.num_tiles, cut, num_warps=warps)


class _Numbers:
    """Room for a read's numbers on both sides, and the event behind the read.

    They are used again: to allocate them takes as long as to launch a kernel.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._pinned = torch.empty(size, dtype=torch.int64, pin_memory=True)
        self._here = self._pinned.numpy()
        self._there = torch.empty(size, dtype=torch.int64, device=device)
        self.size = size
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, parts: Sequence[Ints]) -> list[torch.Tensor]:
        """Copy all of these to the GPU, on the current stream; where they are."""
        end = 0
        there = []
        for part in parts:
            begin = end + end % 2  # Triton compiles another kernel for what 16 does not divide
            end = begin + len(part)
            self._here[begin:end] = part
            there.append(self._there[begin:end])
        self._there[:end].copy_(self._pinned[:end], non_blocking=True)
        return there

    def fetch(self, part: torch.Tensor) -> Ints:
        """Copy one of them back, on the current stream; where it will be."""
        begin = part.storage_offset()
        here = self._pinned[begin : begin + len(part)]
        here.copy_(part, non_blocking=True)
        return self._here[begin : begin + len(part)]


@dataclass(eq=False)
class CopyRun:
    """A request's kernels, under way."""

    numbers: _Numbers
    rows: torch.Tensor
    sums: tuple[DigestInput, Ints] | None = None
    """What it digests, and where its numbers are on this side when it has ended."""
    digest: Digest | None = None  # when it has ended


class KernelStream:
    """A stream of one GPU, on which copies run one after the other."""

    def __init__(self, device: int, size: int = 0) -> None:
        """Make it, and compile the kernels, which needs seconds the first time.

        Args:
            device: the ordinal of the GPU.
            size: bytes of one head of one token, where copies are digested.

        Raises:
            TransportError: if that cannot be done here.
        """
        self.size = size
        """0 also where the kernel that digests cannot be compiled."""
        self._device = device
        self._free: list[_Numbers] = []
        with translated(TransportError, "compiling what copies KV"), torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # Not behind the copies under way. torch keeps 2 MiB for each stream that allocates.
            self._small_reads = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._warm_up()

    def to_device(self, numbers: Ints) -> torch.Tensor:
        """These numbers where kernels read them."""
        with translated(TransportError, "preparing a copy"):
            return torch.from_numpy(numbers).to(f"cuda:{self._device}")

    def copy(
        self,
        launches: Sequence[Launch],
        rows: torch.Tensor,
        digested: tuple[DigestInput, int] | None = None,
    ) -> CopyRun:
        """Start a request's launches, of TILE_BYTES; `rows` are their tiling's.

        What the first one copies may be digested, by heads and tokens of so many bytes, see
        `CopyRun.digest`; then `rows` are of its `Contents`.
        """
        parts = [launch.numbers for launch in launches]
        if digested is not None:
            parts.append(digested[0].numbers)
        size = sum(len(part) + 1 for part in parts)
        with translated(TransportError, "starting a kernel"), on(self._stream):
            numbers = self._free.pop() if self._free else None
            if numbers is None or numbers.size < size:
                numbers = _Numbers(max(2 * size, LEAST_NUMBERS), rows.device)
            copy = CopyRun(numbers, rows)
            try:
                there = numbers.send(parts)
                of_first = None if digested is None else (there[-1], digested[1])
                for launch, part in zip(launches, there, strict=False):
                    launch_copy(launch, part, rows, of_first)
                    of_first = None
                if digested is not None:
                    copy.sums = digested[0], numbers.fetch(there[-1])
                numbers.done.record()
            except UNABLE:
                self._stream.synchronize()  # of several kernels some may have begun
                raise
        return copy

    def read_16(self, address: int) -> bytes:
        """Read 16 bytes at an address that 16 divides, and wait for them; on any thread.

        Raises:
            TransportError: if they cannot be read.
        """
        if address % 16:
            raise TransportError(f"reading 16 bytes at {address:#x}: 16 does not divide it")
        with translated(TransportError, "reading 16 bytes"), on(self._small_reads):
            here = torch.zeros(16, dtype=torch.uint8, device=self._device)
            rows = torch.tensor([[here.data_ptr(), address]], device=self._device)
            # One job of one row of one unit, and its piece: see `tiles.Launch`.
            numbers = torch.tensor([0, 0, 1, 1, 0, 0, 9, 1, 0, 0, 0], device=self._device)
            launch_copy(Launch(16, numbers.cpu().numpy(), 1, 1), numbers, rows)
            return bytes(here.cpu().numpy())

    def has_ended(self, copy: CopyRun, doing: str) -> bool:
        """Ask for the event behind its kernels."""
        with translated(TransportError, doing):
            is_done = bool(copy.numbers.done.query())  # type: ignore[no-untyped-call]
        if is_done:
            if copy.sums is not None:
                copy.digest = copy.sums[0].digest(copy.sums[1])
            if len(self._free) < MAX_FREE:
                self._free.append(copy.numbers)
        return is_done

    def wait(self) -> None:
        """Wait for all kernels."""
        with translated(TransportError, "ending copies"):
            self._stream.synchronize()

    def _warm_up(self) -> None:
        """Do all that the first request would pay for: 20 to 130 ms, and a compiler's seconds.

        By launches of which nothing is inside.
        """
        nothing = np.zeros(tiles.JOB_COLUMNS, dtype=np.int64)
        nothing[2] = 1  # a row, which no piece has
        with on(self._stream):
            for unit in tiles.UNITS:
                nothing[3] = max(1, self.size // unit)
                numbers = _Numbers(LEAST_NUMBERS, self._stream.device)
                launch = Launch(unit, nothing, 1, 1)
                (there,) = numbers.send([nothing])
                launch_copy(launch, there, there)
                if unit == contents.UNIT:
                    self._warm_up_digests(launch, there)
                numbers.done.record()
                self._free.append(numbers)
        self._stream.synchronize()

    def _warm_up_digests(self, launch: Launch, numbers: torch.Tensor) -> None:
        """What copies can do without."""
        if self.size:
            try:
                launch_copy(launch, numbers, numbers, (numbers, self.size))
            except UNABLE as error:
                logger.warning("what is copied is not digested meanwhile: %s", repr(error))
                self.size = 0
