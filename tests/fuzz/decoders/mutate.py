"""Mutations of bytes, and of trees as msgpack and JSON have them.

Mutating a tree keeps the rest of the message valid, so that the mistake passes the first check. No
field is known here: a message that gets new fields is mutated in them as well.
"""

import contextlib
import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any, Final

Tree = Any
"""What a decoder without types makes of an input: lists, dicts and scalars."""

Path = tuple[Any, ...]

MAX_BYTES: Final = 2 << 20
"""No mutation makes more of anything: the question is what a small message can do."""

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
NESTED: Final = (b"\x91", b"\x81\xa1a", b"[", b'{"a":')  # one level each, in msgpack and in JSON


# --- bytes


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """One change somewhere."""
    start = rng.randint(0, len(data))
    end = rng.randint(start, len(data))
    new = b""
    match rng.choice(("flip", "overwrite", "cut", "insert", "repeat", "nest", "number")):
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
        case "nest":
            new, end = rng.choice(NESTED) * rng.choice(DEPTHS), start
        case _:
            new = _number(rng)
            end = start + len(new)
    return (data[:start] + new + data[end:])[:MAX_BYTES]


def _number(rng: random.Random) -> bytes:
    """A length or an offset, in either byte order."""
    size = rng.choice((1, 2, 4, 8))
    value: int = rng.choice(INTEGERS) % (1 << 8 * size)
    return value.to_bytes(size, "little" if rng.getrandbits(1) else "big")


# --- trees


def mutate_tree(rng: random.Random, tree: Tree) -> Tree:
    """One change of one node, or the same change of all nodes that are at the like place."""
    path = _random_path(rng, tree)
    changed = _changed(rng, tree, path)
    places = [path]
    if _chance(rng, 30):
        places = list(itertools.islice(_like_places(tree, path), MAX_PLACES))
    for place in places:
        tree = _replaced(tree, place, changed)
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


def _node_at(tree: Tree, path: Path) -> Tree:
    for key in path:
        tree = tree[key]
    return tree


def _like_places(tree: Tree, path: Path, before: Path = ()) -> Iterator[Path]:
    """Where the same field is, in all elements of the same lists."""
    if len(path) <= 1:
        yield (*before, *path)
        return
    is_list = isinstance(tree, list) and all(isinstance(node, list | dict) for node in tree)
    for key in range(len(tree)) if is_list else path[:1]:
        with contextlib.suppress(TypeError, LookupError):  # other elements may have other fields
            yield from _like_places(tree[key], path[1:], (*before, key))


def _replaced(tree: Tree, path: Path, value: Tree) -> Tree:
    """A copy with another value there; unchanged if an earlier change took the place away."""
    if not path:
        return copy.copy(value)
    mutated = copy.copy(tree)
    try:
        mutated[path[0]] = _replaced(mutated[path[0]], path[1:], value)
    except (TypeError, LookupError):
        return tree
    return mutated


def _changed(rng: random.Random, tree: Tree, path: Path) -> Tree:
    """Another value for the node there."""
    if _chance(rng, 10):
        return _node_at(tree, _random_path(rng, tree))
    node = None if _chance(rng, 10) else _node_at(tree, path)
    match node:
        case None | bool():
            return rng.choice(OTHERS)
        case int():
            return _integer(rng, node)
        case float():
            return rng.choice(FLOATS)
        case str():
            where, text = rng.randint(0, len(node)), rng.choice(TEXTS)
            return text if _chance(rng, 50) else node[:where] + text + node[where + 1 :]
        case bytes():
            return mutate_bytes(rng, node)
        case list():
            return _list(rng, node)
        case dict():
            return _dict(rng, node)


def _integer(rng: random.Random, node: int) -> int:
    """Often a small step away: near what is right is where checks are missing."""
    near = (node + 1, node - 1, node * 2, node // 2, -node, node + 4096, node ^ 1 << 40)
    value: int = rng.choice(near if _chance(rng, 50) else INTEGERS)
    return value


def _list(rng: random.Random, node: list[Tree]) -> Tree:
    """An element less, or one of them several times."""
    if not node:
        return [rng.choice(OTHERS)]
    where = rng.randrange(len(node))
    copies = 0 if _chance(rng, 40) else rng.choice(COPIES)
    if copies:
        copies = max(2, min(copies, MAX_BYTES // (_size(node[where]) + 1)))
    return node[:where] + [node[where]] * copies + node[where + 1 :]


def _dict(rng: random.Random, node: dict[Tree, Tree]) -> Tree:
    """A key less, or some more."""
    kept = dict(node)
    if kept and _chance(rng, 50):
        del kept[rng.choice(list(kept))]
        return kept
    more = rng.choice((1, 1, 1, 300, 10_000))
    return kept | {f"{rng.choice(TEXTS)[:40]}{n}": rng.choice(OTHERS) for n in range(more)}


def _size(tree: Tree) -> int:
    """About how many bytes it has when encoded."""
    if isinstance(tree, dict):
        return sum(_size(key) + _size(value) for key, value in tree.items()) + 3
    if isinstance(tree, list):
        return sum(map(_size, tree)) + 3
    return len(tree) + 3 if isinstance(tree, str | bytes) else 5
