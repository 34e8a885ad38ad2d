"""Two processes on this host read each other's memory over NIXL, as two engines would.

Each process makes the agent that an engine with these settings makes, so UCX chooses the same
transport. The processes are separate from the tool, because UCX can abort a process.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import numpy as np

from nixl_kv.cli.doctor.host import TESTED, installed
from nixl_kv.cli.doctor.report import Check, error, ok, skipped, warning
from nixl_kv.config import Config
from nixl_kv.errors import NixlKVError
from nixl_kv.geometry.layout import Memory, Span
from nixl_kv.transport.base import Transport
from nixl_kv.transport.ucx.detect import ONLY_TCP

NUM_BYTES: Final = 64 << 20
PIECE: Final = 1 << 20
ROUNDS: Final = 5
MEASURED_S: Final = 0.5  # at least, because other processes may disturb a single read
STEP_TIMEOUT_S: Final = 60.0  # to import NIXL and make an agent, or to read in one direction
GIGA: Final = 1e9

# A share of the speed of a plain copy between two buffers, sockets or GPUs of this host. Measured
# with two H200s: 4 to 5 in shared memory (several threads copy), 0.8 to 0.95 over TCP, 0.48 over
# NVLink, and 0.01 between GPUs without cuda_ipc.
LEAST_SHARE: Final = 0.25

NOT_COVERED: Final = (
    "links to other hosts, and the ports that UCX opens: load a request between two engines, then "
    "see `nixl-kv status`"
)
SLOW: Final[Mapping[Memory, str]] = {
    "DRAM": "check that UCX may use shared memory: UCX_TLS; in containers a common IPC and PID "
    "namespace, and ptrace between processes (--cap-add SYS_PTRACE)",
    "VRAM": "check that UCX may use cuda_ipc (UCX_TLS), and that the GPUs have peer access",
}


class Link(NamedTuple):
    """Two processes that read from each other, and their memory, devices and environment."""

    config: Config
    memory: Memory = "DRAM"
    devices: tuple[int, int] = (0, 0)
    environ: Mapping[str, str] = {}  # of both processes, besides that of the tool


def check_reads(config: Config, num_gpus: int) -> Iterator[Check]:
    if installed(TESTED["NIXL"].distributions) is None:
        yield skipped("reads", "NIXL is not installed in this environment")
        return
    yield _check("host memory", Link(config), _copy_speed, "a copy in memory")
    # Where there are GPUs, NIXL refuses settings of UCX that cannot copy their memory.
    tcp = Link(config, environ={"UCX_TLS": ONLY_TCP["VRAM" if num_gpus else "DRAM"]})
    yield _check("host memory over TCP alone", tcp, _loopback_speed, "a socket on loopback")
    if num_gpus:
        gpus = Link(config, "VRAM", (0, min(1, num_gpus - 1)))
        name = "GPU 0 and GPU 1" if num_gpus > 1 else "GPU 0"
        yield _check(name, gpus, lambda: _gpu_speed(gpus.devices), "torch's own copy")
    yield skipped("not covered", NOT_COVERED)


def _check(name: str, link: Link, reference: Callable[[], float], what: str) -> Check:
    name = f"64 MiB of {name}"
    try:
        best = reference()
        speeds = _measure(link)
    except (NixlKVError, OSError, EOFError) as reason:
        about = f"the reads failed: {str(reason) or 'a process ended'}"
        return error(name, about, "run it again with NIXL_LOG_LEVEL=debug and UCX_LOG_LEVEL=info")
    shown = " and ".join(f"{speed:.2f}" for speed in speeds)
    detail = f"{shown} GB/s in the two directions; {what}: {best:.2f} GB/s"
    if min(speeds) >= LEAST_SHARE * best:
        return ok(name, detail)
    load, cores, fix = os.getloadavg()[0], os.cpu_count() or 1, SLOW[link.memory]
    if load > cores:
        fix = f"the host is busy (load {load:.0f} on {cores} cores): repeat this when it is idle"
    return warning(name, f"{detail}, of which at least a quarter was expected", fix)


def _measure(link: Link) -> list[float]:
    """GB/s of the reads by the first process, then by the second.

    Raises:
        TimeoutError: a step took too long, or failed; says which.
        EOFError: a process ended.
    """
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        pipes: list[Connection] = []
        for number in range(2):
            ours, theirs = context.Pipe()
            arguments = theirs, link, link.devices[number], number + 1
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.kill)
            stack.callback(ours.close)
            pipes.append(ours)
        described = [_receive(pipe, "making a NIXL agent") for pipe in pipes]
        speeds = []
        for reader, owner in ((0, 1), (1, 0)):
            pipes[owner].send(None)  # serve
            pipes[reader].send((*described[owner], owner + 1))
            speeds.append(float(_receive(pipes[reader], "reading")))
            pipes[owner].send(None)  # stop
            _receive(pipes[owner], "serving")
        return speeds


def _receive(pipe: Connection, doing: str) -> Any:
    if not pipe.poll(STEP_TIMEOUT_S):
        raise TimeoutError(f"{doing} took over {STEP_TIMEOUT_S:g} s")
    answer = pipe.recv()
    if isinstance(answer, str):
        raise TimeoutError(f"{doing}: {answer}")
    return answer


# --- in each of the two processes


def _work(pipe: Connection, link: Link, device: int, seed: int) -> None:
    """Serve the other process, or read from it, as often as told. `seed` fills the source."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tool ends this process
    os.dup2(2, 1)  # NIXL may print, and the tool's output may be JSON
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.update(link.environ)
    try:
        # UCX reads the environment when it is loaded.
        from nixl_kv.transport.nixl import nixl_transport  # noqa: PLC0415

        with contextlib.closing(nixl_transport(link.config, link.memory)) as transport:
            address, both = _allocate(link.memory, device)
            both[:NUM_BYTES], both[NUM_BYTES:] = seed, 0
            transport.register(Span(address, 2 * NUM_BYTES), link.memory, device)
            pipe.send((transport.metadata(), address, device))
            while True:
                order = pipe.recv()
                if order is None:
                    while not pipe.poll(0):
                        transport.progress()
                    pipe.send(pipe.recv() is None)
                    continue
                *source, expected = order
                speed = _read(transport, link.memory, source, (address + NUM_BYTES, device))
                is_right = bool((both[NUM_BYTES:] == expected).all())
                pipe.send(speed if is_right else "the bytes that were read are wrong")
    except EOFError:
        return
    except Exception as reason:  # noqa: BLE001 - told to the tool
        with contextlib.suppress(OSError):
            pipe.send(f"{type(reason).__name__}: {reason}")


