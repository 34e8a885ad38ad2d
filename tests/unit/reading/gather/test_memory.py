"""Memory that other processes map, on a driver whose allocations are files (`fake_driver`).

tests/gpu/test_share.py does the same on GPUs.
"""

import contextlib
import ctypes
import importlib
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("triton")

from nixl_kv.errors import TransportError
from nixl_kv.geometry.layout import Span
from nixl_kv.protocol import messages
from nixl_kv.reading.gather.share import BATCH, ShareServer, Tokens
from support import fake_driver

UNIT = fake_driver.UNIT
TESTS = Path(__file__).resolve().parents[3]
LIMIT_S = 60.0


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with this driver. At its end nothing is allocated, mapped or open."""
    name = "nixl_kv.reading.gather.memory"
    for each in ("cuda", "cuda.bindings", "cuda.bindings.driver", name):
        monkeypatch.setitem(sys.modules, each, ModuleType(each))
    del sys.modules[name]
    fake_driver.install()
    yield importlib.import_module(name)
    assert (fake_driver.handles, fake_driver.mapped) == ({}, {})


@pytest.fixture
def cache() -> Iterator[list[Span]]:
    """Two tensors: one of many pieces, as in an expandable segment, and one of a single piece."""
    pieces = [fake_driver.allocate(UNIT) for _ in range(2)]
    big = fake_driver.allocate(3 * UNIT)
    yield [Span(address, UNIT) for address in sorted(pieces)] + [Span(big + 16, 2 * UNIT)]
    for address, size in ((pieces[0], UNIT), (pieces[1], UNIT), (big, 3 * UNIT)):
        fake_driver.cuMemUnmap(address, size)
        fake_driver.cuMemAddressFree(address, size)


class Owner:
    """Shares spans, and serves readers on a thread."""

    def __init__(self, memory: Any, spans: list[Span], directory: Path) -> None:
        self._watched: list[int] = []
        make = partial(
            ShareServer, str(directory), watch=self._watched.append, clock=time.monotonic
        )
        self.shared = memory.Shared(spans, 0, make)
        self.directory = str(directory)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stopped.is_set():
            select.select(self._watched, [], [], 0.01)
            self.shared.server.poll()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def export(self) -> messages.Export:
        """The export as a peer decodes it, with a token."""
        encoded = msgspec.msgpack.encode(self.shared.description)
        export = msgspec.msgpack.decode(encoded, type=messages.Export)
        assert export.share is not None
        share = messages.Share(socket=export.share.socket, token=self.shared.server.invite())
        return msgspec.structs.replace(export, share=share)


@pytest.fixture
def owner(memory: Any, cache: list[Span], tmp_path: Path) -> Iterator[Owner]:
    one = Owner(memory, cache, tmp_path)
    yield one
    one.stop()
    one.shared.close()


def located(mapping: Any, address: int, length: int) -> int:
    first = np.array([address], dtype=np.int64)
    (at,) = mapping.locate(first, first + length).tolist()
    return int(at)


def test_the_owners_bytes_are_where_the_mapping_says(
    memory: Any, owner: Owner, cache: list[Span]
) -> None:
    for number, span in enumerate(cache):
        ctypes.memset(span.address, number + 1, span.length)
    mapping = memory.Mapping(owner.export, 0, owner.directory, Tokens())
    for number, span in enumerate(cache):
        at = located(mapping, span.address, span.length)
        assert at != span.address
        assert ctypes.string_at(at, span.length) == bytes([number + 1]) * span.length
    ctypes.memset(cache[0].address, 9, 16)
    assert ctypes.string_at(located(mapping, cache[0].address, 16), 16) == bytes([9]) * 16
    proof = owner.export.proof
    assert ctypes.string_at(located(mapping, proof.address, 16), 16) == proof.value
    assert not mapping.has_owner_ended
    owner.shared.server.begin_life()
    assert mapping.has_owner_ended
    mapping.close()


def permissions(address: int) -> str:
    """The permissions of the mapping at this address, as /proc shows them."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, found, *_ = line.split()
        first, _, end = bounds.partition("-")
        if int(first, 16) <= address < int(end, 16):
            return found
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_the_owners_memory_cannot_be_written(memory: Any, owner: Owner, cache: list[Span]) -> None:
    mapping = memory.Mapping(owner.export, 0, owner.directory, Tokens())
    assert permissions(cache[0].address).startswith("rw-")
    assert permissions(located(mapping, cache[0].address, 16)).startswith("r--")
    mapping.close()


def test_memory_outside_is_not_located(memory: Any, owner: Owner, cache: list[Span]) -> None:
    mapping = memory.Mapping(owner.export, 0, owner.directory, Tokens())
    first = min(one.address for one in owner.export.allocations)
    for address, length in ((first - 8, 16), (1 << 20, 16), (cache[0].address, 1 << 50)):
        with pytest.raises(TransportError, match="lies outside"):
            located(mapping, address, length)
    mapping.close()


