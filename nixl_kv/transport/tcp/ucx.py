"""Asks UCX which transports it takes between this process and another.

NIXL cannot be asked, and cannot tell which of its connections is which. So UCX is: by an endpoint
of our own, made by the library that NIXL has loaded, with NIXL's settings and the peer's address,
and closed at once. To begin with that costs 15 ms, and then 2 to 30 ms for each peer.
"""

import ctypes
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final, TypeAlias

from nixl_kv.errors import TransportError
from nixl_kv.geometry.layout import Memory
from nixl_kv.log_limit import get_logger

logger = get_logger(__name__)

TCP: Final = "tcp"
READS_DRAM_ALONE: Final = frozenset({"cma", "knem", "xpmem"})
"""Transports that read another process's memory by themselves, but nothing on a GPU."""

NIXL_CONFIG: Final = (
    "RNDV_THRESH=inf",
    "MAX_RMA_RAILS=2",
    "IB_PCI_RELAXED_ORDERING=try",
    "RC_FENCE=none",
)
"""What NIXL 1.5 sets by itself."""

ONLY_LOOPBACK: Final = "NET_DEVICES=lo"
"""Shared memory, CMA and CUDA IPC are no network devices to UCX, and stay."""

Guard: TypeAlias = Callable[[], AbstractContextManager[None]]

MAPPINGS: Final = Path("/proc/self/maps")
LIBRARY: Final = "/libucp"
ADDRESS_MARK: Final = b"t" + (3).to_bytes(8, "little") + b"UCX|c"
"""In NIXL's metadata, before the length (8 bytes) and the bytes of a UCX worker's address."""

OK: Final = 0
PEER_ERRORS: Final = 1  # UCP_ERR_HANDLING_MODE_PEER
CLOSE_NOW: Final = 0  # UCP_EP_CLOSE_MODE_FORCE
FEATURES: Final = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6  # RMA, AMO32, AMO64, AM, as NIXL
MAX_TRANSPORTS: Final = 64
CLOSING_STEPS: Final = 20
SPARE: Final = 1024
"""Bytes behind the fields of a struct that we know: UCX looks at those alone that we name."""


class _Params(ctypes.Structure):
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("features", ctypes.c_uint64),
        ("unused", ctypes.c_uint64 * 4),
        ("mt_workers_shared", ctypes.c_int),
        ("spare", ctypes.c_byte * SPARE),
    )


class _WorkerParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("thread_mode", ctypes.c_int),
        ("spare", ctypes.c_byte * SPARE),
    )


class _EndpointParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("address", ctypes.c_char_p),
        ("error_mode", ctypes.c_int),
        ("error_handler", ctypes.c_void_p),
        ("error_argument", ctypes.c_void_p),
        ("spare", ctypes.c_byte * SPARE),
    )


class _Entry(ctypes.Structure):
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("addresses", ctypes.c_char * 256),
        ("entries", ctypes.POINTER(_Entry)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
        ("spare", ctypes.c_byte * SPARE),
    )


CONTEXT_FIELDS: Final = 1 << 0 | 1 << 5  # features, mt_workers_shared
WORKER_FIELDS: Final = 1 << 0  # thread_mode
SERIALIZED: Final = 1  # UCS_THREAD_MODE_SERIALIZED: several threads, one after the other
STATUS_FUNCTIONS: Final = (
    "ucp_config_read",
    "ucp_init_version",
    "ucp_worker_create",
    "ucp_ep_create",
    "ucp_ep_query",
)
ENDPOINT_FIELDS: Final = 1 << 0 | 1 << 1 | 1 << 2  # address, error mode, error handler
TRANSPORTS_FIELD: Final = 1 << 3

_ErrorHandler = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)


def _ignore(*_: object) -> None:
    """What becomes of an endpoint that only tells its transports is of no interest."""


def worker_address(metadata: bytes) -> bytes:
    """The address of a NIXL agent's UCX worker.

    Raises:
        TransportError: if the metadata has none where it is known to be.
    """
    _, mark, rest = metadata.partition(ADDRESS_MARK)
    length = int.from_bytes(rest[:8], "little")
    address = rest[8 : 8 + length]
    if not mark or len(address) < max(1, length):
        raise TransportError("no UCX address is found in a NIXL agent's metadata")
    return address


def is_tcp(transports: Iterable[str], memory: Memory) -> bool:
    """Whether what these transports read of such memory goes over TCP."""
    alone = READS_DRAM_ALONE if memory != "DRAM" else frozenset()
    return set(transports) - alone <= {TCP}


