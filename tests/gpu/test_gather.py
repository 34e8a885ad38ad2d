"""Another process's GPU memory, mapped and read by a kernel: also while its owner stops and dies.

python -m pytest -s -m gpu tests/gpu/test_gather.py
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
driver = pytest.importorskip("cuda.bindings.driver")

from nixl_kv.errors import TransportError  # noqa: E402
from nixl_kv.geometry.layout import Span  # noqa: E402
from nixl_kv.geometry.plan import Pieces  # noqa: E402
from nixl_kv.gpu import make_current  # noqa: E402
from nixl_kv.protocol import messages  # noqa: E402
from nixl_kv.reading.gather import memory as gpu_memory  # noqa: E402
from nixl_kv.reading.gather.path import GatherPath  # noqa: E402
from nixl_kv.reading.kernel import KernelStream  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SIZE = 1 << 30
PIECE = 8 << 10
COUNT = SIZE // (2 * PIECE)
SEED = 5
LONG = 1000
"""Kernels in a row, which take a second or more."""


def _content() -> Any:
    torch.manual_seed(SEED)
    return torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device="cuda:0")


def _own(pipe: Connection, settings: dict[str, str]) -> None:
    os.environ |= settings
    memory = _content()
    torch.cuda.synchronize()
    span = Span(memory.data_ptr(), SIZE)
    exported = gpu_memory.Exported([span], 0)
    pipe.send((exported.description, span.address))
    pipe.recv()
    exported.close()


class Owner:
    def __init__(self, settings: dict[str, str]) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_own, args=(theirs, settings), daemon=True)
        self.process.start()
        assert self.pipe.poll(120), "the process did not start"
        self.export: messages.Export
        self.export, self.address = self.pipe.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextmanager
def owner(**settings: str) -> Iterator[Owner]:
    one = Owner(settings)
    try:
        yield one
    finally:
        one.kill()


class Reader:
    """Reads every other piece, at random, into memory of its own."""

    def __init__(self, device: int = 0) -> None:
        self.watched: list[int] = []
        map_memory = partial(gpu_memory.Mapping, device=device)
        self.gather = GatherPath(KernelStream(device), map_memory, self.watched.append)
        self.stream = self.gather.stream
        self.memory = torch.zeros(SIZE, dtype=torch.uint8, device=f"cuda:{device}")
        torch.cuda.synchronize(device)
        rng = np.random.default_rng(SEED)
        local, remote = (rng.permutation(COUNT).astype(np.int32) for _ in range(2))
        self.pieces = [Pieces(local, remote)]

    def plan(self, address: int) -> Any:
        lists = [
            np.array([[base, PIECE, 0, 2 * PIECE, COUNT]], dtype=np.uint64)
            for base in (self.memory.data_ptr(), address)
        ]
        first = np.zeros(1, dtype=np.int32)
        rows = (SimpleNamespace(first=(first, first)),)
        return SimpleNamespace(local=lists[0], remote=lists[1], paged_rows=rows)

    def map(self, one: Owner) -> Any:
        return self.map_export(one.export, one.address)

    def map_export(self, export: messages.Export, address: int) -> Any:
        return self.gather.map(export, self.plan(address))

    def read(self, mapped: Any) -> Any:
        return self.stream.start(mapped.plan, self.pieces)

    def wait(self, read: Any) -> None:
        while not self.stream.poll(read):
            pass

    def check(self) -> None:
        """All of it is there, and nothing else was written."""
        expected = torch.zeros_like(self.memory)
        pieces = _content().view(COUNT, 2, PIECE)[:, 0]
        (pair,) = self.pieces
        to, of = (torch.from_numpy(side.astype(np.int64)) for side in (pair.local, pair.remote))
        expected.view(COUNT, 2, PIECE)[to, 0] = pieces[of]
        assert torch.equal(self.memory, expected)
        self.memory.zero_()
        torch.cuda.synchronize()


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader()


WRITE_THERE = """\
import sys
import msgspec
import numpy as np
from cuda.bindings import driver
from nixl_kv.gpu import make_current
from nixl_kv.protocol import messages
from nixl_kv.reading.gather.memory import Mapping
make_current(0)
export = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=messages.Export)
first = np.array([int(sys.argv[2])])
(place,) = Mapping(export, 0).locate(first, first + 64).tolist()
(posted,) = driver.cuMemsetD8(place, 0xEE, 64)
(ended,) = driver.cuCtxSynchronize()
print(posted.name, ended.name)
"""


@pytest.mark.parametrize("settings", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}])
def test_memory_that_is_mapped_piece_by_piece_cannot_be_written(
    reader: Reader, settings: dict[str, str]
) -> None:
    """An expandable segment of torch is. CUDA maps an IPC handle for reads and writes alone."""
    with owner(**settings) as one:
        export = msgspec.msgpack.encode(one.export).hex()
        command = [sys.executable, "-c", WRITE_THERE, export, str(one.address)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        is_written = done.stdout.split() == ["CUDA_SUCCESS", "CUDA_SUCCESS"]
        assert is_written is not bool(settings), done.stdout + done.stderr
        assert "CUDA_" in done.stdout, done.stderr
        if settings:
            mapped = reader.map(one)
            reader.wait(reader.read(mapped))
            reader.check()
            reader.gather.unmap(mapped)


@pytest.mark.parametrize("settings", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}])
def test_a_kernel_reads_memory_of_another_process(reader: Reader, settings: dict[str, str]) -> None:
    """Its memory is one allocation, or pieces that torch has put in one line."""
    with owner(**settings) as one:
        assert (len(one.export.allocations) > 2) == bool(settings)  # the cache, and the proof
        mapped = reader.map(one)
        reader.wait(reader.read(mapped))
        reader.check()
        reader.gather.unmap(mapped)


def test_an_owner_may_stop_and_die_while_its_memory_is_read(reader: Reader) -> None:
    with owner() as one:
        mapped = reader.map(one)
        one.signal(signal.SIGSTOP)
        reader.wait(reader.read(mapped))
        reader.check()
        one.signal(signal.SIGCONT)
        assert not mapped.mapping.has_owner_ended
        reads = [reader.read(mapped) for _ in range(LONG)]
        one.signal(signal.SIGKILL)
        assert not reader.stream.poll(reads[-1]), "it was too short: nothing was under way"
        one.process.join()
        for read in reads:
            reader.wait(read)
        reader.check()
        ready, _, _ = select.select(reader.watched, [], [], 60)
        assert ready, "the end of the process is not seen"
        assert mapped.mapping.has_owner_ended
        free, _ = torch.cuda.mem_get_info()
        reader.gather.unmap(mapped)
        assert torch.cuda.mem_get_info()[0] >= free + SIZE, "the dead process's memory is kept"
        with pytest.raises(TransportError, match="No such process"):
            reader.map(one)


def _read_on_second_gpu(pipe: Connection, export: messages.Export, address: int) -> None:
    reader = Reader(1)

    def read() -> None:
        """On a thread whose current GPU is the first one, as of all that are new."""
        reader.wait(reader.read(reader.map_export(export, address)))

    with ThreadPoolExecutor(1) as threads:
        threads.submit(read).result()
    error, _, is_active = driver.cuDevicePrimaryCtxGetState(0)
    pipe.send((int(error), bool(is_active), bool(reader.memory.any())))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_uses_no_gpu_but_its_own() -> None:
    """A context on another one takes memory of it, and 115 ms of the first load."""
    context = get_context("spawn")
    pipe, theirs = context.Pipe()
    with owner() as one:
        arguments = (theirs, one.export, one.address)
        process = context.Process(target=_read_on_second_gpu, args=arguments, daemon=True)
        process.start()
        theirs.close()  # so that its end is seen
        assert pipe.poll(120), "nothing was read"
        assert pipe.recv() == (0, False, True)
        process.join()


def _drop_event_of_second_gpu(pipe: Connection) -> None:
    torch.cuda.set_device(1)
    events = [torch.Event("cuda")]
    events[0].record()

    def drop() -> None:
        """The transfer thread does this once prefill has written a chunk."""
        make_current(1)
        events[0].query()
        events.clear()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(drop).result()
    error, _, is_active = driver.cuDevicePrimaryCtxGetState(0)
    pipe.send((int(error), bool(is_active)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_event_is_dropped_without_a_context_on_another_gpu() -> None:
    context = get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_drop_event_of_second_gpu, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    assert pipe.poll(120), "no event was dropped"
    assert pipe.recv() == (0, False)
    process.join()


def _altered(one: Owner, what: str) -> messages.Export:
    """The export of `one`, with an error in its description."""
    export = one.export
    whole, small = sorted(export.allocations, key=lambda each: -each.length)
    proof = export.proof
    allocations = {
        "garbage": messages.Allocation(address=one.address, length=SIZE, handle=b"\1" * 64),
        "short": replace(whole, length=SIZE // 2),
        "long": replace(whole, length=1 << 40),
        "descriptor": messages.Allocation(address=one.address, length=SIZE, descriptor=0),
    }
    altered: dict[str, dict[str, Any]] = {
        name: {"allocations": (one, small)} for name, one in allocations.items()
    } | {
        "another host": {"host": "elsewhere"},
        "another life": {"started": 1},
        "no process": {"pid": 1 << 22},
        "offset lost": {"allocations": (whole, replace(small, offset=0))},
        "another allocation": {"allocations": (whole, replace(small, handle=whole.handle))},
        "another value": {"proof": replace(proof, value=bytes(16))},
        "another place": {"proof": replace(proof, address=1 << 20)},
    }
    return replace(export, **altered[what])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("another host", "in another PID namespace"),
        ("another life", "has ended"),
        ("no process", "No such process|Invalid argument"),
        ("garbage", "cuIpcOpenMemHandle"),
        ("short", "lies outside of the memory"),
        ("long", "of an allocation of 1073741824 bytes"),
        ("descriptor", "."),
        ("offset lost", "does not hold the 16 bytes"),
        ("another allocation", "does not hold the 16 bytes"),
        ("another value", "does not hold the 16 bytes"),
        ("another place", "lies outside of the memory"),
    ],
)
def test_an_export_that_does_not_hold_is_refused(reader: Reader, what: str, words: str) -> None:
    with owner() as one:
        altered = _altered(one, what)
        reader.gather.unmap(reader.map(one))  # allocates what every later mapping uses
        free, _ = torch.cuda.mem_get_info()
        with pytest.raises(TransportError, match=words):
            reader.gather.map(altered, reader.plan(one.address))
        assert torch.cuda.mem_get_info()[0] == free
