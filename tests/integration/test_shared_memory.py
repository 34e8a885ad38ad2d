"""Two engines whose memory one maps over a socket in `share_dir`, with threads and real sockets.

The GPU is made of host memory: its driver (`fake_driver`), and a stream that copies at once.
"""

import ctypes
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nixl_kv
from harness.local import engine as local_engine
from harness.local.caches import Cache, Sizes, layout_at
from harness.local.engine import HOST, LocalEngine
from harness.local.memory import Fabric, MemoryTransport
from nixl_kv.config import Config
from nixl_kv.engine.status import build_status
from nixl_kv.geometry.plan import Ints, Pieces, Plan
from nixl_kv.protocol import messages
from nixl_kv.protocol.events import LoadEnded
from nixl_kv.reading.tiles import Tiling
from support import fake_driver
from support.oracle import tile_pairs
from support.polling import wait_until

gather = pytest.importorskip("nixl_kv.reading.gather")
pytest.importorskip("triton")

UNMAPPED_S = 1.0
TABLES = [7, 3], [2, 9]
NUM_TOKENS = 8
TILE_BYTES = 256


class HostStream:
    """See `reading.kernel.KernelStream`."""

    def __init__(self, device: int) -> None:
        del device

    def prepare(self, plan: Plan, locate: Callable[[Ints, Ints], Ints]) -> SimpleNamespace:
        return SimpleNamespace(tiling=Tiling(plan, locate))

    def read_16(self, address: int) -> bytes:
        return ctypes.string_at(address, 16)

    def start(self, prepared: SimpleNamespace, pieces: Sequence[Pieces]) -> None:
        for local, remote in tile_pairs(prepared.tiling, pieces, TILE_BYTES).tolist():
            ctypes.memmove(local, remote, 1)

    def poll(self, copy: None) -> bool:
        del copy
        return True

    def end(self) -> None:
        """Nothing is in progress."""


@pytest.fixture(autouse=True)
def _gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kernel: Any = ModuleType("nixl_kv.reading.kernel")
    kernel.KernelStream = HostStream
    gpu: Any = ModuleType("nixl_kv.gpu")
    gpu.make_current = lambda _device: None
    gpu.allocate = lambda num_bytes, _device: (fake_driver.allocate(num_bytes), None)
    memory = "nixl_kv.reading.gather.memory"
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver", memory):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    del sys.modules[memory]
    fake_driver.install()
    monkeypatch.setitem(sys.modules, "nixl_kv.gpu", gpu)
    monkeypatch.setattr(nixl_kv, "gpu", gpu, raising=False)
    monkeypatch.setitem(sys.modules, "nixl_kv.reading.kernel", kernel)
    monkeypatch.setattr(local_engine, "features_with", lambda **_: (gather.build,))
    importlib.import_module(memory)
    yield
    sys.modules.pop(memory, None)


@dataclass
class Pair:
    """Prefill's cache is in memory of the driver."""

    directory: Path
    prefill_shares: bool = True
    decode_shares: bool = True
    path: str = "auto"

    def __post_init__(self) -> None:
        self.fabric = Fabric()
        self.source, self.target = Cache(Sizes()).fill(1), Cache(Sizes())
        address = fake_driver.allocate(self.source.memory.nbytes)
        ctypes.memmove(address, self.source.memory.ctypes.data, self.source.memory.nbytes)
        layout = replace(layout_at(self.source.layout(), address), memory="VRAM")
        self.prefill = self._start("prefill", layout, self.prefill_shares)
        self.decode = self._start(
            "decode", replace(self.target.layout(), memory="VRAM"), self.decode_shares, self.path
        )
        self.num_mapped = len(fake_driver.mapped)
        """Without those of decode."""

    def _start(self, role: str, layout: Any, shares: bool, path: str = "auto") -> LocalEngine:  # noqa: FBT001
        share_dir = str(self.directory) if shares else None
        config = Config(host=HOST, lease_s=2.0, share_dir=share_dir, path=path, staging_mib=0)
        make: Any = lambda: MemoryTransport(self.fabric)  # noqa: E731
        return LocalEngine(role, [layout], make, config=config, roles=role)

    def load(self, number: int = 0) -> LoadEnded:
        """Load a prompt, and compare its bytes."""
        there, here = TABLES
        self.target.memory[...] = 0
        ticket = self.prefill.offer(f"p{number}", [there], NUM_TOKENS)
        self.decode.prepare_load(f"d{number}", ticket)
        self.decode.start_load(f"d{number}", [here], range(NUM_TOKENS))
        (ended,) = self.decode.wait_load(f"d{number}")
        assert ended.failure is None, ended.failure
        assert np.array_equal(self.target.blocks(here), self.source.blocks(there))
        return ended

    @property
    def unmapped(self) -> list[dict[str, Any]]:
        """The same field of `nixl-kv status`."""
        (rank,) = self.decode.ranks
        question = messages.StatusRequest(incarnation=rank.description.incarnation)
        status = build_status(rank.parts, rank.engine.spec.rank, "", time.monotonic, 0.0, question)
        return status.lists["unmapped"]

    def wait_until_unmapped(self) -> None:
        begun = time.monotonic()
        wait_until(lambda: len(fake_driver.mapped) <= self.num_mapped, 30.0)
        assert time.monotonic() - begun < UNMAPPED_S

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


