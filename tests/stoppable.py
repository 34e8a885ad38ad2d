"""A prefill rank in a process of its own, which can be stopped while it is read over TCP."""

import functools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection

from caches import Cache, Sizes
from pairs import Side, filled

from nixl_kv.protocol.ticket import Ticket

SIZES = Sizes(layers=2, blocks=64, heads=1, tokens=16, key=2**15, value=2**15)  # 128 MiB
TABLE = range(1, 64)
TOKENS = len(TABLE) * SIZES.tokens


def over_tcp() -> functools.partial[object]:
    """Makes NIXL transports that cannot read another process's memory without its help."""
    from nixl_kv.transport.nixl import NixlTransport  # noqa: PLC0415 - only where NIXL is

    return functools.partial(NixlTransport, engine_config="TLS=tcp")


def _serve(pipe: Connection) -> None:
    side = Side("prefill", filled(Cache(SIZES), 7), over_tcp())
    side.publish()
    pipe.send("ready")
    while (request := pipe.recv()) is not None:
        pipe.send(side.offer(request, TABLE, TOKENS).params())
    side.close()


class Stoppable:
    """One such process."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        assert self.pipe.poll(60), "the process did not start"
        self.pipe.recv()

    def offer(self, request: str) -> Ticket:
        self.pipe.send(request)
        return Ticket.parse(self.pipe.recv())

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def stoppable() -> Iterator[Stoppable]:
    """Start it, and end it whatever happens."""
    started = Stoppable()
    try:
        yield started
    finally:
        started.process.kill()
        started.process.join()
