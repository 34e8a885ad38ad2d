"""A memory pool of torch whose memory other processes can map.

torch allocates with cudaMalloc, whose memory only processes of one PID and IPC namespace can map.
The pool of vLLM's sleep mode can be exported on H200. Elsewhere it may not: vLLM 0.33 asks for
descriptors only where the GPU knows fabric handles and the driver refuses them.
"""

import ctypes
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from nixl_kv.errors import TransportError, get_logger
from nixl_kv.gpu import translated
from nixl_kv.reading.gather.memory import Shareable

logger = get_logger(__name__)

# The functions of a pluggable allocator. Both take a size, a GPU's ordinal and a stream.
ALLOCATE: Final = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
FREE: Final = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p
)


class SharePool:
    """Tensors that a thread makes within `use` lie in memory that this process can export.

    The memory of dead tensors is free again once the pool is gone.
    """

    def __init__(self, device: int) -> None:
        """Make a pool for a GPU, given by its ordinal.

        Raises:
            TransportError: if torch, as it is configured, allocates elsewhere.
        """
        self._device = device
        segments = _Segments()
        functions = ALLOCATE(segments.allocate), FREE(segments.free)
        addresses = (ctypes.cast(each, ctypes.c_void_p).value for each in functions)
        with translated(TransportError, "making a memory pool"):
            # `torch.cuda.CUDAPluggableAllocator` would take the functions from a library file.
            make: Any = torch._C._cuda_customAllocator  # noqa: SLF001
            allocator = make(*addresses)
            # torch calls them for as long as the process has memory of the pool, and does not own
            # them.
            for each in (*functions, allocator):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
            self._pool = torch.cuda.MemPool(allocator)
            with self.use():
                probe = torch.empty(1, device=f"cuda:{device}")
        if not segments.has(probe.data_ptr()):
            raise TransportError("torch does not allocate in a memory pool")

    def use(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = torch.cuda.use_mem_pool(self._pool, self._device)
        return context


class _Segments:
    """The memory that torch has allocated. torch calls the methods, one at a time."""

    def __init__(self) -> None:
        self._allocated: dict[int, Shareable] = {}

    def has(self, address: int) -> bool:
        pieces = self._allocated.values()
        return any(one.address <= address < one.address + one.num_bytes for one in pieces)

    def allocate(self, num_bytes: int, device: int, stream: int | None) -> int | None:
        del stream
        try:
            one = Shareable(num_bytes, device)
        except TransportError as error:
            logger.info("no memory to share: %s", error)
            return None  # torch frees its unused memory, and tries again
        self._allocated[one.address] = one
        return one.address

    def free(self, address: int, num_bytes: int, device: int, stream: int | None) -> None:
        del num_bytes, stream
        one = self._allocated.pop(address, None)
        if one is not None:
            torch.cuda.synchronize(device)  # kernels may still use it
            one.free()
