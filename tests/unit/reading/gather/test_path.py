"""Mapped memory of another process: how it is read, and when it is unmapped."""

import dataclasses
import os
import select
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from msgspec.structs import replace

import nixl_kv
from harness.local.caches import Cache, Sizes
from nixl_kv.config import Config
from nixl_kv.errors import TransportError
from nixl_kv.geometry.layout import Memory
from nixl_kv.protocol.events import DataEvent, ReadDone
from nixl_kv.protocol.messages import Export, Share
from nixl_kv.reading import gather
from nixl_kv.reading.gather import path as path_module
from nixl_kv.reading.gather.path import ADVICE, SLOW, GatherPath, UnmappedPath
from nixl_kv.reading.paths import PathFeature
from support.agent_reading import Reading
from support.memory_gather import MemoryGather
from support.records import EXPORT, PEER
from support.stepped import rank_setup

SLOT_BYTES = 16  # of the fence slot, which NIXL reads


class Gathering(Reading):
    """Prefill's memory is mapped."""

    def __init__(self) -> None:
        self.gather = MemoryGather()
        super().__init__([self.gather.path])

    def read(self) -> list[DataEvent]:
        """The end of a read; its slot takes one more poll than its data."""
        ended = self.start([2, 9], [7, 3], range(8))
        while not any(isinstance(event, ReadDone) for event in ended):
            ended = self.agent.poll()
        return ended


def test_mapped_memory_is_read_without_nixl() -> None:
    reading = Gathering()
    reading.gather.polls = 2
    before = reading.cache.view.copy()
    assert reading.start([2, 9], [7, 3], range(8)) == []
    assert reading.agent.poll() == []
    assert np.array_equal(reading.cache.view, before)
    reading.agent.poll()  # the data has landed, and the slot is read
    (event,) = reading.agent.poll()
    assert isinstance(event, ReadDone)
    assert (event.path, event.num_bytes) == ("gather", reading.cache.blocks([0, 0]).nbytes)
    expected = reading.prefill.cache.blocks([7, 3])
    assert np.array_equal(reading.cache.blocks([2, 9]), expected)
    assert reading.fabric.bytes_copied == SLOT_BYTES


def test_memory_whose_owner_has_ended_is_unmapped_when_nothing_reads_it() -> None:
    """It would stay allocated, and the owner's next life would lack it."""
    reading = Gathering()
    reading.gather.polls = 3
    reading.start([2, 9], [7, 3], range(8))
    reading.gather.end_owners()
    assert reading.agent.poll() == []
    assert len(reading.gather.mapped) == 1
    while not reading.agent.poll():
        assert len(reading.gather.mapped) == 1
    while reading.agent.reads:
        reading.agent.poll()
    reading.agent.poll()
    assert reading.gather.mapped == []
    (event,) = reading.read()
    assert isinstance(event, ReadDone)
    assert event.path == "direct"


def test_memory_is_unmapped_while_nixl_adds_a_rank() -> None:
    """Adding may take long, and until then the end of the owner would keep the thread awake."""
    reading = Gathering()
    reading.agent.ranks.adding = Future()
    reading.gather.end_owners()
    assert reading.agent.poll() == []
    assert reading.gather.mapped == []


class HastyOwners:
    """See `select.epoll`. The transfer thread takes its turn right after each registration."""

    def __init__(self, path: GatherPath) -> None:
        self._path, self._owners = path, path._owners
        self.poll, self.modify = self._owners.poll, self._owners.modify

    def register(self, owner: int, events: int) -> None:
        self._owners.register(owner, events)
        self._path.tidy()


