"""The order in which `on` enters and leaves a GPU and its stream; tests/gpu uses real GPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from nixl_kv.gpu import on  # noqa: E402


def test_the_gpu_is_entered_before_its_stream_and_left_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the other order, leaving the stream would make a context on the thread's own GPU."""
    seen: list[tuple[str, object]] = []

    @contextmanager
    def noting(kind: str, what: object) -> Iterator[None]:
        seen.append((f"into {kind}", what))
        yield
        seen.append((f"out of {kind}", what))

    for kind in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, kind, partial(noting, kind))
    stream: Any = SimpleNamespace(device="cuda:1")
    with on(stream):
        assert seen == [("into device", "cuda:1"), ("into stream", stream)]
    assert seen[2:] == [("out of stream", stream), ("out of device", "cuda:1")]
