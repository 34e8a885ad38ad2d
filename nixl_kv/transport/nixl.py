"""The data plane over NVIDIA NIXL. The only file that imports nixl.

What NIXL forces, all measured:
- Its own progress thread spins on a whole core, so there is none; whoever runs the transport calls
  `progress` while peers may need it, and sleeps otherwise.
- Without it UCX is safe to use beside its own worker threads only with the read-write lock mode.
- Over shared memory a read is a copy by the caller, unless the backend has threads of its own.
- A strided list of all blocks costs microseconds for any number of them, and int32 indices are
  taken without a conversion.
- It never times out and cannot abort; a peer that dies makes a read end in an error.
- A name is never used twice: a new life of a process is another agent.
"""

import gc
import importlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

import numpy as np

from nixl_kv.config import AUTO, OFF, Config
from nixl_kv.errors import PeerLost, TransportError
from nixl_kv.geometry.layout import Memory, Span
from nixl_kv.log_limit import get_logger
from nixl_kv.transport.base import Indices, PeerName, Rows, Transport
from nixl_kv.transport.descriptors import check_free, past_stale_descriptors
from nixl_kv.transport.host_filter import filtered_ucx_ports
from nixl_kv.transport.tcp.paced import SEGMENT_CONFIG, AlwaysTcp, PacedTransport, TcpDetector
from nixl_kv.transport.tcp.ucx import ONLY_LOOPBACK, Guard, UcxTcpDetector

if TYPE_CHECKING or find_spec("nixl_rocm") is None:
    import nixl._api as api
    import nixl._bindings as bindings
else:  # AMD's build, under a name of its own; vLLM takes it there too
    api = importlib.import_module("nixl_rocm._api")
    bindings = importlib.import_module("nixl_rocm._bindings")

logger = get_logger(__name__)

REHEARSAL_S: Final = 2.0
"""How long a read within this process may take, before the first peer."""

UCX_OPTIONS: Final = {
    "ucx_error_handling_mode": "peer",
    "num_threads": "2",
    "split_batch_size": "16",
}
"""With threads, `read` returns at once; a batch of fewer merged pieces is copied by the caller."""

MAX_COPYING: Final = 4
"""Threads that copy at the same time where a read is a copy, if there are as many cores."""

UCX_ENGINE_CONFIG: Final = (
    # Read directly also between GPUs, or within one, on a host without NVLink. There UCX prefers
    # writes over reads where it has the choice; a READ then goes through TCP and the owner's memory
    # copies instead, at 0.4 GB/s on an H100 (docs/benchmarks.md).
    "CUDA_IPC_ENABLE_GET_ZCOPY=on,"
    # Unmap another process's GPU memory after each read. UCX would keep it mapped until this
    # process ends, so the cache of a prefill engine that died would stay allocated: 8 GiB of each
    # life of one with a cache of 8 GiB, measured between two H200s.
    "CUDA_IPC_CACHE=n,"
    # Over TCP, connect in the background: to a host that is cut off, UCX otherwise holds the
    # calling thread for two minutes. And let reads from such a host end, which they otherwise do
    # not: a connection fails on which nothing was acknowledged for 4 s.
    "TCP_CONN_NB=y,TCP_USER_TIMEOUT=4s,TCP_KEEPIDLE=2s,TCP_KEEPINTVL=1s,TCP_KEEPCNT=3"
)
"""Settings of UCX, without its prefix."""

STREAM_OPTIONS: Final = {"ucx_error_handling_mode": "peer"}
STREAM_TRANSPORTS: Final[Mapping[Memory, str]] = {"DRAM": "tcp", "VRAM": "tcp,cuda_copy"}
"""What UCX may use in an agent that is only for TCP."""

UCX: Final = "UCX"

_PEER_ERRORS: Final = (
    bindings.nixlRemoteDisconnectError,
    bindings.nixlCancelledError,
    bindings.nixlNotFoundError,  # it was removed
)
_ERRORS: Final = tuple(
    getattr(bindings, name)
    for name in dir(bindings)
    if name.startswith("nixl") and name.endswith("Error")
)


_Native = TypeVar("_Native", api.nixl_prepped_dlist_handle, api.nixl_xfer_handle)


@contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Turn NIXL's exceptions, which have no base of their own, into ours."""
    try:
        yield
    except _PEER_ERRORS as error:
        raise PeerLost(f"{doing}: {error}") from error
    except (*_ERRORS, ValueError, RuntimeError) as error:
        raise TransportError(f"{doing}: {type(error).__name__}: {error}") from error


def _check(state: str) -> bool:
    """Whether a read is done, by NIXL's word for its state.

    1.5.1 raises for any other word than these two, but documents a third.
    """
    if state not in ("DONE", "PROC"):
        raise TransportError(f"its state is {state!r}; allowed: 'DONE' or 'PROC'")
    return state == "DONE"


def _set_when_collected(gone: threading.Event) -> Callable[[object], None]:
    """A weak reference's callback that refers to nothing else."""
    return lambda _: gone.set()


