"""The data plane over NVIDIA NIXL. The only file that imports nixl.

`nixl_transport` makes the agent of a rank. NIXL 1.5.1 forces these choices on it, all measured:

- NIXL's progress thread spins on a whole core, so it is off. The transfer thread calls `progress`
  while peers may need it, and sleeps otherwise.
- Without that thread, UCX is safe beside its own worker threads only in read-write lock mode.
- Over shared memory a read is a copy by the caller, unless the backend has threads of its own.
- A strided list of all blocks takes microseconds for any number of them, and NIXL takes int32
  indices without converting them.
- NIXL never times out and cannot abort. A peer that dies makes a read end in an error.
- Never use an agent name twice: a restarted process is another agent.
"""

import gc
import importlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from nixl_kv.config import Config
from nixl_kv.errors import ConfigError, PeerLost, TransportError, did_you_mean, get_logger
from nixl_kv.geometry.layout import Memory, Span
from nixl_kv.transport.base import Indices, PeerName, Ports, Rows, Transport
from nixl_kv.transport.ucx.descriptors import check_free, past_stale_descriptors
from nixl_kv.transport.ucx.paced import pace
from nixl_kv.transport.ucx.ports import UcxPorts
from nixl_kv.transport.ucx.settings import ONLY_LOOPBACK, UCX_ENGINE_CONFIG

if TYPE_CHECKING or find_spec("nixl_rocm") is None:
    import nixl._api as api
    import nixl._bindings as bindings
else:  # AMD's build has a name of its own; vLLM imports it the same way
    api = importlib.import_module("nixl_rocm._api")
    bindings = importlib.import_module("nixl_rocm._bindings")

logger = get_logger(__name__)

UCX: Final = "UCX"

UCX_OPTIONS: Final = {
    "ucx_error_handling_mode": "peer",
    # With threads, `read` returns at once.
    "num_threads": "2",
    # The caller copies a batch of fewer merged pieces itself.
    "split_batch_size": "16",
}
# Threads that copy in parallel where a read is a copy, if there are as many cores.
MAX_COPYING: Final = 4

# A starting rank gives up the reads within its own process. Its first peer then takes up to 0.1 s
# longer. The time is long because UCX 1.23 may abort the process if an agent is closed while it
# connects.
REHEARSAL_S: Final = 10.0

_PEER_ERRORS: Final = (
    bindings.nixlRemoteDisconnectError,
    bindings.nixlCancelledError,
    bindings.nixlNotFoundError,  # the peer was removed
)
_ERRORS: Final = tuple(
    getattr(bindings, name)
    for name in dir(bindings)
    if name.startswith("nixl") and name.endswith("Error")
)

Guard: TypeAlias = Callable[[], AbstractContextManager[None]]


@contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Raise our errors for NIXL's, which have no base class."""
    try:
        yield
    except _PEER_ERRORS as error:
        raise PeerLost(f"{doing}: {error}") from error
    except (*_ERRORS, ValueError, RuntimeError) as error:
        raise TransportError(f"{doing}: {type(error).__name__}: {error}") from error


def _is_done(state: str) -> bool:
    # NIXL 1.5.1 raises for any other state than these two, but documents a third.
    if state not in ("DONE", "PROC"):
        raise TransportError(f"NIXL reports the state {state!r}; allowed: 'DONE' or 'PROC'")
    return state == "DONE"


def _check_time(until: float) -> None:
    if time.monotonic() > until:
        raise TransportError(f"a read within this process took over {REHEARSAL_S:g} s")


def nixl_transports(
    config: Config, memory: Memory, *, is_decode: bool = True
) -> tuple[Callable[[], Transport], Ports]:
    """How to make the agents of a rank, and the ports that they open.

    The ports admit this machine only, until `Ports.admit` names others.
    """
    ports = UcxPorts()
    return partial(nixl_transport, config, memory, ports, is_decode=is_decode), ports


