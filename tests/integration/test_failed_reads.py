"""A read that NIXL fails keeps no agent alive: blocks go back on the proof that it is gone."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import nixl._api as api
import nixl._bindings as bindings
import numpy as np
import pytest

from harness.cluster.waiting import wait_until
from nixl_kv.errors import TransportError
from nixl_kv.geometry.layout import Span
from nixl_kv.transport.base import Transport
from nixl_kv.transport.nixl import NixlTransport

LENGTH = 4096


def plain() -> Transport:
    return NixlTransport()


def paced() -> Transport:
    module = pytest.importorskip("nixl_kv.transport.tcp.paced", exc_type=ImportError)
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