def test_a_gpu_that_is_not_visible_is_named_and_nothing_stays(
    memory: Any, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pieces but the last are mapped by then."""
    fetched: list[int] = []
    really = fake_driver.cuMemImportFromShareableHandle

    def import_some(descriptor: int, kind: str) -> tuple[Any, ...]:
        fetched.append(descriptor)
        if len(fetched) == len(owner.shared.description.allocations):
            return fake_driver.CUresult.CUDA_ERROR_INVALID_DEVICE, None
        return really(descriptor, kind)

    monkeypatch.setattr(fake_driver, "cuMemImportFromShareableHandle", import_some)
    before = len(fake_driver.mapped), len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(TransportError, match="CUDA_ERROR_INVALID_DEVICE: the GPU of its owner"):
        memory.Mapping(owner.export, 0, owner.directory, Tokens())
    owner.stop()  # so that it closes its end
    owner.shared.server.poll()
    assert (len(fake_driver.mapped), len(list(Path("/proc/self/fd").iterdir()))) == before


def test_without_the_directory_the_setting_is_named(memory: Any, owner: Owner) -> None:
    with pytest.raises(TransportError, match="share_dir is not set"):
        memory.Mapping(owner.export, 0)


def test_a_mapping_for_reads_is_refused_rather_than_one_for_writes(
    memory: Any, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = fake_driver.failing("cuMemSetAccess", fake_driver.INVALID)
    monkeypatch.setattr(fake_driver, "cuMemSetAccess", failing)
    with pytest.raises(TransportError, match="cuMemSetAccess: CUDA_ERROR_INVALID_VALUE"):
        memory.Mapping(owner.export, 0, owner.directory, Tokens())


def test_a_description_in_another_order_is_refused(memory: Any, owner: Owner) -> None:
    export = owner.export
    wrong = msgspec.structs.replace(export, allocations=export.allocations[::-1])
    with pytest.raises(TransportError, match="not in the order"):
        memory.Mapping(wrong, 0, owner.directory, Tokens())


def test_memory_that_cannot_be_exported_is_not_shared(
    memory: Any, cache: list[Span], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain allocations do this, and vLLM's pool on a GPU without fabric handles."""
    failing = fake_driver.failing("cuMemExportToShareableHandle", fake_driver.INVALID)
    monkeypatch.setattr(fake_driver, "cuMemExportToShareableHandle", failing)
    with pytest.raises(TransportError, match="cuMemExportToShareableHandle: CUDA_ERROR"):
        memory.Shared(cache, 0, partial(ShareServer, str(tmp_path), watch=print, clock=time.time))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fails", ["cuMemCreate", "cuMemAddressReserve", "cuMemMap"])
def test_an_allocation_that_fails_leaves_nothing(
    memory: Any, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    error = fake_driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    monkeypatch.setattr(fake_driver, fails, fake_driver.failing(fails, error))
    with pytest.raises(TransportError, match=f"{fails}: CUDA_ERROR_OUT_OF_MEMORY"):
        memory.Shareable(10, 0)


OWNS = """\
import ctypes, select, sys, time
from functools import partial
from support import fake_driver
fake_driver.install()
import msgspec
from nixl_kv.geometry.layout import Span
from nixl_kv.reading.gather.memory import Shared
from nixl_kv.reading.gather.share import ShareServer
addresses = [fake_driver.allocate(fake_driver.UNIT) for _ in range(int(sys.argv[2]))]
for address in addresses:
    ctypes.memset(address, 5, fake_driver.UNIT)
watched = []
make = partial(ShareServer, sys.argv[1], watch=watched.append, clock=time.monotonic)
shared = Shared([Span(one, fake_driver.UNIT) for one in addresses], 0, make)
print(msgspec.msgpack.encode(shared.description).hex(), shared.server.invite().hex(),
      addresses[0], flush=True)
while True:
    select.select(watched, [], [], shared.server.wait_s)
    shared.server.poll()
"""


@contextlib.contextmanager
def another_owner(
    directory: Path, pieces: int
) -> Iterator[tuple["subprocess.Popen[str]", messages.Export, int]]:
    command = [sys.executable, "-c", OWNS, str(directory), str(pieces)]
    environment = {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "PATH": "/usr/bin:/bin"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            encoded, token, address = process.stdout.readline().split()
            export = msgspec.msgpack.decode(bytes.fromhex(encoded), type=messages.Export)
            assert export.share is not None
            share = messages.Share(socket=export.share.socket, token=bytes.fromhex(token))
            yield process, msgspec.structs.replace(export, share=share), int(address)
        finally:
            process.kill()


def test_memory_outlives_its_owner_until_it_is_unmapped(memory: Any, tmp_path: Path) -> None:
    """And its end is seen at once, of several batches of pieces."""
    count = 3 * BATCH
    with another_owner(tmp_path, count) as (process, export, address):
        assert len(export.allocations) == count + 1
        mapping = memory.Mapping(export, 0, str(tmp_path), Tokens())
        at = located(mapping, address, UNIT)
        assert ctypes.string_at(at, UNIT) == bytes([5]) * UNIT
        assert not mapping.has_owner_ended
        process.kill()
        process.wait()
        assert select.select([mapping.owner], [], [], LIMIT_S)[0]
        assert mapping.has_owner_ended
        assert ctypes.string_at(at, 1) == bytes([5])
        mapping.close()
