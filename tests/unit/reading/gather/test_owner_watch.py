"""The end of a process is noticed, and the watch itself ends."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from nixl_kv.reading.gather.path import OwnerWatch

EVENT_S = 60.0


class Watched:
    """A watch, and what it has told."""

    def __init__(self) -> None:
        self.ended = threading.Semaphore(0)
        self.watch = OwnerWatch(self.ended.release)


@pytest.fixture
def watched() -> Iterator[Watched]:
    one = Watched()
    yield one
    one.watch.close()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """It waits for its end."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as one:
        yield one
        one.kill()


def test_the_end_of_a_process_is_counted_and_told_once(
    watched: Watched, process: subprocess.Popen[bytes]
) -> None:
    descriptor = os.pidfd_open(process.pid)
    watched.watch.add(descriptor)
    assert watched.watch.num_ended == 0
    process.kill()
    assert watched.ended.acquire(timeout=EVENT_S)
    assert watched.watch.num_ended == 1
    watched.watch.close()
    assert watched.watch.num_ended == 1, "told again"
    os.close(descriptor)


def test_a_process_whose_descriptor_is_closed_is_not_watched(
    watched: Watched, process: subprocess.Popen[bytes]
) -> None:
    other = os.pidfd_open(process.pid)
    watched.watch.add(other)
    os.close(other)
    process.kill()
    process.wait()
    with subprocess.Popen([sys.executable, "-c", ""]) as second:
        descriptor = os.pidfd_open(second.pid)
        watched.watch.add(descriptor)
        assert watched.ended.acquire(timeout=EVENT_S)
    assert watched.watch.num_ended == 1, "the first one's end was told, too"
    os.close(descriptor)


def test_an_error_of_who_is_told_does_not_end_the_watch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Later owners' memory would stay mapped for ever."""
    told = threading.Semaphore(0)

    def fail() -> None:
        told.release()
        raise OSError("the wake-up descriptor is closed")

    watch = OwnerWatch(fail)
    for number in (1, 2):
        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            descriptor = os.pidfd_open(ended.pid)
            watch.add(descriptor)
            assert told.acquire(timeout=EVENT_S)
            assert watch.num_ended == number
            os.close(descriptor)
    watch.close()
    assert "the wake-up descriptor is closed" in caplog.text


def test_its_thread_ends_with_it(watched: Watched) -> None:
    def names() -> set[str]:
        return {thread.name for thread in threading.enumerate()}

    assert "nixl-kv-owners" in names()
    watched.watch.close()
    watched.watch.close()
    assert "nixl-kv-owners" not in names()
    with pytest.raises(OSError, match="closed epoll"):
        watched.watch.add(0)