def nixl_transport(config: Config, memory: Memory, *, is_decode: bool = True) -> Transport:
    """An agent for a cache in such memory; `paced_reads` says when it reads in pieces.

    Raises:
        TransportError: if a backend cannot be created.
    """
    options = dict(UCX_OPTIONS)
    settings, guard = _network(config, is_decode=is_decode)
    if memory == "DRAM":
        num_cores = len(os.sched_getaffinity(0))
        options["num_threads"] = str(max(int(options["num_threads"]), min(num_cores, MAX_COPYING)))
    first = NixlTransport(config.backends, ucx_options=options, engine_config=settings, guard=guard)
    if config.paced_reads == OFF or (config.paced_reads == AUTO and config.backends[0] != UCX):
        return first
    detector: TcpDetector = AlwaysTcp()
    if config.paced_reads == AUTO:
        detector = UcxTcpDetector(settings, guard)
    make_stream = partial(_make_stream, config.backends, settings, guard)
    return PacedTransport(first, make_stream, detector, ThreadPoolExecutor(1, "nixl-kv-streams"))


def _make_stream(backends: Sequence[str], settings: str, guard: Guard, memory: Memory) -> Transport:
    """A further agent that reads over TCP, and has nothing else: so memory is not registered."""
    settings = f"{settings},TLS={STREAM_TRANSPORTS[memory]}"
    return NixlTransport(backends, ucx_options=STREAM_OPTIONS, engine_config=settings, guard=guard)


def _network(config: Config, *, is_decode: bool) -> tuple[str, Guard]:
    """Settings of UCX, and what guards the ports that it opens.

    UCX uses loopback alone if no other machine reads this engine, and it reads no other machine. A
    decode engine may read others although its own `host` is loopback.
    """
    settings, allowed = f"{UCX_ENGINE_CONFIG},{SEGMENT_CONFIG}", config.allowed_hosts
    if config.is_this_machine_only and (allowed.are_local or not is_decode):
        return f"{settings},{ONLY_LOOPBACK}", nullcontext
    return settings, partial(filtered_ucx_ports, allowed)


def nixl_checker(config: Config, *, is_decode: bool = True) -> Transport:
    """An agent that reads a page of slots as peers do, with as few threads as can be.

    Raises:
        TransportError: if a backend cannot be created.
    """
    settings, guard = _network(config, is_decode=is_decode)
    return NixlTransport(
        config.backends, ucx_options=STREAM_OPTIONS, engine_config=settings, guard=guard
    )


class _Handle(Generic[_Native]):
    """A list or a read of NIXL's. Each keeps its agent alive, so the transport can let it go."""

    def __init__(self, native: _Native) -> None:
        self._native: _Native | None = native
        self.failure = ""  # what posting it said: not the error, whose traceback holds the agent

    @property
    def native(self) -> _Native:
        """NIXL's own handle.

        Raises:
            TransportError: if the transport was closed.
        """
        if self._native is None:
            raise TransportError("the NIXL agent is closed")
        return self._native

    def drop(self) -> None:
        """Refer to it no longer."""
        self._native = None


_List: TypeAlias = _Handle[api.nixl_prepped_dlist_handle]
_Read: TypeAlias = _Handle[api.nixl_xfer_handle]


