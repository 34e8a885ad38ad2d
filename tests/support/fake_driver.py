"""CUDA's driver without a GPU, for `reading.gather.memory`: allocations are files in memory.

`install` puts it in the place of `cuda.bindings.driver`. Functions return an error and values, as
the bindings do. Addresses are this process's own, so that tests can read and write there, and a
write to a read-only mapping ends the process. A descriptor works in every process of this host.
"""

# ruff: noqa: N802, N816 - the names are CUDA's
import ctypes
import enum
import mmap
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

UNIT = 1 << 16

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
PROT_NONE, MAP_FIXED, MAP_NORESERVE = 0, 0x10, 0x4000


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201


OK = CUresult.CUDA_SUCCESS
INVALID = CUresult.CUDA_ERROR_INVALID_VALUE


class _Names:
    """An enumeration of which the members' names are their values."""

    def __getattr__(self, name: str) -> str:
        return name


CUmemAllocationHandleType = CUipcMem_flags = CUmemAccess_flags = CUmemLocationType = _Names()
CUmemAllocationType = CUmemAllocationGranularity_flags = CUdevice_attribute = _Names()

handles: dict[int, tuple[int, int]] = {}
"""The descriptor and size of each allocation's handle."""
mapped: dict[int, tuple[int, int]] = {}
"""The size and the own handle of each mapping, by address."""
hidden: set[int] = set()
"""Inodes of memory on GPUs that this process does not see."""
FREE_BYTES = 1 << 40


def CUmemAllocationProp() -> SimpleNamespace:
    return SimpleNamespace(location=SimpleNamespace(), allocFlags=SimpleNamespace())


CUmemAccessDesc = CUmemAllocationProp


def _giving(*values: Any) -> Callable[..., tuple[Any, ...]]:
    """A function that returns these, whatever its arguments are."""
    return lambda *_: values


cuDeviceGet = cuDevicePrimaryCtxRetain = lambda ordinal: (OK, ordinal)
cuDeviceGetAttribute = _giving(OK, 1)
cuDevicePrimaryCtxRelease = cuCtxPushCurrent = _giving(OK)
cuCtxPopCurrent = _giving(OK, 0)
cuMemGetAllocationGranularity = _giving(OK, UNIT)
cuIpcGetMemHandle = _giving(INVALID, None)


def _new_handle(descriptor: int, size: int) -> int:
    handle = max(handles, default=0) + 1
    handles[handle] = descriptor, size
    return handle


def cuMemCreate(size: int, properties: Any, flags: int) -> tuple[Any, ...]:
    is_exportable = "POSIX_FILE_DESCRIPTOR" in properties.requestedHandleTypes
    if size % UNIT or flags or not is_exportable:
        return INVALID, None
    if size > FREE_BYTES:
        return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
    descriptor = os.memfd_create("gpu")
    os.ftruncate(descriptor, size)
    return OK, _new_handle(descriptor, size)


def cuMemRelease(handle: int) -> tuple[Any, ...]:
    os.close(handles.pop(handle)[0])
    return (OK,)


def _map(address: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    found = LIBC.mmap(address, size, protection, flags, descriptor, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return int(found)


def cuMemAddressReserve(size: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:
    del alignment, address, flags
    if size % UNIT:
        return INVALID, None
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return OK, _map(None, size, PROT_NONE, anonymous, -1)


def cuMemMap(address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
    descriptor, whole = handles[handle]
    if size != whole or offset or flags:
        return (INVALID,)
    _map(address, size, PROT_NONE, mmap.MAP_SHARED | MAP_FIXED, descriptor)
    mapped[address] = size, _new_handle(os.dup(descriptor), size)
    return (OK,)


def cuMemSetAccess(address: int, size: int, accesses: list[Any], count: int) -> tuple[Any, ...]:
    (access,) = accesses
    assert count == 1
    protection = mmap.PROT_READ
    if access.flags.endswith("READWRITE"):
        protection |= mmap.PROT_WRITE
    return (INVALID if LIBC.mprotect(address, size, protection) else OK,)


def cuMemUnmap(address: int, size: int) -> tuple[Any, ...]:
    whole, handle = mapped.pop(address)
    assert whole == size
    _map(address, size, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED, -1)
    return cuMemRelease(handle)


def cuMemAddressFree(address: int, size: int) -> tuple[Any, ...]:
    return (INVALID if LIBC.munmap(address, size) else OK,)


def _at(address: int) -> int | None:
    return next((base for base, (size, _) in mapped.items() if 0 <= address - base < size), None)


def cuMemGetAddressRange(address: int) -> tuple[Any, ...]:
    base = _at(address)
    return (OK, base, mapped[base][0]) if base is not None else (INVALID, None, None)


def cuMemRetainAllocationHandle(address: int) -> tuple[Any, ...]:
    base = _at(address)
    if base is None:
        return INVALID, None
    descriptor, size = handles[mapped[base][1]]
    return OK, _new_handle(os.dup(descriptor), size)


def cuMemExportToShareableHandle(handle: int, kind: str, flags: int) -> tuple[Any, ...]:
    del kind, flags
    return OK, os.dup(handles[handle][0])


def cuMemImportFromShareableHandle(descriptor: int, kind: str) -> tuple[Any, ...]:
    del kind
    status = os.fstat(descriptor)
    if status.st_ino in hidden:
        return CUresult.CUDA_ERROR_INVALID_DEVICE, None
    return OK, _new_handle(os.dup(descriptor), status.st_size)


def cuMemcpyHtoD(address: int, content: bytes, size: int) -> tuple[Any, ...]:
    ctypes.memmove(address, content, size)
    return (OK,)


def failing(name: str, error: CUresult) -> Any:
    """A function that fails always."""
    fail = _giving(error, None)
    fail.__name__ = name
    return fail


def install() -> None:
    """Let `from cuda.bindings import driver` import this module."""
    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver = sys.modules[__name__]
    sys.modules["cuda"] = sys.modules.get("cuda") or ModuleType("cuda")
    sys.modules["cuda.bindings"] = bindings
    sys.modules["cuda.bindings.driver"] = sys.modules[__name__]


def allocate(num_bytes: int) -> int:
    """Memory as in a piece of an expandable segment, by its address."""
    size = -(-num_bytes // UNIT) * UNIT
    properties = SimpleNamespace(requestedHandleTypes="POSIX_FILE_DESCRIPTOR")
    _, handle = cuMemCreate(size, properties, 0)
    _, address = cuMemAddressReserve(size, 0, 0, 0)
    cuMemMap(address, size, 0, handle, 0)
    cuMemSetAccess(address, size, [SimpleNamespace(flags="READWRITE")], 1)
    cuMemRelease(handle)
    return int(address)
