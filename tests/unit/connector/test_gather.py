"""Where vLLM allocates the cache of an engine that shares it; tests/gpu has such engines."""

import contextlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from nixl_kv.connector import gather
from nixl_kv.connector.worker import Worker
from nixl_kv.errors import TransportError
from support.vllm_objects import kv_cache_config, vllm_config

pytestmark = pytest.mark.usefixtures("fabric", "one_rank")


class StubPool:
    """See `reading.gather.gpu.SharePool`."""

    def __init__(self, device: int) -> None:
        self.device = device

    def use(self) -> Any:
        return contextlib.nullcontext(self)


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: Any = ModuleType("nixl_kv.reading.gather.gpu")
    pools.SharePool = StubPool
    monkeypatch.setitem(sys.modules, "nixl_kv.reading.gather.gpu", pools)
    monkeypatch.setattr(gather.current_platform, "is_cuda", lambda: True)
    monkeypatch.setattr(gather.torch.cuda, "current_device", lambda: 3)


def pool_of(
    monkeypatch: pytest.MonkeyPatch,
    share_dir: Path | None,
    role: str = "kv_producer",
    path: str = "auto",
    **model: Any,
) -> StubPool | None:
    extra = {"path": path} | ({} if share_dir is None else {"share_dir": str(share_dir)})
    config = vllm_config(extra, kv_role=role)
    for name, value in model.items():
        monkeypatch.setattr(config.model_config, name, value, raising=False)
    context = Worker(config, kv_cache_config()).get_mem_pool_context()
    if context is None:
        return None
    with context as pool:
        assert isinstance(pool, StubPool)  # type: ignore[unreachable]
        return pool  # type: ignore[unreachable]


@pytest.mark.usefixtures("_gpu")
def test_a_prefill_engine_that_shares_has_a_pool_unless_vllm_has_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    pool = pool_of(monkeypatch, tmp_path)
    assert pool is not None
    assert pool.device == 3
    assert pool_of(monkeypatch, tmp_path, "kv_both") is not None
    assert pool_of(monkeypatch, None) is None
    assert pool_of(monkeypatch, tmp_path, "kv_consumer") is None
    assert pool_of(monkeypatch, tmp_path, path="direct") is None, "it would export nothing"
    assert pool_of(monkeypatch, tmp_path, enable_cumem_allocator=True) is None
    monkeypatch.setattr(gather.current_platform, "is_cuda", lambda: False)
    assert pool_of(monkeypatch, tmp_path) is None


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("error", [ImportError("No module named 'cuda'"), TransportError("no")])
def test_without_a_pool_vllm_allocates_the_cache(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    """With torch's expandable segments, whose pieces can be shared too."""
    tmp_path.chmod(0o700)
    caplog.set_level("INFO")
    monkeypatch.setattr(StubPool, "__init__", Mock(side_effect=error))
    assert pool_of(monkeypatch, tmp_path) is None
    assert str(error) in caplog.text
