"""UCX's ports: which sockets are UCX's, and which hosts they admit."""

import contextlib
import ipaddress
import os
import pwd
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from nixl_kv.transport import ports as filters
from nixl_kv.transport.ucx import ports as module
from nixl_kv.transport.ucx.ports import UcxPorts
from support.ports import connects, passes

STRANGER, FRIEND = "127.0.0.2", "127.0.0.3"
"""Addresses of this machine that stand for other machines."""


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The addresses of the sockets that get a filter."""
    places: list[tuple[str, int]] = []
    monkeypatch.setattr(module, "attach", lambda one, _: places.append(one.getsockname()))
    return places


@pytest.fixture
def only_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """All addresses of this machine but one are those of other machines."""
    monkeypatch.setattr(module, "LOOPBACK", (ipaddress.ip_network("127.0.0.1/32"),))


@contextlib.contextmanager
def like_ucx(*, inheritable: bool = True, by_number: bool = True) -> Iterator[socket.socket]:
    """A listening socket as UCX opens it, unless said otherwise; it stays one."""
    with socket.create_server(("127.0.0.1", 0)) as one, select.epoll() as epoll:
        os.set_inheritable(one.fileno(), inheritable)
        one.settimeout(0)
        if by_number:
            epoll.register(one.fileno(), select.EPOLLIN)
        yield one
        assert not os.get_blocking(one.fileno()), "UCX's thread would wait for a connection"


@contextlib.contextmanager
def guarded() -> Iterator[tuple[UcxPorts, socket.socket]]:
    """The ports, and a socket that UCX has opened under their guard."""
    ports = UcxPorts()
    with contextlib.ExitStack() as stack:
        with ports.guard():
            ucx = stack.enter_context(like_ucx())
        yield ports, ucx


@contextlib.contextmanager
def unaccepted() -> Iterator[tuple[UcxPorts, socket.socket, socket.socket]]:
    """The ports, UCX's socket, and an admitted stranger's connection that UCX has not accepted."""
    with guarded() as (ports, ucx):
        assert ports.admit([STRANGER])
        connection = connects(STRANGER, ucx.getsockname()[1])
        assert connection is not None
        with connection:
            select.select([ucx], [], [], 5.0)
            yield ports, ucx, connection


def test_only_sockets_like_ucx_s_are_filtered(attached: list[tuple[str, int]]) -> None:
    """Not those that were there, nor others' that come meanwhile."""
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        keep(like_ucx())
        with UcxPorts().guard():
            keep(like_ucx(inheritable=False))  # asyncio's, uvicorn's
            keep(like_ucx(by_number=False))  # NCCL's, PyTorch's
            keep(socket.create_server(("127.0.0.1", 0)))  # ZMQ's
            local = keep(socket.socket(socket.AF_UNIX))
            local.bind(b"\0nixl_kv test_ports")
            local.listen()
            os.set_inheritable(local.fileno(), True)  # noqa: FBT003
            keep(select.epoll()).register(local.fileno(), select.EPOLLIN)
            ucx = keep(like_ucx())
        assert attached == [ucx.getsockname()]


def test_a_socket_that_another_thread_closes_meanwhile_keeps_no_other_one_open(
    monkeypatch: pytest.MonkeyPatch, attached: list[tuple[str, int]]
) -> None:
    """Agents that check a rank do this, and agents that are made at the same time."""
    found = module._watched_by_number
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        with UcxPorts().guard():
            gone, ucx = keep(socket.create_server(("127.0.0.1", 0))), keep(like_ucx())

            def watched() -> set[int]:
                numbers = {*found(), gone.fileno()}
                gone.close()
                return numbers

            monkeypatch.setattr(module, "_watched_by_number", watched)
        assert attached == [ucx.getsockname()]


@pytest.mark.usefixtures("only_one_address")
def test_a_host_connects_while_it_is_admitted_and_not_before_or_afterwards() -> None:
    """Nor does a connection stay that it has made meanwhile; another host's does."""
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        ports, ucx = keep(guarded())
        port = ucx.getsockname()[1]

        def accepted(source: str) -> tuple[socket.socket, socket.socket] | None:
            connection = connects(source, port)
            if connection is None:
                return None
            select.select([ucx], [], [], 5.0)
            return keep(connection), keep(ucx.accept()[0])

        assert accepted(STRANGER) is accepted(FRIEND) is None
        own = accepted("127.0.0.1")
        assert ports.admit([FRIEND])
        friend = accepted(FRIEND)
        assert accepted(STRANGER) is None
        assert own is not None
        assert friend is not None
        assert ports.admit([STRANGER])
        assert accepted(FRIEND) is None
        assert accepted(STRANGER) is not None
        friend[0].settimeout(5.0)
        assert friend[0].recv(1) == b"", "its connection is cut"
        own[1].sendall(b"x")
        assert own[0].recv(1) == b"x"
        assert ports.admit([])
        assert accepted(STRANGER) is None


@pytest.mark.usefixtures("only_one_address")
def test_a_connection_is_cut_that_ucx_accepts_after_its_host_may_no_longer_connect() -> None:
    """The kernel has made it before, and it keeps the filter that admitted it."""
    with unaccepted() as (ports, ucx, connection):
        assert ports.admit([])
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):  # it waits, beyond some looks
            connection.recv(1)
        with ucx.accept()[0]:
            connection.settimeout(30.0)
            assert connection.recv(1) == b""