def nixl_transport(
    config: Config, memory: Memory, ports: UcxPorts | None = None, *, is_decode: bool = True
) -> Transport:
    """Make one agent of a rank; a TransportError if NIXL cannot create a backend.

    Without `ports`, only this machine reaches the agent.
    """
    options, settings = dict(UCX_OPTIONS), UCX_ENGINE_CONFIG
    guard = (ports or UcxPorts()).guard
    # Use loopback only, if other machines neither read this engine nor are read by it. A decode
    # engine may read other machines although its own `host` is loopback.
    if config.is_this_machine_only and (config.allowed_hosts.are_local or not is_decode):
        settings = f"{settings},{ONLY_LOOPBACK}"
    if memory == "DRAM":
        num_cores = len(os.sched_getaffinity(0))
        options["num_threads"] = str(max(int(options["num_threads"]), min(num_cores, MAX_COPYING)))
    make = partial(NixlTransport, config.backends, guard=guard)
    # Without transport/ucx/paced.py, return the first argument.
    return pace(make(ucx_options=options, engine_config=settings), make, config, memory, settings)


def check_backends(names: Sequence[str]) -> None:
    """Raise a ConfigError if this NIXL lacks a backend. Takes two seconds for the import."""
    _check_backends(names, api.nixl_agent("nixl-kv-check", api.nixl_agent_config(backends=[])))


def _check_backends(names: Sequence[str], agent: api.nixl_agent) -> None:
    known = agent.get_plugin_list()
    for name in names:
        if name not in known:
            raise ConfigError(
                f"backends has {name!r}, which this NIXL does not have; "
                f"{did_you_mean(name, known)}allowed: {', '.join(known)}"
            )


class _Handle:
    """A list or a read. NIXL's handle keeps its agent alive, so `close` takes it away."""

    def __init__(self, native: object) -> None:
        self.held: Any = native
        self.failure = ""  # of posting it; text only: a traceback would keep the agent alive

    @property
    def native(self) -> Any:
        if self.held is None:
            raise TransportError("the NIXL agent is closed")
        return self.held