class UcxTcpDetector:
    """See the module's head. Used on one thread at a time."""

    def __init__(self, engine_config: str, guard: Guard = nullcontext) -> None:
        """Do nothing yet.

        Args:
            engine_config: UCX's settings as the agent that reads has them.
            guard: entered while UCX opens its ports.
        """
        self._engine_config = engine_config
        self._guard = guard
        self._library: Any = None
        self._context, self._worker = ctypes.c_void_p(), ctypes.c_void_p()
        self._on_error = _ErrorHandler(_ignore)

    def is_tcp(self, metadata: bytes, memory: Memory) -> bool:
        """Whether such memory of an agent is read over TCP; it counts as such if nobody knows."""
        try:
            return is_tcp(self.transports(metadata), memory)
        except (TransportError, OSError, AttributeError) as error:  # also: another libucp, or none
            logger.warning("a peer is read in pieces, as over TCP: %s", error)
            return True

    def transports(self, metadata: bytes) -> tuple[str, ...]:
        """What UCX connects to an agent with, each perhaps several times.

        The first time a NIXL agent with a UCX backend has to exist in this process.

        Raises:
            TransportError: if UCX is not loaded or refuses, if there is no way to the agent, or if
                its metadata has no address.
        """
        if not self._worker:
            self._open()
        handler = ctypes.cast(self._on_error, ctypes.c_void_p)
        params = _EndpointParams(
            ENDPOINT_FIELDS, worker_address(metadata), PEER_ERRORS, handler, None
        )
        endpoint = ctypes.c_void_p()
        self._call("ucp_ep_create", self._worker, ctypes.byref(params), ctypes.byref(endpoint))
        try:
            return self._query(endpoint)
        finally:
            self._close_endpoint(endpoint)

    def close(self) -> None:
        """Let go of it."""
        if self._worker:
            self._library.ucp_worker_destroy(self._worker)
        if self._context:
            self._library.ucp_cleanup(self._context)
        self._context, self._worker = ctypes.c_void_p(), ctypes.c_void_p()

    def _open(self) -> None:
        """Make what endpoints need."""
        self._library = ctypes.CDLL(_loaded_library())
        self._library.ucp_ep_close_nb.restype = ctypes.c_ssize_t
        for name in STATUS_FUNCTIONS:
            getattr(self._library, name).restype = ctypes.c_int8  # `ucs_status_t` is one byte
        major, minor, release = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
        self._library.ucp_get_version(
            ctypes.byref(major), ctypes.byref(minor), ctypes.byref(release)
        )
        config = ctypes.c_void_p()
        self._call("ucp_config_read", None, None, ctypes.byref(config))
        for setting in (*NIXL_CONFIG, *filter(None, self._engine_config.split(","))):
            name, _, value = setting.partition("=")  # one that is unknown counts in NIXL as little
            self._library.ucp_config_modify(config, name.encode(), value.encode())
        params = _Params(CONTEXT_FIELDS, FEATURES, mt_workers_shared=1)
        try:
            self._call(
                "ucp_init_version",
                *(major, minor, ctypes.byref(params), config, ctypes.byref(self._context)),
            )
        finally:
            self._library.ucp_config_release(config)
        worker = _WorkerParams(WORKER_FIELDS, SERIALIZED)
        try:
            with self._guard():
                self._call(
                    "ucp_worker_create",
                    *(self._context, ctypes.byref(worker), ctypes.byref(self._worker)),
                )
        except TransportError:
            self.close()
            raise

    def _query(self, endpoint: ctypes.c_void_p) -> tuple[str, ...]:
        entries = (_Entry * MAX_TRANSPORTS)()
        attributes = _Attributes(
            field_mask=TRANSPORTS_FIELD,
            entries=entries,
            num_entries=MAX_TRANSPORTS,
            entry_size=ctypes.sizeof(_Entry),
        )
        self._call("ucp_ep_query", endpoint, ctypes.byref(attributes))
        named = entries[: attributes.num_entries]
        return tuple(entry.transport.decode() for entry in named if entry.transport)

    def _close_endpoint(self, endpoint: ctypes.c_void_p) -> None:
        request = self._library.ucp_ep_close_nb(endpoint, CLOSE_NOW)
        for _ in range(CLOSING_STEPS):
            self._library.ucp_worker_progress(self._worker)
        if request > 0:
            self._library.ucp_request_free(ctypes.c_void_p(request))

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != OK:
            raise TransportError(f"UCX's {function} has failed: {status}")


def _loaded_library() -> str:
    """The path of the libucp that this process has loaded."""
    try:
        mapped = MAPPINGS.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise TransportError(f"what is loaded cannot be seen: {error}") from error
    for line in mapped.splitlines():
        _, slash, rest = line.partition("/")
        if LIBRARY in rest:
            return slash + rest
    raise TransportError("UCX is not loaded")
