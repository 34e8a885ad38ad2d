"""What torch and Triton raise, as an error of this project's own."""

import contextlib
from collections.abc import Iterator
from subprocess import SubprocessError
from typing import Final

import triton

from nixl_kv.errors import NixlKVError

UNABLE: Final = (AssertionError, OSError, RuntimeError, SubprocessError, triton.TritonError)
"""No memory, no compiler, nowhere to keep what it made, no CUDA."""


@contextlib.contextmanager
def translated(kind: type[NixlKVError], doing: str) -> Iterator[None]:
    """What torch and Triton raise becomes a `kind`."""
    try:
        yield
    except UNABLE as error:
        raise kind(f"{doing}: {type(error).__name__}: {error}") from error
