"""NIXL agents that are gone afterwards: although a read has failed, and after a rehearsal."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import nixl._api as api
import nixl._bindings as bindings
import numpy as np
import pytest

from harness.cluster.waiting import wait_until
from nixl_kv.errors import TransportError
from nixl_kv.geometry.layout import Span
from nixl_kv.transport.base import Transport
from nixl_kv.transport.nixl import UCX_ENGINE_CONFIG, NixlTransport

LENGTH = 4096


def plain() -> Transport:
    return NixlTransport()


def paced() -> Transport:
    module = pytest.importorskip("nixl_kv.transport.ucx.paced", exc_type=ImportError)
    made: Transport = module.PacedTransport(
        plain(), plain, lambda _metadata: True, ThreadPoolExecutor(1)
    )
    return made


@pytest.mark.nixl
@pytest.mark.parametrize("call", ["transfer", "check_xfer_state"])
@pytest.mark.parametrize("make", [plain, paced])
def test_an_agent_ends_although_a_read_of_it_has_failed(
    make: Callable[[], Transport], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_agent: object, *_: Any) -> None:
        raise bindings.nixlBackendError("planted")

    memory = [np.zeros(LENGTH, np.uint8) for _ in range(2)]
    owner, reader = plain(), make()
    for transport, array in zip((owner, reader), memory, strict=True):
        transport.register(Span(array.ctypes.data, LENGTH), "DRAM", 0)
    peer = reader.add_peer(owner.metadata())
    remote, local = (
        reader.prepare(np.array([[a.ctypes.data, LENGTH, 0, LENGTH, 1]], np.uint64), "DRAM", name)
        for a, name in zip(memory, (peer, None), strict=True)
    )
    piece = np.zeros(1, np.int32)
    monkeypatch.setattr(api.nixl_agent, call, fail)
    read = reader.read(local, remote, (piece, piece))
    with pytest.raises(TransportError, match="planted"):
        wait_until(partial(reader.poll, read), 60)
    monkeypatch.undo()
    reader.close()  # says if something refers to an agent
    owner.close()
    assert read is not None  # until now


def test_a_rehearsal_reads_within_the_process_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = np.arange(4096, dtype=np.uint64).view(np.uint8)[:4096].copy()
    span = Span(memory.ctypes.data, memory.nbytes)
    transport = NixlTransport(engine_config=UCX_ENGINE_CONFIG)
    made = [transport._make_another() for _ in range(2)]
    monkeypatch.setattr(transport, "_make_another", mock.Mock(side_effect=made))
    transport.register(span, "DRAM", 0)
    with caplog.at_level(logging.INFO, "nixl_kv"):
        transport.rehearse(span, "DRAM", 0)
    assert _said(caplog) == []
    assert np.array_equal(memory[2048:], memory[:2048]), "it was read"
    for agent in made:  # both were used, and closed
        with pytest.raises(TransportError, match="is closed"):
            agent.metadata()
    transport.close()


def test_a_rehearsal_that_fails_costs_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transport = NixlTransport(engine_config=UCX_ENGINE_CONFIG)
    refuse = mock.Mock(side_effect=TransportError("no more agents"))
    monkeypatch.setattr(transport, "_make_another", refuse)
    with caplog.at_level(logging.INFO, "nixl_kv"):
        transport.rehearse(Span(4096, 4096), "DRAM", 0)
    (said,) = _said(caplog)
    assert said.endswith("the rehearsal failed: no more agents")
    transport.close()


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Our own messages; NIXL logs each agent."""
    return [each.getMessage() for each in caplog.records if each.name.startswith("nixl_kv.")]
