"""File descriptors that UCX needs, and those that it loses when none is free.

When accept() finds no free descriptor, UCX 1.23 closes its listening socket for good and keeps the
number in a table; and when `ucp_worker_create` finds none, its next call hangs. So agents are made
only while enough are free (`check_free`), `serving.py` checks the listening sockets, and a new
agent gets past the stale numbers. Delete this file, with `serving.py`, when UCX goes on listening
after EMFILE; `ports.py` also lists listening sockets.
"""

import errno
import os
import socket
import stat
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Final

from nixl_kv.errors import TransportError
from nixl_kv.transport.ports import DESCRIPTORS, max_descriptors, num_descriptors

# UCX rarely has more listening sockets for an agent: two per network interface.
MAX_STALE: Final = 8
# An agent opens 25 descriptors over TCP on one interface, and more for each RDMA device.
FREE_FOR_AGENT: Final = 128


def check_free(count: int = FREE_FOR_AGENT) -> None:
    """Raise a TransportError if this process cannot open `count` more descriptors.

    UCX 1.23 must not run out of them while it opens a worker: the next call then hangs for ever, on
    a lock that the failed one has kept, and this process never makes another agent.
    """
    most = max_descriptors()
    if most is not None and (free := max(0, most - num_descriptors())) < count:
        raise TransportError(
            f"{free} of {most} file descriptors are free; a NIXL agent needs up to {count}: raise "
            "`ulimit -n`"
        )


def listening_sockets() -> dict[int, int]:
    """The inode of each listening socket, by descriptor; an OSError if none is free for it."""
    found = {}
    for path in DESCRIPTORS.iterdir():
        number = int(path.name)
        try:
            status = os.fstat(number)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as copy:
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[number] = status.st_ino
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            # Any other error: another thread has closed it.
    return found


def are_open(sockets: dict[int, int]) -> bool:
    """Whether each descriptor is still the same socket; takes 1 us each."""
    try:
        return all(os.fstat(number).st_ino == inode for number, inode in sockets.items())
    except OSError:
        return False


def past_stale_descriptors(create: Callable[[], object], error: type[Exception]) -> None:
    """Call `create`, which opens UCX's sockets, although UCX may have lost a listening socket.

    When accept() finds no free descriptor, UCX 1.23 closes its listening socket but keeps the
    descriptor's number in a table. It then refuses every socket that gets this number ("Element
    already exists"), and with it every new agent of the process. So if `create` raises `error`,
    take the lowest free number out of use for the life of the process, and try again.
    """
    with ExitStack() as taken:  # all numbers are free again after the last error
        for attempt in range(MAX_STALE + 1):
            try:
                create()
            except error:
                with suppress(OSError):
                    if attempt < MAX_STALE:
                        number = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                        taken.callback(os.close, number)
                        continue
                raise
            taken.pop_all()
            return
