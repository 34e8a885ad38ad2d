"""Which ranks map the memory of others, and let others map theirs."""

import dataclasses
import sys
from collections import defaultdict
from types import SimpleNamespace

import pytest

import nixl_kv
from harness.local.caches import Cache, Sizes
from nixl_kv.config import Config
from nixl_kv.geometry.layout import Memory
from nixl_kv.reading import gather
from nixl_kv.reading.paths import Feature, RankSetup
from support.stepped import Background


def built(memory: Memory, path: str) -> Feature:
    setup = RankSetup(
        layout=dataclasses.replace(Cache(Sizes()).layout(), memory=memory),
        config=Config(path=path),
        is_prefill=True,
        is_decode=True,
        wake=lambda: None,
        background=Background(),
        counts=defaultdict(float),
        clock=lambda: 0.0,
    )
    return gather.build(setup)


@pytest.fixture
def _gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with CUDA's bindings and Triton."""
    exported = SimpleNamespace(description="exported", close=lambda: None)
    kernel = SimpleNamespace(KernelStream=lambda _: SimpleNamespace(end=lambda: None))
    memory = SimpleNamespace(Exported=lambda *_: exported, Mapping=print)
    gpu = SimpleNamespace(allocate=lambda *_: (1 << 20, None))
    monkeypatch.setitem(sys.modules, "nixl_kv.gpu", gpu)
    monkeypatch.setattr(nixl_kv, "gpu", gpu, raising=False)
    monkeypatch.setitem(sys.modules, "nixl_kv.reading.kernel", kernel)
    monkeypatch.setitem(sys.modules, "nixl_kv.reading.gather.memory", memory)


@pytest.mark.usefixtures("_gpus")
@pytest.mark.parametrize("path", ["auto", "gather", "direct", "staged"])
def test_the_setting_says_who_maps_and_who_exports(path: str) -> None:
    feature = built("VRAM", path)
    assert (feature.path is not None) == (path in {"auto", "gather"})
    assert dict(feature.description) == ({} if path == "direct" else {"export": "exported"})
    if feature.path is not None:
        feature.path.close()


@pytest.mark.usefixtures("_gpus")
def test_host_memory_is_not_mapped() -> None:
    assert built("DRAM", "auto") == Feature()


def test_without_gpus_nothing_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_kv.reading.kernel", None)
    feature = built("VRAM", "auto")
    assert (feature.path, dict(feature.description)) == (None, {})
