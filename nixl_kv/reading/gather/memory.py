"""GPU memory that one process of a host exports, and another maps.

A plain allocation has a CUDA IPC handle, which CUDA maps for reads and writes alone. An expandable
segment of torch has a file descriptor per piece, and the reader maps the pieces one behind the
other, for reads only. Both work within one PID namespace. With `share_dir` the owner hands out the
descriptors on a socket (`share`), which also works between containers.

A mapping outlives the owner of its memory, so a process that maps memory must watch the owner and
unmap the memory when it ends.

Imported only where the cache is in GPU memory, because CUDA's bindings come with torch.
"""

import contextlib
import ctypes
import os
import secrets
import select
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from cuda.bindings import driver

from nixl_kv.errors import TransportError, get_logger
from nixl_kv.geometry.layout import Span
from nixl_kv.geometry.plan import Ints
from nixl_kv.gpu import allocate
from nixl_kv.protocol import messages
from nixl_kv.reading.gather.share import SharedPieces, ShareServer, Tokens, boot_id

logger = get_logger(__name__)

# System call numbers on every Linux architecture. Some builds of Python lack these calls.
PIDFD_OPEN: Final = 434
PIDFD_GETFD: Final = 438

DESCRIPTOR: Final = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
PEER_ACCESS: Final = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
READ_ONLY: Final = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
READ_WRITE: Final = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
OF_DEVICE: Final = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
PINNED: Final = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
GRANULARITY: Final = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
RDMA: Final = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
HANDLE_BYTES: Final = 64  # CU_IPC_HANDLE_SIZE of cuda.h
HIDDEN: Final = (
    "the GPU of its owner is not visible here; give both containers the device nodes of both GPUs, "
    "and choose one with CUDA_VISIBLE_DEVICES"
)

# torch's allocation unit. The proof lies at this offset, so that a lost offset is noticed.
PROOF_OFFSET: Final = 512


