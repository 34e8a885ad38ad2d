"""A kernel that copies contiguous runs within GPU memory, also from another GPU.

One launch per alignment copies any runs. It uses few of the GPU's SMs, because the bytes in flight
bound its speed, not arithmetic (docs/benchmarks.md). Imported only where the cache is in GPU
memory, because only GPU machines have Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl

from nixl_kv.errors import TransportError
from nixl_kv.geometry.plan import Ints, Pieces, Plan
from nixl_kv.gpu import UNABLE, on, translated
from nixl_kv.reading.tiles import JOB_COLUMNS, UNITS, Launch, Locate, Tiling

PROGRAMS: Final = 24  # per launch at most; each occupies one SM of the GPU while it runs
TILE_BYTES: Final = 1 << 16  # that one program has in flight
NUM_WARPS: Final = 16
LEAST_NUMBERS: Final = 1 << 13
MAX_FREE: Final = 8  # buffers that are kept for later copies


@triton.jit(do_not_specialize=["num_jobs", "num_tiles"])  # type: ignore[untyped-decorator]
# Triton reads the annotations and accepts only its own.
def _copy(numbers, rows, num_jobs, num_tiles, cut: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Copy tile after tile. `numbers` are those of a `Launch`, `rows` those of a `Tiling`."""
    unit: tl.constexpr = cut[0]  # bytes of an item
    items: tl.constexpr = cut[1]  # of a tile
    # With 16 bytes per item, Triton emits one access per thread if it knows the alignment.
    words: tl.constexpr = 2 if unit == 16 else 1  # noqa: PLR2004
    word: tl.constexpr = _word(unit)
    places = tl.arange(0, words)[None, :]
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        job = numbers + _job_of(tile, numbers, num_jobs) * 8
        num_rows, width = tl.load(job + 2).to(tl.int32), tl.load(job + 3).to(tl.int32)
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
        local = tl.load(row, mask=inside, other=0) + item * unit
        local += tl.load(ids, mask=inside, other=0) * tl.load(job + 4)
        remote = tl.load(row + 1, mask=inside, other=0) + item * unit
        remote += tl.load(ids + 1, mask=inside, other=0) * tl.load(job + 5)
        source = tl.multiple_of(remote.to(tl.pointer_type(word)), unit)
        target = tl.multiple_of(local.to(tl.pointer_type(word)), unit)
        value = tl.load(source[:, None] + places, mask=inside[:, None], other=0)
        tl.store(target[:, None] + places, value, mask=inside[:, None])


