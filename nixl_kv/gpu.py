"""Streams and errors of torch and Triton, for the modules that work on a cache in GPU memory.

Import it only where the cache is in GPU memory: it needs torch and Triton.
"""

import contextlib
from collections.abc import Iterator
from subprocess import SubprocessError
from typing import Final

import torch
import triton

from nixl_kv.errors import NixlKVError, TransportError

UNABLE: Final = (AssertionError, OSError, RuntimeError, SubprocessError, triton.TritonError)
"""Errors of torch and Triton without memory, a compiler, a cache directory or CUDA."""


@contextlib.contextmanager
def translated(kind: type[NixlKVError], doing: str) -> Iterator[None]:
    try:
        yield
    except UNABLE as error:
        raise kind(f"{doing}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make a stream and its GPU current, on any thread."""
    # GPU 0 is current in a new thread. Restoring its stream there would create a CUDA context on it
    # (115 ms once, and memory). So enter the device first, and leave it last.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def make_current(device: int) -> None:
    """Let this thread use one GPU, and no other.

    The first GPU is current in a new thread. To destroy an event of another one would make a
    context on the first.

    Raises:
        TransportError: if the GPU cannot be used.
    """
    with translated(TransportError, f"using GPU {device}"):
        torch.cuda.set_device(device)


def allocate(num_bytes: int, device: int) -> tuple[int, object]:
    """Return the address of GPU memory, and the object that keeps it allocated.

    Raises:
        TransportError: if the GPU does not exist or lacks memory.
    """
    with translated(TransportError, f"allocating {num_bytes} bytes of GPU memory"):
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{device}")
    return memory.data_ptr(), memory
