"""Runs a function before UCX listens on a TCP socket.

UCX listens while NIXL makes an agent, and handles connections at once: a stranger who tries all
ports meanwhile has its PUT executed (8 of 8 agents, tests/integration/test_ports.py), although the
socket gets a filter as soon as the agent is made. No setting of UCX 1.23 or NIXL delays that, or
limits the hosts; delete this file when one does, or with `ports.py`. Meanwhile this replaces the
address of `listen` in UCX's own table of imported functions (the GOT of an ELF library), for
the life of the process. Other libraries have tables of their own.

NIXL makes an agent on the calling thread and without Python's lock, so the function, which needs
the lock, gets it.
"""

import ctypes
import re
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

from nixl_kv.errors import get_logger

logger = get_logger(__name__)

MAPS: Final = Path("/proc/self/maps")
LIBRARY: Final = re.compile(r"lib(?:ucs|uct|plugin_UCX)[^/]*\.so")
"""UCX's base library, or one that contains it."""
FUNCTION: Final = b"listen"

# ELF for 64 bits, as in elf.h.
MAGIC: Final = b"\x7fELF\x02"
DYNAMIC: Final = 2
SYMBOL_BYTES, RELOCATION_BYTES, HEADER_BYTES = 24, 24, 56
STRINGS, SYMBOLS = 5, 6
TABLES: Final = ((23, 2), (7, 8))  # relocations of calls, and all others: address and size
PAGE: Final = 4096
READ_WRITE: Final = 3

# Gets a descriptor.
BeforeListening: TypeAlias = Callable[[int], None]

_libc: Final = ctypes.CDLL(None, use_errno=True)
_FORM: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, use_errno=True)
_functions: dict[int, BeforeListening] = {}  # by the thread that makes an agent
_replaced: set[int] = set()  # entries of tables


@contextmanager
def before_listening(function: BeforeListening) -> Iterator[None]:
    """Call `function` on this thread before UCX listens, within the block.

    UCX's library must be loaded. Without a table to change, nothing is called.
    """
    _replace()
    thread = threading.get_ident()
    _functions[thread] = function
    try:
        yield
    finally:
        del _functions[thread]


def _listen(descriptor: int, backlog: int) -> int:
    function = _functions.get(threading.get_ident())
    if function is not None:
        try:
            function(descriptor)
        except Exception:
            logger.exception("a socket of UCX cannot be prepared")
    return int(_libc.listen(descriptor, backlog))


_own_listen: Final = _FORM(_listen)  # for ever: UCX may call it at any time


def _replace() -> None:
    """Change the tables of libraries that were loaded since the last call."""
    address = ctypes.cast(_own_listen, ctypes.c_void_p).value
    with suppress(OSError, ValueError):
        for entry in _entries():
            if entry not in _replaced:
                _make_writable(entry)
                ctypes.c_uint64.from_address(entry).value = address or 0
                _replaced.add(entry)


def _entries() -> list[int]:
    """The addresses where UCX's libraries keep the address of `listen`."""
    bases: dict[str, int] = {}
    for line in MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and LIBRARY.search(words[5].rpartition("/")[2]):  # noqa: PLR2004
            begin = int(words[0].partition("-")[0], 16)
            bases[words[5]] = min(begin, bases.get(words[5], begin))
    return [entry for base in bases.values() for entry in _entries_of(base)]


def _entries_of(base: int) -> Iterator[int]:
    """In a library that is loaded at `base`: its dynamic section leads to all tables."""
    header = ctypes.string_at(base, 64)
    if not header.startswith(MAGIC):
        return
    (headers,), (count,) = (
        struct.unpack_from("<Q", header, 32),
        struct.unpack_from("<H", header, 56),
    )
    dynamic: dict[int, int] = {}
    for number in range(count):
        kind, _, _, at = struct.unpack_from("<IIQQ", _bytes(base + headers, number, HEADER_BYTES))
        if kind == DYNAMIC:
            dynamic = _dynamic(base + at)
    if not {STRINGS, SYMBOLS} <= dynamic.keys():
        return
    # The loader has added `base` to these addresses on some architectures.
    strings, symbols = (_at(base, dynamic[tag]) for tag in (STRINGS, SYMBOLS))
    for table, size in TABLES:
        for number in range(dynamic.get(size, 0) // RELOCATION_BYTES):
            relocation = _bytes(_at(base, dynamic[table]), number, RELOCATION_BYTES)
            offset, info = struct.unpack_from("<QQ", relocation)
            (name,) = struct.unpack_from("<I", _bytes(symbols, info >> 32, SYMBOL_BYTES))
            if ctypes.string_at(strings + name) == FUNCTION:
                yield base + offset


def _dynamic(address: int) -> dict[int, int]:
    found: dict[int, int] = {}
    while True:
        tag, value = struct.unpack("<QQ", ctypes.string_at(address, 16))
        if not tag:
            return found
        found[tag] = value
        address += 16


def _bytes(table: int, number: int, size: int) -> bytes:
    return ctypes.string_at(table + number * size, size)


def _at(base: int, address: int) -> int:
    return address if address >= base else base + address


def _make_writable(entry: int) -> None:
    """The loader may have made the table read-only (RELRO)."""
    page = ctypes.c_void_p(entry // PAGE * PAGE)
    arguments: tuple[Any, ...] = (page, ctypes.c_size_t(PAGE), READ_WRITE)
    if _libc.mprotect(*arguments):
        raise OSError(ctypes.get_errno(), "mprotect")
