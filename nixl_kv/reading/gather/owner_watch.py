"""Notices that processes have ended whose memory is mapped: nobody else would let it go."""

import os
import select
import threading
from collections.abc import Callable

from nixl_kv.errors import run_guarded


class OwnerWatch:
    """A thread that waits for the ends of processes."""

    def __init__(self, on_ended: Callable[[], None]) -> None:
        """Start with none; `on_ended` is called on that thread, after an end was counted."""
        self.num_ended = 0
        """How many have ended."""
        self._on_ended = on_ended
        self._owners = select.epoll()
        self._closing = os.eventfd(0)
        self._owners.register(self._closing, select.EPOLLIN)
        self._thread = threading.Thread(target=self._watch, name="nixl-kv-owners", daemon=True)
        self._thread.start()

    def add(self, process: int) -> None:
        """Watch a process, by a descriptor of it (pidfd), until that is closed.

        Raises:
            OSError: if it cannot be watched, or nothing is any more.
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
