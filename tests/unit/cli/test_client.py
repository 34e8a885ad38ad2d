"""Parsing and resolving the address of a running engine."""

import socket

import pytest

from nixl_kv.cli.client import endpoints_at
from support.nixl_kv_command import nixl_kv


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        pytest.param("10.0.0.1:5600", "10.0.0.1", 5600, id="IPv4"),
        pytest.param("[fd00::1]:5600", "fd00::1", 5600, id="IPv6"),
        pytest.param("prefill-0.example:1", "prefill-0.example", 1, id="name"),
    ],
)
def test_address_is_host_and_port(
    text: str, host: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name may resolve to several addresses, and to one address several times."""
    asked: list[object] = []

    def getaddrinfo(*question: object, **_: object) -> list[tuple[object, ...]]:
        asked.append(question)
        return [(None, None, None, "", (ip, 0)) for ip in ("10.0.0.1", "fd00::1", "10.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    endpoints = endpoints_at(text, option="--at")
    assert asked == [(host, port)]
    assert endpoints == [f"tcp://10.0.0.1:{port}", f"tcp://[fd00::1]:{port}"]


@pytest.mark.parametrize(
    "text",
    ["localhost", ":5600", "localhost:port", "localhost:0", "localhost:99999", "tcp://10.0.0.1:56"],
)
def test_a_malformed_address_exits_2(text: str) -> None:
    for command, option in (("plan --decode-at 127.0.0.1:1", "--prefill-at"), ("status", "--at")):
        result = nixl_kv(command, f"{option} {text}")
        assert result.exit_code == 2
        assert result.stderr == f"error: {option} is {text!r}; allowed: HOST:PORT\n"


def test_unknown_host_exits_2() -> None:
    result = nixl_kv("status --at no.such.host.invalid:5600")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --at no.such.host.invalid:5600: no.such.host.invalid: ")


@pytest.mark.parametrize(
    "command", ["status --at [::1]:1", "plan --prefill-at a:1 --decode-at b:1"]
)
def test_a_key_file_that_is_missing_exits_2(command: str) -> None:
    result = nixl_kv(f"{command} --key-file nowhere")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: key_file is 'nowhere': No such file")
