"""What is said to go over TCP, and where a NIXL agent's metadata has its UCX address."""

from typing import Any

import pytest

from nixl_kv.errors import TransportError
from nixl_kv.geometry.layout import Memory
from nixl_kv.transport.tcp import ucx
from nixl_kv.transport.tcp.ucx import UcxTcpDetector, is_tcp, worker_address

METADATA = b"nixlSerDes|Agent\x01\0\0\0\0\0\0\0a|t\x03\0\0\0\0\0\0\0UCX|c\x05\0\0\0\0\0\0\0ab\0|c|"


@pytest.mark.parametrize(
    ("transports", "memory", "expected"),
    [
        pytest.param(["tcp"], "DRAM", True, id="nothing else"),
        pytest.param(["tcp", "tcp"], "VRAM", True, id="by two interfaces"),
        pytest.param(["tcp", "cma"], "DRAM", False, id="one host"),
        pytest.param(["tcp", "cma"], "VRAM", True, id="one host, and a GPU that is not shared"),
        pytest.param(["tcp", "cma", "cuda_ipc"], "VRAM", False, id="GPUs of one host"),
        pytest.param(["rc_mlx5", "tcp"], "VRAM", False, id="RDMA"),
        pytest.param([], "DRAM", True, id="nobody knows"),
    ],
)
def test_it_is_tcp_where_nothing_else_reads_such_memory(
    transports: list[str], memory: Memory, *, expected: bool
) -> None:
    assert is_tcp(transports, memory) is expected


def test_the_address_is_found_in_the_metadata() -> None:
    assert worker_address(METADATA) == b"ab\0|c"


@pytest.mark.parametrize(
    "metadata", [b"", METADATA.replace(b"UCX", b"UCY"), METADATA[:-3], METADATA[:-7]]
)
def test_metadata_without_an_address_is_refused(metadata: bytes) -> None:
    with pytest.raises(TransportError, match="no UCX address"):
        worker_address(metadata)


def test_who_cannot_be_asked_for_counts_as_tcp(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise TransportError("UCX is not loaded")

    monkeypatch.setattr(ucx, "_loaded_library", fail)
    links = UcxTcpDetector("")
    assert links.is_tcp(METADATA, "DRAM")
    assert "UCX is not loaded" in caplog.text
    links.close()
