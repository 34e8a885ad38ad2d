"""A prefill rank in a process of its own, which can be stopped while it is read over TCP."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess

from harness.local.caches import Bytes, Cache, Sizes
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.transport.base import Transport
from support.pair import MakeTransport, SmallEngine

SIZES = Sizes(layers=2, blocks=64, heads=1, tokens=16, key=2**15, value=2**15)  # 128 MiB
TABLE = range(1, 64)
TOKENS = len(TABLE) * SIZES.tokens

START_S = 300.0  # how long a process may take to start, on a busy machine

TCP = "TLS=tcp,NET_DEVICES=lo"
"""Loopback alone: other tests make network interfaces, and take them away."""


def process_context() -> ForkServerContext:
    """Processes that are forked from one that has imported NIXL, which takes seconds."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["nixl._api"])
    return context


def over_tcp() -> Transport:
    """A NIXL transport that cannot read another process's memory without its help."""
    from nixl_kv.transport.nixl import NixlTransport  # noqa: PLC0415 - only where NIXL is

    return NixlTransport(engine_config=TCP)


def paced_over_tcp() -> Transport:
    """The same, piece by piece."""
    from nixl_kv.transport import nixl  # noqa: PLC0415 - only where NIXL is
    from nixl_kv.transport.tcp.paced import PacedTransport  # noqa: PLC0415 - a feature of its own

    def make() -> Transport:
        return nixl.NixlTransport(engine_config=f"{nixl.UCX_ENGINE_CONFIG},{TCP}")

    return PacedTransport(make(), make, lambda _: True, ThreadPoolExecutor(1))


def prefill_blocks() -> Bytes:
    return Cache(SIZES).fill(7).blocks(TABLE)


def has_landed(engine: SmallEngine) -> bool:
    """Whether some of the data is there, perhaps not all of it."""
    view = engine.cache.view
    return bool(view[:, TABLE[0]].any() or view[:, TABLE[-1]].any())


def start_load(decode: SmallEngine, prefill: "PrefillProcess", name: str) -> None:
    decode.prepare_load(name, prefill.offer(f"p-{name}"))
    decode.load(name, TABLE, end=TOKENS)


@contextmanager
def _process(
    serve: Callable[[Connection, MakeTransport], None], make_transport: MakeTransport
) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process that has said that it is ready; it is killed at the end."""
    context = process_context()
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, make_transport), daemon=True)
    process.start()
    try:
        assert pipe.poll(START_S), "the process did not start"
        pipe.recv()
        yield process, pipe
    finally:
        process.kill()
        process.join()


class PrefillProcess:
    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process = process
        self.pid = process.pid or 0
        self._pipe = pipe

    def offer(self, request: str) -> Ticket:
        self._pipe.send(request)
        ticket: Ticket = self._pipe.recv()
        return ticket

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


@contextmanager
def prefill_process(make_transport: MakeTransport = over_tcp) -> Iterator[PrefillProcess]:
    with _process(_serve, make_transport) as (process, pipe):
        yield PrefillProcess(process, pipe)


def _serve(pipe: Connection, make_transport: MakeTransport) -> None:
    engine = SmallEngine("prefill", Cache(SIZES).fill(7), make_transport, roles="prefill")
    pipe.send("ready")
    while (request := pipe.recv()) is not None:
        pipe.send(engine.offer(request, [TABLE], TOKENS))
    engine.close()


@contextmanager
def reader_process(make_transport: MakeTransport) -> Iterator[Callable[[Ticket], None]]:
    """A process that reads the blocks of a ticket, and is killed in the middle of it."""
    with _process(_read, make_transport) as (_, pipe):

        def begin(ticket: Ticket) -> None:
            pipe.send(ticket)
            assert pipe.poll(START_S), "nothing was read"
            assert pipe.recv() == "reading"

        yield begin


def _read(pipe: Connection, make_transport: MakeTransport) -> None:
    engine = SmallEngine("reader", Cache(SIZES), make_transport, roles="decode")
    pipe.send("ready")
    engine.prepare_load("d", pipe.recv())
    engine.load("d", TABLE, end=TOKENS)
    engine.wait(lambda: has_landed(engine))
    pipe.send("reading")
    pipe.recv()
