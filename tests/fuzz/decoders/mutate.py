"""Mutations of messages, as bytes and as the trees that msgpack has.

A mutated tree keeps the rest of the message valid, so the mistake passes the first check. No field
is known here: a message that gets new fields is mutated in them as well.
"""

import contextlib
import copy
import itertools
import random
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from typing import Any, Final

import msgspec

Tree = Any  # the result of a decoder without types: lists, dicts and scalars

Path = tuple[Any, ...]

PLAIN_BYTES: Final = 0.25  # share of mutations that know nothing of the input's structure
MAX_BYTES: Final = 2 << 20  # that a mutation repeats: the fuzzer looks for harm by small messages
LARGE: Final = 100_000  # a message of more bytes is mutated no further
MAX_PLACES: Final = 100
INTEGERS: Final = (
    *(sign * 2**power + by for power in (0, 4, 8, 15, 16, 20, 24, 31, 32) for sign in (1, -1)
      for by in (-1, 0, 1)),
    *(2**power + by for power in (53, 61, 62, 63) for by in (-1, 0)),
    2**64 - 1, -(2**63),
)  # fmt: skip
FLOATS: Final = (0.0, -0.0, 1e-320, 1e308, -1.0, float("inf"), float("-inf"), float("nan"))
TEXTS: Final = (
    "", "\0", "a" * 300, "a" * 70_000, "é\u202e\U0001f600", "%s%n{0}", "../../etc/passwd", "::1",
    "127.0.0.1", "0.0.0.0/0", "fe80::1%lo", "1" * 5000, "0" * 32, "f" * 32, "tcp://[::]:0", "\n",
)  # fmt: skip
OTHERS: Final = (None, True, False, 0, -1, 1.5, "", b"", "text", b"\xff" * 16)
COPIES: Final = (2, 2, 2, 3, 3, 3, 65, 300, 1025, 20_000)
DEPTHS: Final = (10, 200, 2_000, 20_000)
NESTED: Final = (b"\x91", b"\x81\xa1a")  # one level each


def mutate(rng: random.Random, message: bytes) -> bytes:
    for _ in range(rng.randint(1, 3)):
        if len(message) < LARGE:
            message = _mutate_once(rng, message)
    return message


def _mutate_once(rng: random.Random, message: bytes) -> bytes:
    if rng.random() > PLAIN_BYTES:
        with contextlib.suppress(ValueError, OverflowError, TypeError, RecursionError):
            return msgspec.msgpack.encode(mutate_tree(rng, msgspec.msgpack.decode(message)))
    return mutate_bytes(rng, message)


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    start = rng.randint(0, len(data))
    end = rng.randint(start, len(data))
    match rng.choice(("flip", "overwrite", "cut", "insert", "repeat", "nest")):
        case "flip":
            bit = 1 << rng.randrange(8)
            new, end = bytes(byte ^ bit for byte in data[start : start + 1]), start + 1
        case "overwrite":
            new = rng.randbytes(rng.choice((1, 2, 4, 8, 40)))
            end = start + len(new)
        case "cut":
            new = b""
        case "insert":
            new, end = rng.randbytes(rng.choice((1, 3, 100))), start
        case "repeat":
            new = data[start:end] * rng.choice((2, 11, 1001))
        case _:
            new, end = rng.choice(NESTED) * rng.choice(DEPTHS), start
    return (data[:start] + new + data[end:])[:MAX_BYTES]


def mutate_tree(rng: random.Random, tree: Tree) -> Tree:
    """Change one node of a tree, or all nodes at like places in the same way."""
    path = _random_path(rng, tree)
    changed = copy.deepcopy(_changed(rng, tree, path))  # it may contain the place
    places = [path]
    if _chance(rng, 30):
        count = min(MAX_PLACES, 1 + MAX_BYTES // len(msgspec.msgpack.encode(changed)))
        places = list(itertools.islice(_like_places(tree, path), count))
    for place in places:
        if not place:
            return changed
        with contextlib.suppress(TypeError, LookupError):  # an earlier change took it away
            reduce(getitem, place[:-1], tree)[place[-1]] = changed
    return tree


def _chance(rng: random.Random, percent: int) -> bool:
    return rng.random() * 100 < percent


def _random_path(rng: random.Random, tree: Tree) -> Path:
    """Some node, by walking down: where a list is long, few of its elements are chosen."""
    path: Path = ()
    while isinstance(tree, dict | list) and tree and not _chance(rng, 15):
        key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        path, tree = (*path, key), tree[key]
    return path


def _like_places(tree: Tree, path: Path, before: Path = ()) -> Iterator[Path]:
    """Where the same field is, in all elements of the same lists."""
    if len(path) <= 1:
        yield (*before, *path)
        return
    is_list = isinstance(tree, list) and all(isinstance(node, list | dict) for node in tree)
    for key in range(len(tree)) if is_list else path[:1]:
        with contextlib.suppress(TypeError, LookupError):  # other elements may have other fields
            yield from _like_places(tree[key], path[1:], (*before, key))


def _changed(rng: random.Random, tree: Tree, path: Path) -> Tree:
    """Another value for the node there."""
    if _chance(rng, 10):
        return reduce(getitem, _random_path(rng, tree), tree)
    match None if _chance(rng, 10) else reduce(getitem, path, tree):
        case None | bool():
            return rng.choice(OTHERS)
        case int() as node:
            # Often a small step away: missing checks are near valid values.
            near = (node + 1, node - 1, node * 2, node // 2, -node, node + 4096, node ^ 1 << 40)
            return rng.choice(near if _chance(rng, 50) else INTEGERS)
        case float():
            return rng.choice(FLOATS)
        case str() as node:
            where, text = rng.randint(0, len(node)), rng.choice(TEXTS)
            return text if _chance(rng, 50) else node[:where] + text + node[where + 1 :]
        case bytes() as node:
            return mutate_bytes(rng, node)
        case list() as node:
            return _list(rng, node)
        case dict() as node:
            return _dict(rng, node)


def _list(rng: random.Random, node: list[Tree]) -> Tree:
    """An element less, or one of them several times."""
    if not node:
        return [rng.choice(OTHERS)]
    where = rng.randrange(len(node))
    copies = 0 if _chance(rng, 40) else rng.choice(COPIES)
    if copies:
        size = len(msgspec.msgpack.encode(node[where]))
        copies = max(2, min(copies, MAX_BYTES // size))
    return node[:where] + [node[where]] * copies + node[where + 1 :]


def _dict(rng: random.Random, node: dict[Tree, Tree]) -> Tree:
    """A key less, or some more."""
    kept = dict(node)
    if kept and _chance(rng, 50):
        del kept[rng.choice(list(kept))]
        return kept
    more = rng.choice((1, 1, 1, 300, 10_000))
    return kept | {f"{rng.choice(TEXTS)[:40]}{n}": rng.choice(OTHERS) for n in range(more)}
