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

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import nixl._api as api
import nixl._bindings as bindings
import numpy as np

from nixl_kv.errors import PeerLost, TransportError
from nixl_kv.geometry.layout import Memory, Span
from nixl_kv.transport.base import Indices, PeerName, Rows

UCX_OPTIONS: Final = {
    "ucx_error_handling_mode": "peer",
    "num_threads": "2",
    "split_batch_size": "16",
}
"""With threads, `read` returns at once; a batch of fewer merged pieces is copied by the caller."""

_PEER_ERRORS: Final = (bindings.nixlRemoteDisconnectError, bindings.nixlCancelledError)
_ERRORS: Final = tuple(
    getattr(bindings, name)
    for name in dir(bindings)
    if name.startswith("nixl") and name.endswith("Error")
)


@contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Turn NIXL's exceptions, which have no base of their own, into ours."""
    try:
        yield
    except _PEER_ERRORS as error:
        raise PeerLost(f"{doing}: {error}") from error
    except (*_ERRORS, ValueError, RuntimeError) as error:
        raise TransportError(f"{doing}: {type(error).__name__}: {error}") from error


class NixlTransport:
    """One NIXL agent. See `Transport`."""

    def __init__(
        self,
        backends: Sequence[str] = ("UCX",),
        *,
        ucx_options: Mapping[str, str] = UCX_OPTIONS,
        engine_config: str = "",
    ) -> None:
        """Create an agent with a fresh name; takes about half a second.

        Args:
            backends: NIXL's names of them.
            ucx_options: parameters of the UCX backend.
            engine_config: UCX's own settings, `NAME=value,...` without its prefix.

        Raises:
            TransportError: if a backend cannot be created.
        """
        self.name = f"nixl-kv-{secrets.token_hex(8)}"
        config = api.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW,
        )
        with _translated("creating the agent"):
            self._agent: Any = api.nixl_agent(self.name, config)
            for backend in backends:
                options = dict(ucx_options) if backend == "UCX" else {}
                if options and engine_config:
                    options["engine_config"] = engine_config
                self._agent.create_backend(backend, options)

    def __repr__(self) -> str:
        """The agent's name."""
        return f"<NixlTransport {self.name}>"

    def register(self, span: Span, memory: Memory, device: int) -> None:
        """Register memory with every backend that can use it."""
        with _translated(f"registering {span.length} bytes of {memory}"):
            self._agent.register_memory([(span.address, span.length, device, "")], memory)

    def metadata(self) -> bytes:
        """The agent's metadata: 0.5 KiB, and about 44 bytes per registration."""
        with _translated("packing the metadata"):
            return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> PeerName:
        """Load a peer's metadata; 10 to 140 ms."""
        with _translated("adding a peer"):
            name = self._agent.add_remote_agent(metadata)
        return PeerName(name.decode() if isinstance(name, bytes) else str(name))

    def drop_peer(self, peer: PeerName) -> None:
        """Remove a peer's metadata and connections."""
        with _translated("dropping a peer"):
            self._agent.remove_remote_agent(peer)

    def prepare(self, rows: Rows, memory: Memory, peer: PeerName | None) -> Any:
        """Prepare a strided list: microseconds for any number of blocks."""
        with _translated(f"preparing {len(rows)} rows of {memory}"):
            return self._agent.prep_xfer_dlist(
                peer or "NIXL_INIT_AGENT", np.ascontiguousarray(rows), memory
            )

    def read(self, local: Any, remote: Any, indices: tuple[Indices, Indices]) -> Any:
        """Make and post one READ; NIXL merges neighbours of dense rows itself."""
        with _translated(f"reading {len(indices[0])} pieces"):
            handle = self._agent.make_prepped_xfer("READ", local, indices[0], remote, indices[1])
            self._agent.transfer(handle)
        return handle

    def poll(self, read: Any) -> bool:
        """Ask for the state, which also lets the read progress; a handle that ended is released."""
        with _translated("reading"):
            state = self._agent.check_xfer_state(read)
            if state == "PROC":
                return False
            read.release()
        return True

    def progress(self) -> None:
        """Let UCX serve peers. There is no call for it alone; asking for notifications does it."""
        with _translated("progressing"):
            self._agent.get_new_notifs()

    def close(self) -> None:
        """Destroy the agent; the only thing that surely stops a read that is under way."""
        self._agent = None