class NixlTransport:
    """One NIXL agent. See `Transport` for the methods."""

    def __init__(
        self,
        backends: Sequence[str] = (UCX,),
        *,
        ucx_options: Mapping[str, str] = UCX_OPTIONS,
        engine_config: str = "",
        guard: Guard = nullcontext,
    ) -> None:
        """Create an agent with a new name, which takes about half a second.

        `engine_config` has UCX's own settings, `NAME=value,...` without the prefix UCX_. `guard` is
        entered while UCX opens its ports.
        """
        self.name = f"nixl-kv-{secrets.token_hex(8)}"
        settings: dict[str, Any] = {"ucx_options": ucx_options, "engine_config": engine_config}
        self._make_another = partial(NixlTransport, backends, guard=guard, **settings)
        threads, batch = ucx_options.get("num_threads", 0), ucx_options.get("split_batch_size", 1)
        self._warm_up_pieces = max(1, int(threads) * int(batch))
        mode = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=mode)
        check_free()
        with _translated("creating the agent"):
            agent = api.nixl_agent(self.name, config)
            self._open_agent: api.nixl_agent | None = agent
            self._handles: weakref.WeakSet[_Handle] = weakref.WeakSet()
            # Set when the destructor of the C++ object has run. The wrapper may go earlier.
            self._gone = gone = threading.Event()
            self._proof = weakref.ref(agent.agent, lambda _: gone.set())
            _check_backends(backends, agent)
            for backend in backends:
                options = dict(ucx_options) if backend == UCX else {}
                if options and engine_config:
                    options["engine_config"] = engine_config
                create = partial(agent.create_backend, backend, options)
                agent.get_plugin_params(backend)  # loads UCX, which the guard changes
                with guard():
                    past_stale_descriptors(create, bindings.nixlBackendError)

    def __repr__(self) -> str:
        return f"<NixlTransport {self.name}>"

    @property
    def _agent(self) -> api.nixl_agent:
        if self._open_agent is None:
            raise TransportError(f"NIXL agent {self.name} is closed")
        return self._open_agent

    def warm_up_pieces(self, peer: PeerName) -> int:
        del peer  # this many wake all threads of the backend; each has a connection of its own
        return self._warm_up_pieces

    def register(self, span: Span, memory: Memory, device: int) -> None:
        with _translated(f"registering {span.length} bytes of {memory}"):
            self._agent.register_memory([(span.address, span.length, device, "")], memory)

    def rehearse(self, span: Span, memory: Memory, device: int) -> None:
        """Read the first half of the memory into the second, from one temporary agent by another.

        The first `add_remote_agent` of a process takes 12 ms more than a later one, and its first
        read, beside UCX's own threads, up to 100 ms.
        """
        half = span.length // 2
        there, here = (
            np.array([[span.address + offset, half, device, half, 1]], dtype=np.uint64)
            for offset in (0, half)
        )
        try:
            with closing(self._make_another()) as reader, closing(self._make_another()) as other:
                for agent in (reader, other):
                    agent.register(span, memory, device)
                peer = reader.add_peer(other.metadata())
                lists = reader.prepare(here, memory, None), reader.prepare(there, memory, peer)
                until = time.monotonic() + REHEARSAL_S
                for count in (self._warm_up_pieces, 1):  # over all connections, and in one piece
                    pieces = np.zeros(count, dtype=np.int32)
                    read = reader.read(*lists, (pieces, pieces))
                    while not reader.poll(read):
                        other.progress()
                        _check_time(until)
        except TransportError as error:
            logger.info(
                "the first peer will take up to 0.1 s longer, because the rehearsal failed: %s",
                error,
            )

    def metadata(self) -> bytes:
        # 0.5 KiB, and about 44 bytes per registration.
        with _translated("packing the metadata"):
            return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> PeerName:
        """Takes 10 to 140 ms."""
        with _translated("adding a peer"):
            name = self._agent.add_remote_agent(metadata)
            return PeerName(name.decode() if isinstance(name, bytes) else name)

    def drop_peer(self, peer: PeerName) -> None:
        """Its connections stay open until the agent is closed."""
        with _translated("dropping a peer"):
            self._agent.remove_remote_agent(peer)

    def prepare(self, rows: Rows, memory: Memory, peer: PeerName | None) -> _Handle:
        # A strided list: microseconds for any number of blocks.
        with _translated(f"preparing {len(rows)} rows of {memory}"):
            native = self._agent.prep_xfer_dlist(
                peer or "NIXL_INIT_AGENT", np.ascontiguousarray(rows), memory
            )
        return self._keep(native)

    def read(self, local: _Handle, remote: _Handle, indices: tuple[Indices, Indices]) -> _Handle:
        # NIXL merges neighbouring pieces of dense rows itself.
        with _translated(f"reading {len(indices[0])} pieces"):
            native = self._agent.make_prepped_xfer(
                "READ", local.native, indices[0], remote.native, indices[1]
            )
        read = self._keep(native)
        try:
            with _translated(f"posting {len(indices[0])} pieces"):
                _is_done(self._agent.transfer(native))
        except PeerLost:
            raise
        except TransportError as error:  # a part of it may be in progress
            read.failure = str(error)
        return read

    def poll(self, read: _Handle) -> bool:
        if read.failure:
            raise TransportError(read.failure)
        with _translated("reading"):
            # Asking for the state also advances the read.
            if not _is_done(self._agent.check_xfer_state(read.native)):
                return False
            read.native.release()
        return True

    def stop(self, read: _Handle) -> bool:
        del read
        return False  # all of it is in progress, and NIXL cannot abort

    def progress(self) -> None:
        # NIXL has no call for progress alone. Asking for notifications makes UCX serve peers.
        with _translated("progressing"):
            self._agent.get_new_notifs()

    def close(self) -> None:
        """Destroy the agent, which takes 10 to 40 ms. Nothing else stops a read in progress.

        A TransportError says that a handle or a traceback still refers to the C++ object.
        """
        for handle in list(self._handles):
            handle.held = None
        self._open_agent = None
        if not self._gone.is_set():
            gc.collect()
        if not self._gone.is_set():
            raise TransportError(f"NIXL agent {self.name} is still referenced")

    def _keep(self, native: object) -> _Handle:
        handle = _Handle(native)
        self._handles.add(handle)
        return handle
