"""A listening port that lets in only so many, by the kernel's help."""

import contextlib
import errno
import logging
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from nixl_kv.transport import door as module
from nixl_kv.transport.door import Door

HOST = "127.0.0.1"


@pytest.fixture
def door() -> Iterator[Door]:
    with contextlib.closing(Door(HOST, 0, room=8)) as made:
        yield made


def can_enter(door: Door) -> bool:
    """Whether the kernel answers; it is not accepted by anybody."""
    try:
        socket.create_connection((HOST, door.port), timeout=0.3).close()
    except TimeoutError:
        return False
    return True


def test_a_door_is_open(door: Door) -> None:
    assert door.port > 0
    assert can_enter(door)


def test_a_full_room_shuts_the_door_until_some_have_left(door: Door) -> None:
    for _ in range(7):
        door.came()
    assert can_enter(door)
    door.came()
    assert not can_enter(door)
    door.left()
    assert not can_enter(door), "not at once: it would be shut again"
    door.left()
    assert can_enter(door)


def test_those_who_are_in_notice_nothing(door: Door) -> None:
    copy = socket.socket(fileno=door.copy())
    with copy, socket.create_connection((HOST, door.port)) as reader:
        inside, _ = copy.accept()
        for _ in range(8):
            door.came()
        assert not can_enter(door)
        with inside:
            reader.sendall(b"still here")
            assert inside.recv(100) == b"still here"
            inside.sendall(b"me too")
            assert reader.recv(100) == b"me too"


def test_it_is_not_said_all_the_time(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        for _ in range(8):
            door.came()
        for _ in range(8):
            door.left()
    assert caplog.text.count("takes no more for now") == 1


def test_those_who_came_too_late_are_counted_too(door: Door) -> None:
    for _ in range(12):
        door.came()
    for _ in range(5):
        door.left()
    assert not can_enter(door)
    door.left()
    assert can_enter(door)


def test_a_copy_outlives_the_door() -> None:
    door = Door(HOST, 0)
    copy = door.copy()
    door.close()
    with socket.socket(fileno=copy) as listening:
        assert listening.getsockname() == (HOST, door.port)


def test_a_kernel_that_cannot_is_no_error(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(module, "SO_ATTACH_FILTER", 0xFFFF)
    for _ in range(20):
        door.came()
    assert can_enter(door)
    for _ in range(20):
        door.left()
    assert f"port {door.port} has 8 connections; it cannot be shut: " in caplog.text
    assert f"port {door.port} was not shut: " in caplog.text
    assert can_enter(door)


@pytest.mark.parametrize(
    ("descriptors", "room"),
    [(1024, 256), (4096, 1024), (65536, 1024), (resource.RLIM_INFINITY, 1024)],
)
def test_the_room_is_what_the_process_can_afford(
    monkeypatch: pytest.MonkeyPatch, descriptors: int, room: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    with contextlib.closing(Door(HOST, 0)) as made:
        assert made._room == room


def test_a_port_that_is_taken(door: Door) -> None:
    with pytest.raises(OSError, match="Address already in use") as raised:
        Door(HOST, door.port)
    assert raised.value.errno == errno.EADDRINUSE


def test_a_door_that_is_closed_is_gone() -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    Door(HOST, 0).close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
