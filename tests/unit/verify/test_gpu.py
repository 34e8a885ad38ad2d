"""The programs for GPUs, on tensors of this process: in chunks, as a kernel, and on a stream.

That its sums are right for any two engines shows test_digest.py.
"""

import contextlib
import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from nixl_kv.errors import DigestError
from nixl_kv.geometry.layout import ALL_TOKENS, CacheLayout, Stripe
from nixl_kv.verify.digest import Digest
from nixl_kv.verify.slices import LocalSlice
from support.digest_caches import (
    SECRET,
    Sizes,
    finished,
    hybrid_layout,
    hybrid_slices,
    is_equal,
    layout_of,
    reference,
    slices_of,
    window,
    with_opaque_layer,
)

torch = pytest.importorskip("torch")
gpu = pytest.importorskip("nixl_kv.verify.gpu", exc_type=ImportError)

REPO = Path(__file__).resolve().parents[3]

KINDS = (
    Sizes(layers=2, blocks=8, heads=2),
    Sizes(layers=2, blocks=8, heads=1, parts=(1152,)),
    Sizes(layers=1, blocks=8, heads=1, parts=(1154,)),
    Sizes(layers=2, blocks=8, heads=2, parts=(127, 64)),
    Sizes(layers=2, blocks=130, heads=2, tokens=1, parts=(4, 12)),
    Sizes(layers=1, blocks=3, heads=1, tokens=43, parts=(8192, 16388)),
)


class Calls:
    """Records rows, tokens and units of each call of the array program."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[tuple[int, int, int]] = []
        self._program = gpu.gathered_sums
        monkeypatch.setattr(gpu, "gathered_sums", self)

    def __call__(self, shape: Any, *tensors: Any) -> Any:
        rows, tokens, units = map(len, tensors[1:4])
        self.sizes.append((rows, tokens, units))
        return self._program(shape, *tensors)


def digester_of(layout: CacheLayout) -> Any:
    """A digester of the memory that the layout describes."""
    (span,) = layout.spans
    tensor = torch.from_numpy(window(span.address, -(-span.length // 4) * 4))
    return gpu.TorchDigester(tensor, span.address, layout.groups)


def digest(digester: Any, slices: Sequence[LocalSlice]) -> Digest:
    *_, sums = digester.launch(SECRET, slices)
    return Digest(*(one.numpy().view(np.uint64) for one in sums))


def noise(num_bytes: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, num_bytes + 4, dtype=np.uint8)


@pytest.mark.parametrize("sizes", KINDS, ids=str)
@pytest.mark.parametrize("limit", [1 << 21, 1 << 12], ids=["usual", "many chunks"])
def test_the_sums_are_those_of_the_reference(
    sizes: Sizes, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers may end at different tokens."""
    monkeypatch.setattr(gpu, "MAX_EAGER_UNITS", limit)
    calls = Calls(monkeypatch)
    for order in ("LBHNC", "BLNHC"):
        host = noise(sizes.num_bytes)
        layout = with_opaque_layer(layout_of(host.ctypes.data, sizes, order))
        digester = digester_of(layout)
        for end, begin in ((127, 0), (65, 64), (1, 0)):
            slices = slices_of(layout, end, begin)
            assert is_equal(digest(digester, slices), reference(slices))
    assert all(math.prod(call) <= max(limit, call[2]) for call in calls.sizes)


@pytest.mark.slow
def test_the_kernel_has_the_same_sums() -> None:
    """Triton interprets the kernel on CPU, in a process of its own."""
    path = os.pathsep.join([str(REPO), str(REPO / "tests")])
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    made = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.count("right") == 3 * 4


def interpret() -> None:
    for sizes in (*KINDS[:2], Sizes(layers=1, blocks=8, heads=1, parts=(656,))):
        for order in ("LBHNC", "BHLNC"):
            host = noise(sizes.num_bytes)
            for stripe in (ALL_TOKENS, Stripe(2, 1, 4)):
                layout = layout_of(host.ctypes.data, sizes, order, stripe=stripe)
                digester = digester_of(layout)
                digester.compile()
                assert digester._compiled
                for end, begin in ((127, 0), (65, 64), (1, 0)):
                    slices = slices_of(layout, end, begin)
                    assert is_equal(digest(digester, slices), reference(slices))
                print(f"{sizes.parts} {order}: right")