@triton.jit
def _job_of(tile, numbers, num_jobs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    low = 0
    high = num_jobs - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_later = tl.load(numbers + middle * 8) > tile
        high = tl.where(is_later, middle - 1, high)
        low = tl.where(is_later, low, middle)
    return low


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _word(unit: int) -> tl.dtype:
    return {1: tl.int8, 2: tl.int16, 4: tl.int32}.get(unit, tl.int64)


def launch_copy(
    launch: Launch, numbers: torch.Tensor, rows: torch.Tensor, *, programs: int = PROGRAMS
) -> None:
    """Start a kernel on the current stream. `numbers` and `rows` are on the GPU."""
    unit = launch.unit
    grid = (min(programs, launch.num_tiles),)
    cut = unit, TILE_BYTES // unit
    _copy[grid](numbers, rows, launch.num_jobs, launch.num_tiles, cut, num_warps=NUM_WARPS)


class _Numbers:
    """Buffers for a copy's numbers on the host and the GPU, and the event behind the copy.

    Copies reuse them, because allocating them takes as long as launching a kernel.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._pinned = torch.empty(size, dtype=torch.int64, pin_memory=True)
        self._here = self._pinned.numpy()
        self._there = torch.empty(size, dtype=torch.int64, device=device)
        self.size = size
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, parts: Sequence[Ints]) -> list[torch.Tensor]:
        """Copy arrays to the GPU, on the current stream; return where they are there."""
        end = 0
        there = []
        for part in parts:
            # Triton compiles another kernel for an address that 16 does not divide.
            begin = end + end % 2
            end = begin + len(part)
            self._here[begin:end] = part
            there.append(self._there[begin:end])
        self._there[:end].copy_(self._pinned[:end], non_blocking=True)
        return there


@dataclass(frozen=True)
class KernelPlan:
    """A plan whose rows are on the GPU."""

    tiling: Tiling
    rows: torch.Tensor


@dataclass(eq=False)
class CopyRun:
    """The kernels of one copy in progress."""

    numbers: _Numbers
    rows: torch.Tensor


class KernelStream:
    """A stream of one GPU, on which copies run one after the other.

    `prepare`, `read_16` and `end` are for any thread.
    """

    def __init__(self, device: int) -> None:
        """Make a stream and compile the kernels, which takes seconds the first time."""
        self._device = device
        self._free: list[_Numbers] = []
        with translated(TransportError, "compiling the copy kernel"), torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # Not behind copies in progress. torch keeps 2 MiB for each stream that allocates.
            self._small_reads = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._warm_up()

    def prepare(self, plan: Plan, locate: Locate = lambda first, _: first) -> KernelPlan:
        """Prepare a plan; `locate` finds its remote rows in this process."""
        tiling = Tiling(plan, locate)
        with translated(TransportError, "preparing a copy"):
            rows = torch.from_numpy(tiling.rows).to(f"cuda:{self._device}")
        return KernelPlan(tiling, rows)

    def start(self, prepared: KernelPlan, pieces: Sequence[Pieces]) -> CopyRun:
        """Start to copy remote pieces into local ones; if it raises, nothing is in progress."""
        launches, rows = prepared.tiling.launches(pieces, TILE_BYTES), prepared.rows
        size = sum(len(launch.numbers) + 1 for launch in launches)
        with translated(TransportError, "starting a kernel"), on(self._stream):
            numbers = self._free.pop() if self._free else None
            if numbers is None or numbers.size < size:
                numbers = _Numbers(max(2 * size, LEAST_NUMBERS), rows.device)
            try:
                there = numbers.send([launch.numbers for launch in launches])
                for launch, part in zip(launches, there, strict=True):
                    launch_copy(launch, part, rows)
                numbers.done.record()
            except UNABLE:
                self._stream.synchronize()  # one of several kernels may run already
                raise
        return CopyRun(numbers, rows)

    def read_16(self, address: int) -> bytes:
        """Read 16 bytes at a multiple of 16, and wait for them; on any thread."""
        if address % 16:
            raise TransportError(f"reading 16 bytes at {address:#x}; allowed: multiples of 16")
        with translated(TransportError, "reading 16 bytes"), on(self._small_reads):
            here = torch.zeros(16, dtype=torch.uint8, device=self._device)
            rows = torch.tensor([[here.data_ptr(), address]], device=self._device)
            # One job of one row of one unit, and its piece: see `tiles.Launch`.
            numbers = torch.tensor([0, 0, 1, 1, 0, 0, 8, 1, 0, 0], device=self._device)
            launch_copy(Launch(16, numbers.cpu().numpy(), 1, 1), numbers, rows)
            return bytes(here.cpu().numpy())

    def poll(self, copy: CopyRun) -> bool:
        with translated(TransportError, "copying KV"):
            is_done = bool(copy.numbers.done.query())  # type: ignore[no-untyped-call]
        if is_done and len(self._free) < MAX_FREE:
            self._free.append(copy.numbers)
        return is_done

    def end(self, copy: CopyRun | None = None) -> None:
        del copy
        with translated(TransportError, "ending copies"):
            self._stream.synchronize()

    def _warm_up(self) -> None:
        """Compile all kernels and load them, so that the first copy does not wait for that.

        Loading takes 20 to 130 ms, compiling takes seconds. The launches copy nothing.
        """
        nothing = np.zeros(JOB_COLUMNS, dtype=np.int64)
        nothing[2:4] = 1  # a row of one unit, without pieces
        with on(self._stream):
            for unit in UNITS:
                numbers = _Numbers(LEAST_NUMBERS, self._stream.device)
                (there,) = numbers.send([nothing])
                launch_copy(Launch(unit, nothing, 1, 1), there, there)
                numbers.done.record()
                self._free.append(numbers)
        self._stream.synchronize()
