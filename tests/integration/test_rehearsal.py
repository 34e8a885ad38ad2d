"""Before its first peer an agent that is gone afterwards reads from another one."""

import logging

import numpy as np
import pytest

from nixl_kv.errors import TransportError
from nixl_kv.geometry.layout import Span
from nixl_kv.transport.nixl import UCX_ENGINE_CONFIG, NixlTransport


def test_a_rehearsal_reads_within_the_process_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = np.arange(4096, dtype=np.uint64).view(np.uint8)[:4096].copy()
    span = Span(memory.ctypes.data, memory.nbytes)
    transport, made = NixlTransport(engine_config=UCX_ENGINE_CONFIG), list[NixlTransport]()
    make = transport._make_another

    def note() -> NixlTransport:
        made.append(make())
        return made[-1]

    monkeypatch.setattr(transport, "_make_another", note)
    transport.register(span, "DRAM", 0)
    with caplog.at_level(logging.INFO, "nixl_kv"):
        transport.rehearse(span, "DRAM", 0)
    assert _said(caplog) == []
    assert np.array_equal(memory[2048:], memory[:2048]), "it was read"
    assert len(made) == 2
    for agent in made:
        with pytest.raises(TransportError, match="is closed"):
            agent.metadata()
    transport.close()


def test_a_rehearsal_that_fails_costs_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> NixlTransport:
        raise TransportError("no more agents")

    transport = NixlTransport(engine_config=UCX_ENGINE_CONFIG)
    monkeypatch.setattr(transport, "_make_another", refuse)
    with caplog.at_level(logging.INFO, "nixl_kv"):
        transport.rehearse(Span(4096, 4096), "DRAM", 0)
    (said,) = _said(caplog)
    assert said.endswith("the rehearsal failed: no more agents")
    transport.close()


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """By this project; NIXL logs each agent."""
    return [each.getMessage() for each in caplog.records if each.name.startswith("nixl_kv.")]