@pytest.fixture
def make_pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(**fields: Any) -> Pair:
        pairs.append(Pair(tmp_path, **fields))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()
    assert list(tmp_path.iterdir()) == []


def paths_of(ended: LoadEnded) -> list[str]:
    return [read.path for read in ended.reads]


def test_decode_reads_memory_that_prefill_hands_out(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    assert [paths_of(pair.load(number)) for number in range(3)] == [["gather"]] * 3
    assert len(fake_driver.mapped) == pair.num_mapped + 2, "the cache, and the proof"
    assert pair.unmapped == []


def test_decode_unmaps_the_memory_of_a_prefill_engine_that_ends(
    make_pair: Callable[..., Pair],
) -> None:
    """Or sleeps: then its transfer engine ends too, before vLLM frees the memory."""
    pair = make_pair()
    pair.load()
    pair.num_mapped -= 1  # prefill's own proof goes too
    for rank in pair.prefill.ranks:
        rank.engine.stop()
    pair.wait_until_unmapped()


def test_a_new_incarnation_is_mapped_anew(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX's listener has closed, so another agent serves the same memory."""
    pair = make_pair()
    pair.load()
    (rank,) = pair.prefill.ranks
    before = rank.description.incarnation
    is_replaced = itertools.chain([True], itertools.repeat(0))
    monkeypatch.setattr(rank.parts.serving, "poll", lambda: next(is_replaced))
    assert rank.engine.loop is not None
    rank.engine.loop.wake()
    pair.prefill.wait(lambda: rank.description.incarnation != before)
    pair.wait_until_unmapped()
    pair.prefill.publish()
    assert paths_of(pair.load(1)) == ["gather"]


def test_the_memory_of_an_owner_that_was_stalled_is_mapped_later(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all later loads would be 300 times slower. Meanwhile its loads use NIXL."""
    now = time.monotonic()
    monkeypatch.setattr(gather.path, "time", SimpleNamespace(monotonic=lambda: now))
    pair = make_pair()
    with monkeypatch.context() as stalled:
        stalled.setattr(gather.share, "PROVING_S", 0.2)
        stalled.setattr(gather.ShareServer, "poll", lambda _: [])
        assert paths_of(pair.load()) == ["direct"]
    (one,) = pair.unmapped
    assert "proving a token to its owner: timed out" in one["detail"]
    now += gather.path.AGAIN_S - 1
    assert paths_of(pair.load(1)) == ["direct"]
    now += 1
    assert paths_of(pair.load(2)) == ["gather"]
    assert pair.unmapped == []


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_pair_in_which_one_side_shares_no_memory_says_the_cost(
    make_pair: Callable[..., Pair], who: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair(**{f"{who}_shares": False})
    assert paths_of(pair.load()) == ["direct"]
    (one,) = pair.unmapped
    assert one["endpoint"] == pair.prefill.ranks[0].description.endpoint
    reason = "share_dir is not set" if who == "decode" else "in another PID namespace"
    assert reason in one["detail"]
    assert "0.5 instead of 154 to 392 GB/s" in one["detail"]
    assert "set share_dir" in one["detail"]
    assert caplog.text.count("is on this host, but its GPU memory is not mapped") == 1
    pair.load(1)
    assert len(pair.unmapped) == 1


def test_a_decode_engine_that_shall_not_gather_says_the_cost(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair(path="direct")
    assert paths_of(pair.load()) == ["direct"]
    (one,) = pair.unmapped
    assert "path is 'direct'" in one["detail"]
    assert "0.5 instead of 154 to 392 GB/s" in one["detail"]
    assert one["detail"].endswith("set it to 'auto'")