class NixlTransport:
    """One NIXL agent. See `Transport`."""

    def __init__(
        self,
        backends: Sequence[str] = (UCX,),
        *,
        ucx_options: Mapping[str, str] = UCX_OPTIONS,
        engine_config: str = "",
        guard: Guard = nullcontext,
    ) -> None:
        """Create an agent with a fresh name; takes about half a second.

        Args:
            backends: NIXL's names of them.
            ucx_options: parameters of the UCX backend.
            engine_config: UCX's own settings, `NAME=value,...` without its prefix.
            guard: entered while UCX opens its ports.

        Raises:
            TransportError: if a backend cannot be created.
        """
        self.name = f"nixl-kv-{secrets.token_hex(8)}"
        self._make_another = partial(
            NixlTransport,
            backends,
            ucx_options=ucx_options,
            engine_config=engine_config,
            guard=guard,
        )
        self._spread = int(ucx_options.get("num_threads", 0)) * int(
            ucx_options.get("split_batch_size", 1)
        )
        config = api.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW,
        )
        check_free()
        with _translated("creating the agent"):
            agent = api.nixl_agent(self.name, config)
            self._open_agent: api.nixl_agent | None = agent
            self._handles: weakref.WeakSet[_List | _Read] = weakref.WeakSet()
            # Set when the destructor of the C++ object has run; the wrapper may go before that.
            self._gone = threading.Event()
            self._proof = weakref.ref(agent.agent, _set_when_collected(self._gone))
            for backend in backends:
                options = dict(ucx_options) if backend == UCX else {}
                if options and engine_config:
                    options["engine_config"] = engine_config
                create = partial(agent.create_backend, backend, options)
                with guard():
                    past_stale_descriptors(create, bindings.nixlBackendError)

    def __repr__(self) -> str:
        return f"<NixlTransport {self.name}>"

    @property
    def _agent(self) -> api.nixl_agent:
        if self._open_agent is None:
            raise TransportError(f"NIXL agent {self.name} is closed")
        return self._open_agent

    def spread(self, peer: PeerName) -> int:
        """As many as wake all threads of the backend; each has a connection of its own."""
        del peer
        return max(1, self._spread)

    def register(self, span: Span, memory: Memory, device: int) -> None:
        """Register memory with every backend that can use it."""
        with _translated(f"registering {span.length} bytes of {memory}"):
            self._agent.register_memory([(span.address, span.length, device, "")], memory)

    def rehearse(self, span: Span, memory: Memory, device: int) -> None:
        """Let an agent that is gone afterwards read from another one.

        In a process NIXL's first `add_remote_agent` takes 12 ms more than a later one, and the
        first read beside UCX's own threads up to 100 ms.
        """
        try:
            agents = [self._make_another() for _ in range(2)]
            try:
                for agent in agents:
                    agent.register(span, memory, device)
                _read_once(agents[0], agents[1], span, memory, device)
            finally:
                for agent in agents:
                    agent.close()
        except TransportError as error:
            logger.info("the first peer will cost more than later ones: %s", error)

    def metadata(self) -> bytes:
        """The agent's metadata: 0.5 KiB, and about 44 bytes per registration."""
        with _translated("packing the metadata"):
            return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> PeerName:
        """Load a peer's metadata; 10 to 140 ms."""
        with _translated("adding a peer"):
            name = self._agent.add_remote_agent(metadata)
            return PeerName(name.decode() if isinstance(name, bytes) else name)

    def drop_peer(self, peer: PeerName) -> None:
        """Remove a peer's metadata; its connections stay open until the agent ends."""
        with _translated("dropping a peer"):
            self._agent.remove_remote_agent(peer)

    def prepare(self, rows: Rows, memory: Memory, peer: PeerName | None) -> _List:
        """Prepare a strided list: microseconds for any number of blocks."""
        with _translated(f"preparing {len(rows)} rows of {memory}"):
            native = self._agent.prep_xfer_dlist(
                peer or "NIXL_INIT_AGENT", np.ascontiguousarray(rows), memory
            )
        return self._keep(native)

    def read(self, local: _List, remote: _List, indices: tuple[Indices, Indices]) -> _Read:
        """Make and post one READ; NIXL merges neighbours of dense rows itself."""
        with _translated(f"reading {len(indices[0])} pieces"):
            native = self._agent.make_prepped_xfer(
                "READ", local.native, indices[0], remote.native, indices[1]
            )
        read = self._keep(native)
        try:
            with _translated(f"posting {len(indices[0])} pieces"):
                _check(self._agent.transfer(native))
        except PeerLost:
            raise
        except TransportError as error:  # a part of it may be under way
            read.failure = str(error)
        return read

    def poll(self, read: _Read) -> bool:
        """Ask for the state, which also lets the read progress; a handle that ended is released."""
        if read.failure:
            raise TransportError(read.failure)
        with _translated("reading"):
            if not _check(self._agent.check_xfer_state(read.native)):
                return False
            read.native.release()
        return True

    def stop(self, read: _Read) -> bool:
        """All of it is under way, and NIXL does not stop it."""
        del read
        return False

    def progress(self) -> None:
        """Let UCX serve peers. There is no call for it alone; asking for notifications does it."""
        with _translated("progressing"):
            self._agent.get_new_notifs()

    def tidy(self) -> bool:
        """NIXL closes connections with the agent alone."""
        return False

    def close(self) -> None:
        """Destroy the agent: 10 to 40 ms, and the only thing that stops a read under way.

        Handles keep the C++ object alive, and so do tracebacks that hold one.

        Raises:
            TransportError: if something else still refers to it, so that it lives on.
        """
        for handle in list(self._handles):
            handle.drop()
        self._open_agent = None
        if not self._gone.is_set():
            gc.collect()
        if not self._gone.is_set():
            raise TransportError(f"NIXL agent {self.name} is still referred to")

    def _keep(self, native: _Native) -> _Handle[_Native]:
        handle = _Handle(native)
        self._handles.add(handle)
        return handle


def _read_once(
    reader: NixlTransport, other: NixlTransport, span: Span, memory: Memory, device: int
) -> None:
    """The first half of the memory into the second: over all connections, and in one piece."""
    length, until = span.length // 2, time.monotonic() + REHEARSAL_S
    peer = reader.add_peer(other.metadata())
    here, there = (
        np.array([[address, length, device, length, 1]], dtype=np.uint64)
        for address in (span.address + length, span.address)
    )
    lists = reader.prepare(here, memory, None), reader.prepare(there, memory, peer)
    for count in (reader.spread(peer), 1):
        pieces = np.zeros(count, dtype=np.int32)
        read = reader.read(*lists, (pieces, pieces))
        while not reader.poll(read):
            if time.monotonic() > until:
                raise TransportError(f"a read within this process takes {REHEARSAL_S:g} s")
            other.progress()