def _allocate(memory: Memory, device: int) -> tuple[int, Any]:
    """NUM_BYTES for the other process to read, then as many to read into; and their address."""
    if memory == "DRAM":
        both = np.empty(2 * NUM_BYTES, dtype=np.uint8)
        return int(both.ctypes.data), both
    from nixl_kv.gpu import allocate  # noqa: PLC0415 - needs torch

    return allocate(2 * NUM_BYTES, device)


def _read(
    transport: Transport, memory: Memory, source: Sequence[Any], target: tuple[int, int]
) -> float:
    """Read the other process's source in pieces, and return the best speed in GB/s."""
    metadata, *there = source
    peer = transport.add_peer(metadata)
    count = NUM_BYTES // PIECE
    local, remote = (
        np.array([[address, PIECE, device, PIECE, count]], dtype=np.uint64)
        for address, device in (target, there)
    )
    lists = transport.prepare(local, memory, None), transport.prepare(remote, memory, peer)
    # In descending order, so that NIXL does not merge them: blocks of a cache are apart too.
    pieces = np.arange(count, dtype=np.int32)[::-1].copy()

    def read_all() -> None:
        read = transport.read(*lists, (pieces, pieces))
        while not transport.poll(read):
            pass

    read_all()  # connects
    return _best(read_all)


# --- the speed of this host without NIXL, in GB/s


def _best(step: Callable[[], object]) -> float:
    """The best speed of several steps, each of which moves NUM_BYTES."""
    seconds: list[float] = []
    while len(seconds) < ROUNDS or sum(seconds) < MEASURED_S:
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return NUM_BYTES / min(seconds) / GIGA


def _copy_speed() -> float:
    source, target = np.ones((2, NUM_BYTES), dtype=np.uint8)
    return _best(lambda: np.copyto(target, source))


def _loopback_speed() -> float:
    source, target = bytes(NUM_BYTES), memoryview(bytearray(NUM_BYTES))
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):

        def send() -> None:
            thread = threading.Thread(target=sender.sendall, args=(source,))
            thread.start()
            received = 0
            while received < NUM_BYTES:
                received += receiver.recv_into(target[received:])
            thread.join()

        return _best(send)


def _gpu_speed(devices: tuple[int, int]) -> float:
    from nixl_kv.gpu import copy_speed  # noqa: PLC0415 - needs torch

    return copy_speed(NUM_BYTES, devices) / GIGA