@pytest.mark.parametrize("end", [1, 64, 127])
def test_states_are_digested_beside_kv(end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program takes few rows at a time, because one token of a state is long."""
    (span,) = hybrid_layout(4).spans
    host = noise(span.length)
    slices = hybrid_slices(hybrid_layout(host.ctypes.data), end)
    monkeypatch.setattr(gpu, "MAX_EAGER_UNITS", 1 << 14)
    calls = Calls(monkeypatch)
    digester = digester_of(hybrid_layout(host.ctypes.data))
    assert is_equal(digest(digester, slices), reference(slices))
    assert is_equal(digest(digester, slices[5:-1]), reference(slices[5:-1]))
    assert max(map(math.prod, calls.sizes)) <= 1 << 14


def test_long_columns_are_summed() -> None:
    """In a long prompt a column has more than 64 tokens."""
    sizes = Sizes(layers=1, heads=1, blocks=64, tokens=8192, parts=(8,))
    host = noise(sizes.num_bytes)
    layout = layout_of(host.ctypes.data, sizes, "LBHNC")
    slices = slices_of(layout, 64 * 8192 - 5, 100)
    made = digest(digester_of(layout), slices)
    assert is_equal(made, reference(slices))
    assert len(made.columns) == 4096


# --- on a stream of its own


class Memory(gpu.GpuDigester):  # type: ignore[misc,name-defined] # torch may be missing
    """A GpuDigester of this process's memory."""

    def _map(self, layout: CacheLayout) -> tuple[Any, int]:
        (span,) = layout.spans
        return torch.from_numpy(window(span.address, span.length)), span.address


@pytest.fixture
def layout(monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheLayout]:
    """Of this process's memory, digested as if it were a GPU's."""
    monkeypatch.setattr(gpu, "on", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", Mock())
    host = noise(KINDS[0].num_bytes)
    yield layout_of(host.ctypes.data, KINDS[0], "LBHNC")  # noqa: PT022 - `host` lives until then


def test_without_a_compiler_the_array_program_digests(
    layout: CacheLayout, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail = Mock(side_effect=RuntimeError("Failed to find C compiler.\nMore"))
    monkeypatch.setattr(gpu.TorchDigester, "compile", fail)
    with caplog.at_level(logging.WARNING, logger="nixl_kv"):
        digester = Memory(layout)
    assert "Failed to find C compiler." in caplog.text
    slices = slices_of(layout, 100)
    assert is_equal(finished(digester(SECRET, slices)), reference(slices))
    digester.close()
    digester._stream.synchronize.assert_called()


def test_a_step_launches_one_chunk_and_none_waits_for_the_gpu(
    layout: CacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.TorchDigester, "compile", lambda _: None)
    monkeypatch.setattr(gpu, "MAX_EAGER_UNITS", 1 << 11)
    calls = Calls(monkeypatch)
    digester, slices = Memory(layout), slices_of(layout, 100)
    is_done = digester._stream.record_event.return_value.query
    is_done.return_value = False
    steps = digester(SECRET, slices)
    for number in range(40):
        next(steps)
        assert len(calls.sizes) <= number + 1
    assert 10 < len(calls.sizes) < 40
    is_done.return_value = True
    assert is_equal(finished(steps), reference(slices))


def test_an_error_of_torch_fails_that_digest(
    layout: CacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.TorchDigester, "compile", lambda _: None)
    digester, slices = Memory(layout), slices_of(layout, 100)
    with monkeypatch.context() as patched:
        fail = Mock(side_effect=torch.OutOfMemoryError("no memory"))
        patched.setattr(gpu, "gathered_sums", fail)
        with pytest.raises(DigestError, match="no memory"):
            finished(digester(SECRET, slices))
    assert is_equal(finished(digester(SECRET, slices)), reference(slices))


def test_a_cache_that_cannot_be_opened_leaves_no_thread(layout: CacheLayout) -> None:
    class Refused(Memory):
        def _map(self, layout: CacheLayout) -> tuple[Any, int]:
            raise RuntimeError(f"no CUDA device {layout.device}")

    before = threading.active_count()
    with pytest.raises(DigestError, match="no CUDA"):
        Refused(layout)
    assert threading.active_count() == before


if __name__ == "__main__":
    interpret()