@pytest.mark.usefixtures("only_one_address")
def test_connections_that_are_never_accepted_are_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "ACCEPT_S", 0.1)
    with unaccepted() as (ports, _, _):
        ports._cut_off()
    assert "1 connections have waited" in caplog.text


def test_sockets_that_come_later_admit_the_same_hosts_and_closed_ones_are_forgotten() -> None:
    with contextlib.ExitStack() as stack:
        ports, first = stack.enter_context(guarded())
        filters: list[tuple[int, bytes]] = []
        stack.enter_context(
            patch.object(module, "attach", lambda one, code: filters.append((one.fileno(), code)))
        )
        ports.admit(["192.0.2.7"])
        assert len(filters) == 1
        with ports.guard():
            stack.enter_context(like_ucx())
        with socket.socket() as other:
            os.dup2(other.fileno(), first.fileno(), inheritable=False)
            first.setblocking(False)  # noqa: FBT003 - `like_ucx` checks that
        assert {code for _, code in filters} == {filters[0][1]}
        assert passes(filters[0][1], ipaddress.ip_address("192.0.2.7"))
        filters.clear()
        ports.admit([])
        assert len(filters) == 1


def test_a_filter_is_the_latest_also_if_it_changes_while_an_agent_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The transfer thread admits a host while another thread attaches the former filter."""
    ports, codes = UcxPorts(), list[bytes]()

    def attach_slowly(_: socket.socket, code: bytes) -> None:
        if not codes:
            codes.append(b"")
            ports.admit(["192.0.2.7"])
        codes.append(code)

    monkeypatch.setattr(module, "attach", attach_slowly)
    with contextlib.ExitStack() as stack, ports.guard():
        stack.enter_context(like_ucx())
    assert passes(codes[-1], ipaddress.ip_address("192.0.2.7"))


def test_a_descriptor_that_is_another_socket_by_now_is_left_alone(
    attached: list[tuple[str, int]],
) -> None:
    with guarded() as (ports, ucx), socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0)
        os.dup2(other.fileno(), ucx.fileno())
        attached.clear()
        assert ports.admit(["192.0.2.7"])
        assert attached == []


def test_bytes_sent_before_the_filter_are_not_read(only_one_address: None) -> None:
    """UCX would execute it: a PUT needs no answer before."""
    del only_one_address
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        with UcxPorts().guard():
            ucx = keep(like_ucx())
            port = ucx.getsockname()[1]
            stranger, friend = connects(STRANGER, port), connects("127.0.0.1", port)
            assert stranger is not None
            assert friend is not None
            keep(stranger)
            keep(friend)
            accepted = {peer[0]: keep(one) for one, peer in (ucx.accept(), ucx.accept())}
            stranger.sendall(b"write this")
            assert accepted[STRANGER].recv(10, socket.MSG_PEEK) == b"write this"
        assert accepted[STRANGER].recv(10) == b""
        assert stranger.recv(1) == b""
        accepted["127.0.0.1"].sendall(b"x")
        assert friend.recv(1) == b"x"
        assert connects(STRANGER, port) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104 - as seen by others
def test_a_kernel_without_filters_is_told_with_the_harm_if_other_machines_can_connect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    """Once. Then all hosts are admitted, because they are."""
    monkeypatch.setattr(filters, "SO_ATTACH_FILTER", 0xFFFF)
    ports, is_open = UcxPorts(), host != "127.0.0.1"
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            with ports.guard():
                one = stack.enter_context(socket.create_server((host, 0)))
                os.set_inheritable(one.fileno(), True)  # noqa: FBT003
                stack.enter_context(select.epoll()).register(one.fileno(), select.EPOLLIN)
        lines = [line for line in caplog.messages if "UCX's TCP ports lack a filter" in line]
        assert len(lines) == is_open
        if is_open:
            assert "can write any memory of this process, and so run code" in lines[0]
            assert "Protocol not available" in lines[0]
            assert ports.admit(["192.0.2.7"])


def test_a_socket_that_was_open_without_a_filter_is_told_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """UCX's library is another one than those that this changes."""
    monkeypatch.setattr(module, "_is_loopback", lambda _: False)
    with guarded():
        (line,) = caplog.messages
    assert "UCX listened for a moment before its ports had one" in line
    assert "can write any memory of this process, and so run code" in line


def test_hosts_that_the_kernel_has_no_room_for_are_not_admitted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The former ones stay."""
    codes: list[bytes] = []

    def attach_some(_: socket.socket, code: bytes) -> None:
        if len(code) > 400:
            raise OSError(12, "Cannot allocate memory")
        codes.append(code)

    with guarded() as (ports, _):
        monkeypatch.setattr(module, "attach", attach_some)
        assert ports.admit(["192.0.2.7"])
        assert not ports.admit([f"192.0.2.{n}" for n in range(1, 200)])
        assert "the kernel refuses a filter for 199 hosts" in caplog.text
        assert passes(codes[-1], ipaddress.ip_address("192.0.2.7"))


def test_processes_of_other_users_are_told_with_the_harm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "PROCESSES", tmp_path)
    for pid, user in ((1, 0), (17, os.geteuid()), (18, 65534), (19, 4_000_000)):
        (tmp_path / str(pid)).mkdir()
        if not os.geteuid():
            os.chown(tmp_path / str(pid), user, user)
    (tmp_path / "meminfo").touch()
    UcxPorts().warn_of_other_users()
    if os.geteuid():
        assert not caplog.messages
        return
    (line,) = caplog.messages
    assert f"other users run here ({pwd.getpwuid(65534).pw_name}, 4000000)" in line
    assert "can write any memory of this process, and so run code" in line
