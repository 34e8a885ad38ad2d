"""Streams and errors of torch and Triton, for the modules that work on a cache in GPU memory.

No other module imports this one: it needs torch and Triton.
"""

import contextlib
from collections.abc import Iterator
from subprocess import SubprocessError
from typing import Final

import torch
import triton

from nixl_kv.errors import NixlKVError

UNABLE: Final = (AssertionError, OSError, RuntimeError, SubprocessError, triton.TritonError)
"""Errors of torch and Triton without memory, a compiler, a cache directory or CUDA."""


@contextlib.contextmanager
def translated(kind: type[NixlKVError], doing: str) -> Iterator[None]:
    """Turn errors of torch and Triton into errors of this kind."""
    try:
        yield
    except UNABLE as error:
        raise kind(f"{doing}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make a stream and its GPU current, on any thread."""
    # The first GPU is current in a new thread. To restore its stream while it is current would make
    # a context there: 115 ms once, and memory. So enter the device first, and leave it last.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield
