"""Time reads over TCP between two hosts, beside one bulk stream.

The hosts are network namespaces, joined by a program that delays packets and limits their rate
(`harness.cluster.netns`). Each round times three ways in random order: "one stream", a plain socket
that asks once and receives all bytes; "nixl_kv", which reads them with our default settings; and
"in-tree", which reads them with the settings of vLLM's own connector. Runs are read in random
order, so that none merge. A share compares a way's rate with that of one stream in the same round:
the median of the rounds, and the middle half of them. Needs root.
"""

import argparse
import itertools
import multiprocessing
import os
import random
import signal
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from harness.cluster import netns
from harness.cluster.netns import Namespace, Quality, Wire
from lab.bench.transfer import WARM_UP, ratio
from lab.results import Figures
from nixl_kv.config import ANYWHERE, Config
from nixl_kv.engine.loop import SERVING_PAUSE_S

STREAM: Final = "one stream"
IN_TREE: Final = "in-tree"
WAYS: Final = (STREAM, "nixl_kv", IN_TREE)
ENVIRONMENT: Final = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": netns.WIRE}
"""Namespaces are one machine: UCX must not find its shared memory."""

QUEUE_BYTES: Final = 4 << 20
"""The wire drops packets beyond these, or beyond a round trip's bytes if those are more."""

PORT: Final = 7000
CHUNK: Final = 1 << 20
FILLED: Final = 7
GIGA: Final = 1e9
START_S: Final = 120.0
READ_S: Final = 300.0

Order = npt.NDArray[np.int32]
"""Numbers of the runs, in the order of a read."""


class Pair:
    """Owner and reader of one way, each on its host."""

    def __init__(
        self, way: str, hosts: tuple[Namespace, Namespace], options: argparse.Namespace
    ) -> None:
        spawning = multiprocessing.get_context("spawn")
        num_bytes, run = options.mib << 20, options.run_kib << 10
        to_owner, owners = spawning.Pipe()
        self._pipe, readers = spawning.Pipe()
        self._way, self._to_owner = way, to_owner
        ends = (run_owner, hosts[0], owners), (run_reader, hosts[1], readers)
        self._processes = [
            spawning.Process(target=end, args=(way, host.name, num_bytes, run, pipe), daemon=True)
            for end, host, pipe in ends
        ]
        for process in self._processes:
            process.start()
        self._pipe.send((_received(to_owner, way), hosts[0].wire_address))
        _received(self._pipe, way)
        self._signal(signal.SIGSTOP)

    def read(self, order: Order) -> float:
        """Seconds. At other times both are stopped, because in-tree's threads spin."""
        self._signal(signal.SIGCONT)
        self._pipe.send(order)
        seconds: float = _received(self._pipe, self._way, READ_S)
        self._signal(signal.SIGSTOP)
        return seconds

    def close(self) -> None:
        """End both."""
        for process in self._processes:
            process.kill()
            process.join()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None:
                os.kill(process.pid, number)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The links and the reads."""
    parser.add_argument("--round-trip-ms", type=float, nargs="+", default=[0.1, 1.0, 10.0])
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 10.0])
    parser.add_argument("--mib", type=int, default=256, help="of each read; default 256")
    parser.add_argument("--run-kib", type=int, default=1024, help="of each run; default 1024")
    parser.add_argument("--rounds", type=int, default=5, help="2 or more; default 5")


def measure(options: argparse.Namespace) -> Iterator[Figures]:
    """A row for each link."""
    if os.geteuid():
        raise SystemExit("network namespaces need root")
    num_runs = (options.mib << 10) // options.run_kib
    for gbit, round_trip_ms in itertools.product(options.gbit, options.round_trip_ms):
        choices = random.Random(0)  # noqa: S311 - the same rounds every time
        orders = np.random.default_rng(0)
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        with running(gbit, round_trip_ms / 1e3, options) as pairs:
            for number in range(WARM_UP + options.rounds):
                for way in choices.sample(WAYS, len(WAYS)):
                    seconds = pairs[way].read(orders.permutation(num_runs).astype(np.int32))
                    if number >= WARM_UP:
                        times[way].append(seconds)
        bits = options.mib * 8 << 20
        about = {"link": f"{gbit:g} Gbit/s, {round_trip_ms:g} ms"}
        rates = {f"{way} Gbit/s": bits / statistics.median(times[way]) / GIGA for way in WAYS}
        shares = {f"{way} share": ratio(times[STREAM], times[way]) for way in WAYS[1:]}
        yield Figures(about | rates | shares)


@contextmanager
def running(
    gbit: float, round_trip_s: float, options: argparse.Namespace
) -> Iterator[dict[str, Pair]]:
    """The wire, and a pair for each way."""
    with ExitStack() as stack:
        owners = stack.enter_context(Namespace("kv-owner", 1))
        readers = stack.enter_context(Namespace("kv-reader", 2))
        wire = stack.enter_context(Wire(owners, readers, offload=True))
        rate = gbit * GIGA
        queue_s = max(round_trip_s, QUEUE_BYTES * 8 / rate)
        wire.quality = Quality(delay_s=round_trip_s / 2, rate=rate, queue_s=queue_s)
        pairs = {}
        for way in WAYS:
            pairs[way] = Pair(way, (owners, readers), options)
            stack.callback(pairs[way].close)
        yield pairs


def run_owner(way: str, namespace: str, num_bytes: int, _: int, pipe: Connection) -> None:
    """The process that is read."""
    memory = _enter(namespace, num_bytes, FILLED)
    if way == STREAM:
        listening = socket.create_server(("", PORT))
        pipe.send(PORT)
        stream, _ = listening.accept()
        while stream.recv(1):
            stream.sendall(memory.data)
    agent = _raw_agent(way, memory)
    pipe.send(agent.source)
    while not pipe.poll(SERVING_PAUSE_S):
        agent.transport.progress()


def run_reader(way: str, namespace: str, num_bytes: int, run: int, pipe: Connection) -> None:
    """The process that reads. It gets an order of runs and answers with seconds.

    Raises:
        RuntimeError: if a byte is wrong.
    """
    memory = _enter(namespace, num_bytes, 0)
    known, host = pipe.recv()
    prepare = _stream_reader if way == STREAM else _raw_reader
    read = prepare(way, memory, known, host, run)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        memory[:] = 0
        begin = time.perf_counter()
        read(order)
        seconds = time.perf_counter() - begin
        if not (memory == FILLED).all():
            raise RuntimeError(f"{way}: bytes differ")
        pipe.send(seconds)


def _stream_reader(_way: str, memory: Any, port: int, host: str, _: int) -> Callable[[Order], None]:
    stream = socket.create_connection((host, port))

    def read(_: Order) -> None:
        stream.sendall(b"?")
        received = 0
        while received < len(memory):
            received += stream.recv_into(memory.data[received : received + CHUNK])

    return read


def _raw_reader(way: str, memory: Any, source: Any, _: str, run: int) -> Callable[[Order], None]:
    from lab.bench.raw_reads import dense_row  # noqa: PLC0415 - after the environment

    agent = _raw_agent(way, memory)
    addresses = agent.source.address, source.address
    local, remote = (dense_row(address, len(memory), run) for address in addresses)
    post = agent.prepare(source, (local, remote))
    return lambda order: agent.run([partial(post, (order, order))])


def _raw_agent(way: str, memory: Any) -> Any:
    """An agent that has registered this memory."""
    import torch  # noqa: PLC0415 - likewise

    from lab.bench.raw_reads import InTreeTransport, RawAgent  # noqa: PLC0415 - likewise
    from nixl_kv.transport.nixl import nixl_transport  # noqa: PLC0415 - likewise

    remote = Config(peers=ANYWHERE)  # our defaults for peers on other hosts
    transport = InTreeTransport() if way == IN_TREE else nixl_transport(remote, "DRAM")
    return RawAgent(transport, torch.from_numpy(memory), -1)


def _enter(namespace: str, num_bytes: int, value: int) -> npt.NDArray[np.uint8]:
    netns.enter(namespace)
    os.environ.update(ENVIRONMENT)
    return np.full(num_bytes, value, dtype=np.uint8)


def _received(pipe: Connection, way: str, timeout_s: float = START_S) -> Any:
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"{way}: no answer for {timeout_s:g} s")
    return pipe.recv()
