"""Mutations: of bytes, and of trees as msgpack and JSON have them.

A tree is what a decoder without types makes of a message: lists, dicts and scalars. Mutating it
keeps the rest of the message valid, so that what is wrong gets past the first check. No field is
known here: a message that grows is mutated in its new fields as well.
"""

import contextlib
import copy
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

Tree = Any
Path = tuple[Any, ...]

MAX_BYTES = 2 << 20
"""No mutation makes more of anything: what is asked is what a small message can do."""

MOST_ALIKE = 100

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
DEEP: Final = (10, 200, 2_000, 20_000)
NESTED: Final = (b"\x91", b"\x81\xa1a", b"[", b'{"a":')  # one level each, in msgpack and in JSON


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """One change somewhere."""
    step = rng.choice((_flip, _overwrite, _cut, _insert, _repeat, _nest, _number))
    return step(rng, data)[:MAX_BYTES]


def mutate_tree(rng: random.Random, tree: Tree) -> Tree:
    """One change of one node, or the same change of all nodes that stand alike in the tree."""
    path = _path(rng, tree)
    changed = _changed(rng, tree, path)
    places = itertools.islice(_alike(tree, path), MOST_ALIKE) if _chance(rng, 30) else [path]
    for place in list(places):
        tree = _replaced(tree, place, changed)
    return tree


def _chance(rng: random.Random, percent: int) -> bool:
    return rng.random() * 100 < percent


def _flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data or b"\0")
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _overwrite(rng: random.Random, data: bytes) -> bytes:
    start = rng.randint(0, len(data))
    new = rng.randbytes(rng.choice((1, 2, 4, 8, 40)))
    return data[:start] + new + data[start + len(new) :]


def _cut(rng: random.Random, data: bytes) -> bytes:
    start, end = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    return data[:start] + data[end:]


def _insert(rng: random.Random, data: bytes) -> bytes:
    start = rng.randint(0, len(data))
    return data[:start] + rng.randbytes(rng.choice((1, 3, 100))) + data[start:]


def _repeat(rng: random.Random, data: bytes) -> bytes:
    start, end = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    return data[:end] + data[start:end] * rng.choice((1, 10, 1000)) + data[end:]


def _nest(rng: random.Random, data: bytes) -> bytes:
    start = rng.randint(0, len(data))
    return data[:start] + rng.choice(NESTED) * rng.choice(DEEP) + data[start:]


def _number(rng: random.Random, data: bytes) -> bytes:
    """A length or an offset, in either byte order, where one may stand."""
    size = rng.choice((1, 2, 4, 8))
    value = rng.choice(INTEGERS) % 2 ** (8 * size)
    start = rng.randint(0, len(data))
    order = rng.choice(("little", "big"))
    return data[:start] + value.to_bytes(size, order) + data[start + size :]  # type: ignore[arg-type]


def _path(rng: random.Random, tree: Tree) -> Path:
    """Some node, found by walking down: where a list is long, few of its elements are chosen."""
    path: Path = ()
    while isinstance(tree, dict | list) and tree and not _chance(rng, 15):
        key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        path, tree = (*path, key), tree[key]
    return path


def _at(tree: Tree, path: Path) -> Tree:
    for key in path:
        tree = tree[key]
    return tree


def _alike(tree: Tree, path: Path, done: Path = ()) -> Iterator[Path]:
    """Where the same field stands, in all elements of the same lists."""
    if len(path) == 1 or not path:
        yield (*done, *path)
        return
    every = isinstance(tree, list) and all(isinstance(node, list | dict) for node in tree)
    for key in range(len(tree)) if every else path[:1]:
        with contextlib.suppress(TypeError, LookupError):  # other elements are built otherwise
            yield from _alike(tree[key], path[1:], (*done, key))


def _replaced(tree: Tree, path: Path, value: Tree) -> Tree:
    """A copy with another value there; unchanged if an earlier change took the place away."""
    if not path:
        return copy.copy(value)
    made = copy.copy(tree)
    try:
        made[path[0]] = _replaced(made[path[0]], path[1:], value)
    except (TypeError, LookupError):
        return tree
    return made


def _changed(rng: random.Random, tree: Tree, path: Path) -> Tree:
    """Another value for the node there."""
    node = _at(tree, path)
    if _chance(rng, 10):
        return _at(tree, _path(rng, tree))
    if _chance(rng, 10):
        return rng.choice(OTHERS)
    change = next((change for kind, change in _CHANGES if isinstance(node, kind)), _other)
    return change(rng, node)


def _other(rng: random.Random, _node: Tree) -> Tree:
    return rng.choice(OTHERS)


def _integer(rng: random.Random, node: int) -> int:
    """Often a small step away: near what is right is where checks are missing."""
    near = (node + 1, node - 1, node * 2, node // 2, -node, node + 4096, node ^ 1 << 40)
    return rng.choice(near if _chance(rng, 50) else INTEGERS)


def _real(rng: random.Random, _node: float) -> float:
    return rng.choice(FLOATS)


def _text(rng: random.Random, node: str) -> str:
    where = rng.randint(0, len(node))
    spliced = node[:where] + rng.choice(TEXTS) + node[where + rng.randint(0, 2) :]
    return rng.choice((spliced, rng.choice(TEXTS)))


def _blob(rng: random.Random, node: bytes) -> bytes:
    return mutate_bytes(rng, node)


def _list(rng: random.Random, node: list[Tree]) -> Tree:
    """Fewer elements, other ones, or many more."""
    if not node:
        return [rng.choice(OTHERS)]
    where = rng.randrange(len(node))
    if _chance(rng, 40):
        return node[:where] + node[where + 1 :]
    times = rng.choice((2, 2, 2, 3, 3, 3, 65, 300, 1025, 20_000))
    times = max(2, min(times, MAX_BYTES // (_size(node[where]) + 1)))
    return node[:where] + [node[where]] * times + node[where + 1 :]


def _dict(rng: random.Random, node: dict[Tree, Tree]) -> Tree:
    """A key less, or some more."""
    kept = dict(node)
    if kept and _chance(rng, 50):
        del kept[rng.choice(list(kept))]
        return kept
    more = rng.choice((1, 1, 1, 300, 10_000))
    return kept | {f"{rng.choice(TEXTS)[:40]}{n}": rng.choice(OTHERS) for n in range(more)}


def _size(tree: Tree) -> int:
    """About how many bytes it takes when encoded."""
    if isinstance(tree, dict):
        return sum(_size(key) + _size(value) for key, value in tree.items()) + 3
    if isinstance(tree, list):
        return sum(map(_size, tree)) + 3
    return len(tree) + 3 if isinstance(tree, str | bytes) else 5


_CHANGES: Final[Sequence[tuple[type, Callable[[random.Random, Any], Tree]]]] = (
    (bool, _other),  # before int, which it is as well
    (int, _integer),
    (float, _real),
    (str, _text),
    (bytes, _blob),
    (list, _list),
    (dict, _dict),
)