def test_an_end_is_not_lost_while_the_memory_is_being_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would stay allocated until decode forgets the peer."""
    reading = Gathering()
    (path,) = (one for one in reading.peers.paths if isinstance(one, GatherPath))
    reading.agent.ranks.drop(PEER)
    owners = path._owners

    def read_and_end(address: int) -> bytes:
        reading.gather.end_owners()
        assert address == EXPORT.proof.address
        return EXPORT.proof.value

    with monkeypatch.context() as patched:
        patched.setattr(reading.gather, "read_16", read_and_end)
        patched.setattr(path, "_owners", HastyOwners(path))
        reading.prepare()
    assert len(reading.gather.mapped) == 1
    assert select.select([owners], [], [], 0)[0], "nothing wakes the transfer thread"
    path.tidy()
    assert reading.gather.mapped == []


def test_a_read_that_starts_before_the_mapping_is_closed_uses_nixl() -> None:
    """The next poll closes it. Until then the memory may have another owner."""
    reading = Gathering()
    reading.gather.end_owners()
    (event,) = reading.read()
    assert isinstance(event, ReadDone)
    assert event.path == "direct"


def test_a_dropped_peer_is_unmapped_with_the_last_read_that_uses_the_mapping() -> None:
    """Other reads of the peer may never pause, and each new mapping would come on top."""
    reading = Gathering()
    reading.gather.polls = 3
    reading.start([2, 9], [7, 3], range(8))
    reading.fabric.reads_hang = True
    assert reading.read_slot(3) == []
    reading.agent.ranks.drop(PEER)
    ended: list[DataEvent] = []
    while not ended:
        reading.agent.ranks.begin_next()
        assert len(reading.gather.mapped) == 1
        ended = reading.agent.poll()
    reading.agent.ranks.begin_next()
    assert reading.gather.mapped == []
    assert reading.agent.is_reading(reading.prefill.transport.name)


def test_an_agent_ends_once_no_kernel_writes() -> None:
    reading = Gathering()
    reading.read()
    reading.gather.polls = 3
    reading.start([2, 9], [7, 3], range(8))
    reading.agent.close()
    assert reading.gather.num_waits == 1
    assert reading.gather.mapped == []
    assert reading.fabric.transports.keys() == {reading.prefill.transport.name}


# Which ranks map the memory of others

REFUSED = TransportError("CUDA_ERROR_INVALID_VALUE")
OF_HOST = "on this rank: its KV cache is in host memory, and only GPU memory is shared"
UNSHARED = "cannot be shared in share_dir, so other containers do not map it: CUDA_ERROR"
SHARED = {"export": "shared"}
EXPORTED = {"export": "exported"}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands in for CUDA's bindings, beside Triton's module."""
    memory, gpu = Mock(), Mock()
    memory.Exported.return_value.description = "exported"
    memory.Shared.return_value.description = "shared"
    gpu.allocate.return_value = (1 << 20, None)
    monkeypatch.setitem(sys.modules, "nixl_kv.gpu", gpu)
    monkeypatch.setattr(nixl_kv, "gpu", gpu, raising=False)
    monkeypatch.setitem(sys.modules, "nixl_kv.reading.kernel", Mock())
    monkeypatch.setitem(sys.modules, "nixl_kv.reading.gather.memory", memory)
    return memory


def built(where: Memory, path: str, role: str, share_dir: Path | None) -> PathFeature:
    setup = rank_setup(
        Config(path=path, share_dir=None if share_dir is None else str(share_dir)),
        layout=dataclasses.replace(Cache(Sizes()).layout(), memory=where),
        is_prefill="prefill" in role,
        is_decode="decode" in role,
    )
    return gather.build(setup)


@pytest.mark.parametrize(
    ("where", "path", "role", "shares", "maps", "description", "told"),
    [
        ("VRAM", "auto", "prefill and decode", False, True, EXPORTED, ""),
        ("VRAM", "gather", "prefill and decode", False, True, EXPORTED, ""),
        ("VRAM", "direct", "prefill and decode", False, False, {}, ""),
        ("VRAM", "staged", "prefill and decode", False, False, EXPORTED, ""),
        ("VRAM", "auto", "prefill and decode", True, True, SHARED, ""),
        ("VRAM", "staged", "prefill", True, False, SHARED, ""),
        ("VRAM", "gather", "decode", True, True, {}, ""),
        ("VRAM", "direct", "prefill", True, False, {}, "on this rank: path is 'direct'"),
        ("VRAM", "staged", "decode", True, False, {}, "on this rank: path is 'staged'"),
        ("DRAM", "auto", "prefill and decode", False, False, {}, ""),
        ("DRAM", "auto", "prefill", True, False, {}, OF_HOST),
        ("DRAM", "auto", "decode", True, False, {}, OF_HOST),
    ],
)
def test_settings_say_which_ranks_map_and_export_and_if_share_dir_has_no_effect(
    memory: Mock,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    *,
    where: Memory,
    path: str,
    role: str,
    shares: bool,
    maps: bool,
    description: dict[str, str],
    told: str,
) -> None:
    feature = built(where, path, role, tmp_path if shares else None)
    assert isinstance(feature.path, GatherPath) == maps
    assert dict(feature.description) == description
    assert (feature.worker is not None) == (description == SHARED)
    assert memory.Shared.called == (description == SHARED)
    assert len(caplog.messages) == bool(told)
    assert told in caplog.text
    if feature.path is not None:
        feature.path.close()