class Shareable:
    """GPU memory of this process of which it can make descriptors."""

    def __init__(self, num_bytes: int, device: int) -> None:
        """Allocate `num_bytes` or more on a GPU, given by its ordinal.

        Raises:
            TransportError: if the GPU does not exist, lacks memory or cannot export any.
        """
        with _on_device(device, "allocating GPU memory to share"), contextlib.ExitStack() as undo:
            properties = driver.CUmemAllocationProp()
            properties.type = PINNED
            properties.requestedHandleTypes = DESCRIPTOR
            properties.location.type = OF_DEVICE
            properties.location.id = device
            if _call(driver.cuDeviceGetAttribute, RDMA, device)[0]:  # for readers on other hosts
                properties.allocFlags.gpuDirectRDMACapable = 1
            (unit,) = _call(driver.cuMemGetAllocationGranularity, properties, GRANULARITY)
            self.num_bytes = -(-num_bytes // int(unit)) * int(unit)
            (handle,) = _call(driver.cuMemCreate, self.num_bytes, properties, 0)
            # The mapping keeps the memory.
            with contextlib.ExitStack() as release:
                release.callback(driver.cuMemRelease, handle)
                (room,) = _call(driver.cuMemAddressReserve, self.num_bytes, 0, 0, 0)
                self.address = int(room)
                undo.callback(driver.cuMemAddressFree, self.address, self.num_bytes)
                _call(driver.cuMemMap, self.address, self.num_bytes, 0, handle, 0)
                undo.callback(driver.cuMemUnmap, self.address, self.num_bytes)
            _set_access(self.address, self.num_bytes, device, READ_WRITE)
            self._undo = undo.pop_all()

    def free(self) -> None:
        """Free it once nothing on the GPU uses it."""
        self._undo.close()


class Shared:
    """Memory of this process that it hands out on a socket in `share_dir`."""

    def __init__(
        self,
        spans: Iterable[Span],
        device: int,
        make_server: Callable[[int, Callable[[int], int]], ShareServer],
    ) -> None:
        """Share spans of memory of one GPU, given by its ordinal, and a proof beside them.

        `make_server` takes the number of pieces, and a function that makes a piece's descriptor.

        Raises:
            TransportError: if some memory cannot be exported, or the socket fails.
        """
        self._device = device
        with contextlib.ExitStack() as undo:
            memory_of_proof = Shareable(PROOF_OFFSET + messages.PROOF_BYTES, device)
            undo.callback(memory_of_proof.free)
            with _on_device(device, "exporting GPU memory"):
                proof = _write_proof(memory_of_proof.address)
                sizes: dict[int, int] = {}
                for span in (*spans, Span(proof.address, len(proof.value))):
                    sizes.update((base, size) for _, base, size in _cut(span))
                self._pieces = sorted(sizes.items())
                if len(self._pieces) > messages.MAX_ALLOCATIONS:
                    raise TransportError(
                        f"it has {len(self._pieces)} pieces; allowed: {messages.MAX_ALLOCATIONS}"
                    )
                for base, _ in self._pieces:
                    os.close(_export(base))
            self.server = make_server(len(self._pieces), self.export)
            undo.callback(self.server.close)
            pid = os.getpid()
            self.description = messages.Export(
                host=_processes(),
                pid=pid,
                started=_started(pid),
                allocations=tuple(
                    messages.Allocation(address=base, length=size) for base, size in self._pieces
                ),
                proof=proof,
                share=messages.Share(socket=self.server.socket_name),
            )
            self._undo = undo.pop_all()

    def export(self, piece: int) -> int:
        """Make a descriptor of a piece, which the caller closes.

        Raises:
            TransportError: if the piece cannot be exported any longer.
        """
        with _on_device(self._device, "exporting GPU memory"):
            return _export(self._pieces[piece][0])

    def close(self) -> None:
        self._undo.close()


class Exported:
    """Memory of this process that other processes of its PID namespace may map."""

    def __init__(self, spans: Iterable[Span], device: int) -> None:
        """Export spans of memory of one GPU, given by its ordinal, and a proof beside them.

        Raises:
            TransportError: if some memory has no handle, such as that of vLLM's sleep mode.
        """
        with _on_device(device, "exporting GPU memory"), contextlib.ExitStack() as undo:
            # The cache also is memory from torch.
            address, self._memory_of_proof = allocate(2 * PROOF_OFFSET, device)
            proof = _write_proof(address)
            allocations: dict[int, messages.Allocation] = {}
            for one in (
                one
                for span in [*spans, Span(proof.address, len(proof.value))]
                for one in _allocations(span)
            ):
                if one.descriptor >= 0:
                    undo.callback(os.close, one.descriptor)
                allocations.setdefault(one.address, one)  # spans may share a piece
            if len(allocations) > messages.MAX_ALLOCATIONS:
                raise TransportError(
                    f"it has {len(allocations)} pieces; allowed: {messages.MAX_ALLOCATIONS}"
                )
            pid = os.getpid()
            self.description = messages.Export(
                host=_processes(),
                pid=pid,
                started=_started(pid),
                allocations=tuple(one for _, one in sorted(allocations.items())),
                proof=proof,
            )
            self._undo = undo.pop_all()

    def close(self) -> None:
        self._undo.close()


def _write_proof(address: int) -> messages.Proof:
    """Write random bytes into memory that begins at an address."""
    value = secrets.token_bytes(messages.PROOF_BYTES)
    proof = messages.Proof(address=address + PROOF_OFFSET, value=value)
    _call(driver.cuMemcpyHtoD, proof.address, proof.value, len(proof.value))
    return proof


def _cut(span: Span) -> Iterator[tuple[int, int, int]]:
    """Cut a span by the allocations under it: where it begins in each, and their base and size."""
    address, end = span.address, span.address + span.length
    while address < end:
        base, size = map(int, _call(driver.cuMemGetAddressRange, address))
        yield address, base, size
        address = base + size


def _export(base: int) -> int:
    """Make a descriptor of the allocation that begins at an address."""
    (piece,) = _call(driver.cuMemRetainAllocationHandle, base)
    try:
        (descriptor,) = _call(driver.cuMemExportToShareableHandle, piece, DESCRIPTOR, 0)
    finally:
        driver.cuMemRelease(piece)
    return int(descriptor)


def _allocations(span: Span) -> Iterator[messages.Allocation]:
    """The parts of allocations that a span covers."""
    for address, base, size in _cut(span):
        length = min(span.address + span.length, base + size) - address
        error, handle = driver.cuIpcGetMemHandle(base)
        if error == driver.CUresult.CUDA_SUCCESS:
            # cuda-bindings 13.5 has no attribute for the bytes of a handle; earlier ones have.
            content = ctypes.string_at(handle.getPtr(), HANDLE_BYTES)
            yield messages.Allocation(
                address=address, length=length, offset=address - base, handle=content
            )
        else:
            yield messages.Allocation(address=base, length=size, descriptor=_export(base))


@dataclass(frozen=True)
class _Mapped:
    """`length` bytes at their owner's `address`, which are `at` another address here."""

    address: int
    length: int
    at: int


class Mapping:
    """Memory of another process, mapped for kernels on one GPU of this process."""

    def __init__(
        self,
        export: messages.Export,
        device: int,
        share_dir: str | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        """Map it for a GPU, given by its ordinal; takes 10 ms per allocation.

        Raises:
            TransportError: if this process does not see the owner, or cannot map the memory.
        """
        self._device = device
        self._undo = contextlib.ExitStack()
        self._must_be_read_only = export.share is not None
        with _on_device(device, f"mapping memory of process {export.pid}"), self._undo:
            if export.share is None:
                descriptors = self._see_process(export)
            elif share_dir is None:
                raise TransportError("its owner shares it in a directory, and share_dir is not set")
            else:
                one = SharedPieces(share_dir, export.share, tokens or Tokens())
                self._undo.callback(one.close)
                self.owner = one.socket.fileno()
                descriptors = one.descriptors(len(export.allocations))
            self._spans = [self._open(one) for one in export.allocations if one.handle]
            pieces = [one for one in export.allocations if not one.handle]
            with contextlib.closing(descriptors):
                self._spans += self._import(pieces, descriptors)
            self._spans.sort(key=lambda mapped: mapped.address)
            self._undo = self._undo.pop_all()

    def _see_process(self, export: messages.Export) -> Generator[int]:
        """Check that the owner is a process that this one sees, and get its descriptors."""
        if export.host != _processes() or export.pid == os.getpid():
            raise TransportError("its owner is in another PID namespace, or is this process")
        self.owner = _system_call(PIDFD_OPEN, export.pid, 0)
        self._undo.callback(os.close, self.owner)
        if _started(export.pid) != export.started:
            raise TransportError(f"its process {export.pid} has ended")
        return (
            _system_call(PIDFD_GETFD, self.owner, one.descriptor, 0)
            for one in export.allocations
            if not one.handle
        )

    @property
    def has_owner_ended(self) -> bool:
        """Whether the owner is gone. Its last bytes stay in the memory."""
        ended = select.poll()
        ended.register(self.owner, select.POLLIN)
        return bool(ended.poll(0))

    def close(self) -> None:
        with _on_device(self._device, "unmapping memory"):
            self._undo.close()

    def locate(self, first: Ints, last: Ints) -> Ints:
        """The local addresses of pieces that their owner has in `[first, last)`.

        Raises:
            TransportError: if a piece is not within contiguous mapped memory.
        """
        starts = np.array([mapped.address for mapped in self._spans], dtype=np.int64)
        ends = starts + np.array([mapped.length for mapped in self._spans], dtype=np.int64)
        number = np.searchsorted(starts, first, side="right") - 1
        # `last` is negative where it does not fit into an int64.
        if (number < 0).any() or (last > ends[number]).any() or (last <= first).any():
            raise TransportError("part of its cache lies outside of the memory that it exports")
        moved = np.array([mapped.at - mapped.address for mapped in self._spans], dtype=np.int64)
        located: Ints = first + moved[number]
        return located

    def _open(self, allocation: messages.Allocation) -> _Mapped:
        handle = driver.CUipcMemHandle()
        content = allocation.handle.ljust(HANDLE_BYTES, b"\0")
        ctypes.memmove(handle.getPtr(), content, HANDLE_BYTES)
        (base,) = _call(driver.cuIpcOpenMemHandle, handle, PEER_ACCESS)
        self._undo.callback(driver.cuIpcCloseMemHandle, base)
        _, size = map(int, _call(driver.cuMemGetAddressRange, base))
        if allocation.offset + allocation.length > size:
            end = allocation.offset + allocation.length
            raise TransportError(f"byte {end} of an allocation of {size} bytes is exported")
        return _Mapped(allocation.address, allocation.length, int(base) + allocation.offset)

    def _import(
        self, pieces: list[messages.Allocation], descriptors: Iterator[int]
    ) -> list[_Mapped]:
        # Pieces that are contiguous for their owner become contiguous here.
        lines: list[list[messages.Allocation]] = []
        if sorted(pieces, key=lambda one: one.address) != pieces:
            raise TransportError("its description is not in the order of addresses")
        for piece in pieces:
            if lines and lines[-1][-1].address + lines[-1][-1].length == piece.address:
                lines[-1].append(piece)
            else:
                lines.append([piece])
        return [self._import_line(line, descriptors) for line in lines]

    def _import_line(
        self, pieces: list[messages.Allocation], descriptors: Iterator[int]
    ) -> _Mapped:
        size = sum(piece.length for piece in pieces)
        (room,) = _call(driver.cuMemAddressReserve, size, 0, 0, 0)
        self._undo.callback(driver.cuMemAddressFree, room, size)
        at = start = int(room)
        for piece in pieces:
            descriptor = next(descriptors)
            try:
                error, handle = driver.cuMemImportFromShareableHandle(descriptor, DESCRIPTOR)
            finally:
                os.close(descriptor)
            if error == driver.CUresult.CUDA_ERROR_INVALID_DEVICE:
                raise TransportError(f"{error.name}: {HIDDEN}")
            if error != driver.CUresult.CUDA_SUCCESS:
                raise TransportError(f"cuMemImportFromShareableHandle: {error.name}")
            try:
                _call(driver.cuMemMap, at, piece.length, 0, handle, 0)
            finally:
                driver.cuMemRelease(handle)
            self._undo.callback(driver.cuMemUnmap, at, piece.length)
            at += piece.length
        try:
            _set_access(start, size, self._device, READ_ONLY)
        except TransportError as error:  # a driver that knows no such mapping
            if self._must_be_read_only:
                raise
            logger.info("another process's memory is mapped for writes too: %s", error)
            _set_access(start, size, self._device, READ_WRITE)
        return _Mapped(pieces[0].address, size, start)


def _set_access(address: int, size: int, device: int, flags: driver.CUmemAccess_flags) -> None:
    access = driver.CUmemAccessDesc()
    access.location.type = OF_DEVICE
    access.location.id = device
    access.flags = flags
    _call(driver.cuMemSetAccess, address, size, [access], 1)


def _system_call(number: int, *arguments: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    answer = int(libc.syscall(number, *arguments))
    if answer < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"system call {number}: {os.strerror(error)}")
    return answer


def _call(function: Any, *arguments: Any) -> tuple[Any, ...]:
    error, *values = function(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise TransportError(f"{function.__name__}: {error.name}")
    return tuple(values)


@contextlib.contextmanager
def _on_device(ordinal: int, doing: str) -> Iterator[None]:
    try:
        (device,) = _call(driver.cuDeviceGet, ordinal)
        (context,) = _call(driver.cuDevicePrimaryCtxRetain, device)
        try:
            _call(driver.cuCtxPushCurrent, context)
            try:
                yield
            finally:
                _call(driver.cuCtxPopCurrent)
        finally:
            driver.cuDevicePrimaryCtxRelease(device)
    except (OSError, ValueError, RuntimeError) as error:
        raise TransportError(f"{doing}: {error}") from error


def _processes() -> str:
    """Name the scope of a process id: this boot and this PID namespace."""
    return f"{boot_id()} {Path('/proc/self/ns/pid').readlink()}"


def _started(pid: int) -> int:
    """The clock tick at which a process started: field 22 of its `stat`."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(stat.rpartition(")")[2].split()[19])
