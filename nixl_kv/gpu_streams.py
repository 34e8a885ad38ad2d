"""Streams of a GPU, which any thread may use.

This module is imported only where the cache is in GPU memory.
"""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def on(stream: torch.cuda.Stream) -> Iterator[None]:
    """What is launched, allocated or recorded here is this stream's, and its GPU's.

    A new thread is on the first GPU. To leave another one's stream for that of the first would make
    a context there, which takes 115 ms, once, and memory: to leave a GPU does not.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield
