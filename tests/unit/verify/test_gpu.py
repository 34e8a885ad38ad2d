"""The digest program for GPUs: its kernel, interpreted, and its stream.

That its sums are right for any two engines shows test_digest.py.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nixl_kv.errors import DigestError
from nixl_kv.geometry.layout import CacheLayout
from support.digest_caches import SECRET, Sizes, finished, layout_of, noise, slices_of, window

torch = pytest.importorskip("torch")
gpu = pytest.importorskip("nixl_kv.verify.gpu", exc_type=ImportError)

HERE = Path(__file__).parent
SIZES = Sizes(layers=2, blocks=8, heads=2)


@pytest.mark.slow
def test_the_kernel_has_the_sums_of_the_reference() -> None:
    """Triton interprets the kernel on CPU, in a process of its own."""
    files = [str(HERE / name) for name in ("interpreted_kernel.py", "test_digest.py")]
    made = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-m", "not slow", *files],
        env=os.environ | {"TRITON_INTERPRET": "1", "NIXL_KV_EXAMPLES": "5"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout


# --- on a stream of its own


class Memory(gpu.GpuDigester):  # type: ignore[misc,name-defined] # torch may be missing
    """A GpuDigester of this process's memory."""

    def _map(self, layout: CacheLayout) -> tuple[Any, int]:
        (span,) = layout.spans
        return torch.from_numpy(window(span.address, span.length)), span.address


@pytest.fixture
def layout(monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheLayout]:
    """The layout of this process's memory, digested as if it were a GPU's."""
    monkeypatch.setattr(gpu, "on", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", Mock())
    host = noise(SIZES.num_bytes)
    yield layout_of(host.ctypes.data, SIZES, "LBHNC")  # noqa: PT022 - `host` lives until then


def test_without_a_compiler_nothing_is_digested(
    layout: CacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = Mock(side_effect=RuntimeError("Failed to find C compiler.\nMore"))
    monkeypatch.setattr(gpu.KernelDigester, "_launch", fail)
    with pytest.raises(DigestError, match=r"RuntimeError: Failed to find C compiler\.$"):
        Memory(layout)


def test_no_step_waits_for_the_gpu(layout: CacheLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Mock()
    monkeypatch.setattr(gpu.KernelDigester, "_launch", launch)
    digester, slices = Memory(layout), slices_of(layout, 100)
    launch.reset_mock()
    is_done = digester._stream.record_event.return_value.query
    is_done.return_value = False
    steps = digester(SECRET, slices)
    next(steps)
    launch.assert_not_called()
    for _ in range(10):
        next(steps)
        launch.assert_called_once()
    is_done.return_value = True
    made = finished(steps)
    assert (len(made.rows), len(made.columns)) == (sum(one.num_heads for one in slices), 2)
    digester.close()
    digester._stream.synchronize.assert_called()


def test_an_error_of_torch_fails_that_digest(
    layout: CacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.KernelDigester, "_launch", Mock())
    digester, slices = Memory(layout), slices_of(layout, 100)
    with monkeypatch.context() as patched:
        fail = Mock(side_effect=torch.OutOfMemoryError("no memory"))
        patched.setattr(gpu.KernelDigester, "_launch", fail)
        with pytest.raises(DigestError, match="no memory"):
            finished(digester(SECRET, slices))
    finished(digester(SECRET, slices))


def test_a_cache_that_cannot_be_opened_is_told(
    layout: CacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Memory, "_map", Mock(side_effect=RuntimeError("no CUDA device 3")))
    with pytest.raises(DigestError, match="no CUDA device 3"):
        Memory(layout)
