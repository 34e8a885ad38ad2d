"""A prefill rank in a process of its own, which can be stopped while it is read over TCP."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection

from caches import Cache, Sizes
from pairs import Side, filled

from nixl_kv.protocol.ticket import Ticket
from nixl_kv.transport.base import Transport
from nixl_kv.transport.paced import SEGMENT_CONFIG, PacedTransport

Make = Callable[[], Transport]

SIZES = Sizes(layers=2, blocks=64, heads=1, tokens=16, key=2**15, value=2**15)  # 128 MiB
TABLE = range(1, 64)
TOKENS = len(TABLE) * SIZES.tokens


def over_tcp() -> Transport:
    """A NIXL transport that cannot read another process's memory without its help."""
    from nixl_kv.transport.nixl import NixlTransport  # noqa: PLC0415 - only where NIXL is

    return NixlTransport(engine_config="TLS=tcp")


def paced_over_tcp() -> Transport:
    """The same, by one piece after the other."""
    from nixl_kv.transport.nixl import NixlTransport  # noqa: PLC0415 - only where NIXL is

    return PacedTransport(NixlTransport(engine_config=f"TLS=tcp,{SEGMENT_CONFIG}"))


def _serve(pipe: Connection, make: Make) -> None:
    side = Side("prefill", filled(Cache(SIZES), 7), make)
    side.publish()
    pipe.send("ready")
    while (request := pipe.recv()) is not None:
        pipe.send(side.offer(request, TABLE, TOKENS).params())
    side.close()


class Stoppable:
    """One such process."""

    def __init__(self, make: Make) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make), daemon=True)
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
def stoppable(make: Make = over_tcp) -> Iterator[Stoppable]:
    """Start it, and end it whatever happens."""
    started = Stoppable(make)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.join()


def _read(pipe: Connection, make: Make) -> None:
    side = Side("reader", Cache(SIZES), make)
    pipe.send("ready")
    side.fetch("d", pipe.recv())
    side.load("d", TABLE, end=TOKENS)
    side.wait(lambda _: bool(side.cache.view[:, TABLE[0]].any()), 30)
    pipe.send("reading")
    pipe.recv()


@contextmanager
def reader(make: Make) -> Iterator[Callable[[Ticket], None]]:
    """A process that reads what it is given the ticket for, and is killed in the middle of it."""
    context = get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_read, args=(theirs, make), daemon=True)
    process.start()

    def begin(ticket: Ticket) -> None:
        pipe.send(ticket)
        assert pipe.poll(60), "nothing was read"
        assert pipe.recv() == "reading"

    try:
        assert pipe.poll(60), "the process did not start"
        pipe.recv()
        yield begin
    finally:
        process.kill()
        process.join()
