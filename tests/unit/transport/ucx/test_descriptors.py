"""Which sockets listen, also when no descriptor is free to look with, and what UCX loses then."""

import socket
import subprocess
import sys
from contextlib import nullcontext

import pytest

from nixl_kv.errors import TransportError
from nixl_kv.transport.ports import num_descriptors
from nixl_kv.transport.ucx import descriptors

STARVED = """
import os, resource
from nixl_kv.transport.ports import num_descriptors
from nixl_kv.transport.ucx import descriptors
limit = len(os.listdir("/proc/self/fd")) - 1
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
while True:
    try:
        os.open("/dev/null", os.O_RDONLY)
    except OSError:
        break
print(num_descriptors(), limit)
try:
    descriptors.listening_sockets()
except OSError as error:
    print(error.strerror)
"""


def test_listening_sockets_are_told_from_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as other:
        found = descriptors.listening_sockets()
        assert server.fileno() in found
        assert other.fileno() not in found
        mine = {server.fileno(): found[server.fileno()]}
        assert descriptors.are_open(mine)
    assert not descriptors.are_open(mine)


def test_without_a_free_descriptor_they_are_counted_and_not_listed() -> None:
    """A partial list would show sockets of another agent as new ones of the next."""
    done = subprocess.run(
        [sys.executable, "-c", STARVED], capture_output=True, text=True, check=True
    )
    counted, reason = done.stdout.splitlines()
    number, limit = map(int, counted.split())
    assert number == limit
    assert reason == "Too many open files"


@pytest.mark.parametrize(("limit", "is_enough"), [(None, True), (1000, True), (999, False)])
def test_enough_descriptors_must_be_free(
    limit: int | None, monkeypatch: pytest.MonkeyPatch, *, is_enough: bool
) -> None:
    monkeypatch.setattr(descriptors, "max_descriptors", lambda: limit)
    monkeypatch.setattr(descriptors, "num_descriptors", lambda: 900)
    message = "99 of 999 file descriptors are free"
    with nullcontext() if is_enough else pytest.raises(TransportError, match=message):
        descriptors.check_free(100)


@pytest.mark.parametrize(("num_stale", "is_made"), [(0, True), (3, True), (8, True), (9, False)])
def test_numbers_that_ucx_refuses_are_taken_out_of_use(num_stale: int, *, is_made: bool) -> None:
    before, calls = num_descriptors(), iter(range(99))

    def create() -> None:
        if next(calls) < num_stale:
            raise ValueError("Element already exists")

    with nullcontext() if is_made else pytest.raises(ValueError, match="already exists"):
        descriptors.past_stale_descriptors(create, ValueError)
    assert num_descriptors() == before + (num_stale if is_made else 0)
