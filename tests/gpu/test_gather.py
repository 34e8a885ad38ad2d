"""Another process's GPU memory, mapped and read by a kernel: also while its owner stops and dies.

python -m pytest -s -m gpu tests/gpu/test_gather.py
"""

import select
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
driver = pytest.importorskip("cuda.bindings.driver")

from nixl_kv.errors import TransportError  # noqa: E402
from nixl_kv.gpu import make_current  # noqa: E402
from nixl_kv.protocol import messages  # noqa: E402
from support.gpu_memory import EXPANDABLE, SIZE, Owner, Reader, running, write_apart  # noqa: E402
from support.gpus import needs_gpus  # noqa: E402

pytestmark = needs_gpus(1)

LONG = 1000
"""Kernels in a row, which take a second or more."""


@contextmanager
def owner(**settings: str) -> Iterator[Owner]:
    """It shares its memory in no directory."""
    with running(Owner("plain", Path(), settings, is_apart=False)) as one:
        yield one


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(0)


@pytest.mark.parametrize("settings", [{}, EXPANDABLE])
def test_memory_that_is_mapped_piece_by_piece_cannot_be_written(
    reader: Reader, settings: dict[str, str]
) -> None:
    """An expandable segment of torch is. CUDA maps an IPC handle for reads and writes alone."""
    with owner(**settings) as one:
        shown = write_apart(one, 0)
        is_written = shown.split()[:2] == ["CUDA_SUCCESS", "CUDA_SUCCESS"]
        assert is_written is not bool(settings), shown
        assert "CUDA_" in shown
        if settings:
            reader.check_reads(one)


@pytest.mark.parametrize("settings", [{}, EXPANDABLE])
def test_a_kernel_reads_memory_of_another_process(reader: Reader, settings: dict[str, str]) -> None:
    """Its memory is one allocation, or pieces that torch has put in one line."""
    with owner(**settings) as one:
        assert (len(one.export.allocations) > 2) == bool(settings)  # the cache, and the proof
        reader.check_reads(one)


def test_an_owner_may_stop_and_die_while_its_memory_is_read(reader: Reader) -> None:
    with owner() as one:
        mapped = reader.map(one.export, one.address)
        one.process.send_signal(signal.SIGSTOP)
        reader.read(mapped)
        reader.check()
        one.process.send_signal(signal.SIGCONT)
        assert not mapped.mapping.has_owner_ended
        reads = [reader.start(mapped) for _ in range(LONG)]
        one.process.kill()
        assert not reader.stream.poll(reads[-1]), "it was too short: nothing was under way"
        one.process.wait()
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
            reader.map(one.export, one.address)


def _read_on_second_gpu(pipe: Connection, export: messages.Export, address: int) -> None:
    reader = Reader(1)

    def read() -> None:
        """On a thread whose current GPU is the first one, as of all that are new."""
        reader.read(reader.map(export, address))

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
        reader.gather.unmap(
            reader.map(one.export, one.address)
        )  # allocates what every later mapping uses
        free, _ = torch.cuda.mem_get_info()
        with pytest.raises(TransportError, match=words):
            reader.map(altered, one.address)
        assert torch.cuda.mem_get_info()[0] == free