@pytest.mark.parametrize(
    ("exported", "description", "told"),
    [
        (Mock(description="exported"), EXPORTED, UNSHARED),
        (REFUSED, {}, "0.5 instead of 154 to 392 GB/s"),
    ],
)
def test_memory_that_cannot_be_shared_is_exported_if_it_can_be(
    memory: Mock,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    exported: Any,
    description: dict[str, str],
    told: str,
) -> None:
    """Prefill's log has the reason and the cost."""
    memory.Shared.side_effect, memory.Exported.side_effect = REFUSED, [Mock(), exported]
    feature = built("VRAM", "auto", "prefill and decode", tmp_path)
    assert (dict(feature.description), feature.worker) == (description, None)
    assert told in caplog.text
    assert feature.path is not None
    feature.path.close()


@pytest.mark.usefixtures("memory")
def test_without_gpus_nothing_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_kv.reading.gather.memory", None)
    feature = built("VRAM", "auto", "prefill and decode", None)
    assert not isinstance(feature.path, GatherPath)
    assert dict(feature.description) == {}


# Which ranks of this host are read without a kernel

OTHER_HOST = replace(EXPORT, host="another-boot pid:[1]")
WITHOUT_HANDLES = replace(
    EXPORT, allocations=tuple(replace(one, handle=b"") for one in EXPORT.allocations)
)


@pytest.mark.parametrize(
    ("export", "why", "expected"),
    [
        (None, "", ""),
        (OTHER_HOST, "", ""),
        (EXPORT, "", f"its GPU memory is not mapped: process 1 is not seen here; {ADVICE}"),
        (
            WITHOUT_HANDLES,
            "",
            f"its GPU memory is not mapped: process 1 is not seen here; {SLOW}; {ADVICE}",
        ),
        (EXPORT, "path is 'direct'", ""),
        (WITHOUT_HANDLES, "path is 'direct'", "its GPU memory is not mapped: path is 'direct'; "),
        (OTHER_HOST, "path is 'direct'", ""),
    ],
)
def test_a_rank_of_this_host_that_is_not_mapped_is_told(
    caplog: pytest.LogCaptureFixture, export: Export | None, why: str, expected: str
) -> None:
    """NIXL reads plain memory fast enough, if someone wants that."""
    path: Any = UnmappedPath(why, "do it") if why else MemoryGather(is_able=False).path
    rank: Any = SimpleNamespace(export=export, endpoint="tcp://10.0.0.1:5601")
    prepared = [path.prepare(rank, None, None) for _ in range(2)]
    told = [detail for _, detail in path.unmapped]
    assert [detail.startswith(expected) for detail in told] == ([True, True] if expected else [])
    assert caplog.text.count("is on this host, but") == bool(expected)
    for each in prepared:
        assert path.start(each, None) is None
        if each is not None:
            each.release()
            each.release()
    assert path.unmapped == []


def test_a_process_without_proc_reads_with_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other end of a plan fails the transfer thread, and all loads."""
    monkeypatch.setattr(path_module, "boot_id", Mock(side_effect=FileNotFoundError(2, "boot_id")))
    (event,) = Gathering().read()
    assert isinstance(event, ReadDone)
    assert event.path == "direct"


def test_only_a_rank_whose_socket_is_here_is_asked_for_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host's directory has other sockets."""
    shared = replace(EXPORT, share=Share(socket="0123456789abcdef"))
    stream: Any = None
    paths = [
        GatherPath(stream, Mock(), lambda _: None, directory) for directory in (None, str(tmp_path))
    ]

    def wanted(export: Export | None) -> list[bool]:
        rank: Any = SimpleNamespace(export=export)
        return [path.wants_token(rank) for path in paths]

    assert wanted(None) == wanted(EXPORT) == wanted(shared) == [False, False]
    (tmp_path / "0123456789abcdef").touch()
    assert wanted(shared) == [False, True]
    # The transfer thread asks, so an error would fail all loads.
    monkeypatch.setattr(os, "stat", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert wanted(shared) == [False, False]
