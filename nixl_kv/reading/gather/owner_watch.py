"""Watches the processes whose memory is mapped here, so that it is unmapped when they end.

A mapping outlives its owner: until it is closed, no other process can allocate that GPU memory.
"""

import os
import select
import threading
from collections.abc import Callable

from nixl_kv.errors import run_guarded


class OwnerWatch:
    """A thread that waits for the ends of processes."""

    def __init__(self, on_ended: Callable[[], None]) -> None:
        """Start without processes. The thread calls `on_ended` after it has counted an end."""
        self.num_ended = 0
        """Watched processes that have ended."""
        self._on_ended = on_ended
        self._owners = select.epoll()
        self._closing = os.eventfd(0)
        self._owners.register(self._closing, select.EPOLLIN)
        self._thread = threading.Thread(target=self._watch, name="nixl-kv-owners", daemon=True)
        self._thread.start()

    def add(self, process: int) -> None:
        """Watch a process until its pidfd, `process`, is closed.

        Raises:
            OSError: if it cannot be watched, or this watch is closed.
        """
        try:
            self._owners.register(process, select.EPOLLIN | select.EPOLLONESHOT)
        except ValueError as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        """End the thread; may be called again."""
        if not self._owners.closed:
            os.eventfd_write(self._closing, 1)
            self._thread.join()
            self._owners.close()
            os.close(self._closing)

    def _watch(self) -> None:
        while True:
            for descriptor, _ in self._owners.poll():
                if descriptor == self._closing:
                    return
                self.num_ended += 1
                run_guarded(
                    self._on_ended, "could not report that the owner of mapped memory ended"
                )
