"""Valid values of any of the wire's types, made from the types alone: new fields need no change."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar, get_args

import msgspec
from msgspec.inspect import Field, type_info

from nixl_kv.geometry.excerpts import Excerpt
from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span
from nixl_kv.protocol.messages import WIRE_VERSION, Message

T = TypeVar("T")

WINDOW = 256

KINDS: Final[tuple[type[Any], ...]] = get_args(Message)
"""All messages of the wire."""

# One of these fits each pattern that the wire has.
TEXTS: Final = ("127.0.0.1", "ab" * 16, "ab" * 32, "tcp://127.0.0.1:5600", "name", "")
SIMPLE: Final = (WIRE_VERSION, *TEXTS, 1, 0, 1.0, True, False, None, b"\1" * 16, b"\1" * 32)


def sample(kind: type[T], **given: Any) -> T:
    """A valid one; what is not given is made up, and what has a default is left at it.

    Raises:
        TypeError: if no value is found for a field: one must be given, or SIMPLE must grow.
    """
    info: Any = type_info(kind)
    made = {
        field.name: _value(field, kind)
        for field in info.fields
        if field.name not in given and field.required
    }
    return kind(**{**made, **given})


def _value(field: Field, owner: type) -> Any:
    hint = msgspec.structs.fields(owner) if issubclass(owner, msgspec.Struct) else ()
    annotation = next((f.type for f in hint if f.name == field.name), None)
    fitting = (found for found in _candidates(field) if _fits(found, annotation))
    for candidate in fitting:
        return msgspec.convert(candidate, annotation, strict=True)
    raise TypeError(f"{owner.__name__}.{field.name}: no sample fits")


def _fits(candidate: object, annotation: Any) -> bool:
    try:
        msgspec.convert(candidate, annotation, strict=True)
    except (msgspec.ValidationError, ValueError):
        return False
    return True


def _candidates(field: Field) -> Iterator[Any]:
    """Values to try: made of the field's own structs first, then simple ones and lists of them."""
    inner: Any = getattr(field.type, "item_type", field.type)
    cls = getattr(inner, "cls", None)
    if cls is CacheLayout:
        yield CacheMemory().layout()
    elif cls is Excerpt:
        yield (Excerpt("layer.0", 0, 1, 0),)
    elif cls is not None and issubclass(cls, msgspec.Struct):
        made = sample(cls)
        yield from (made, (made,))
    elif cls is not None:
        yield {name.name: 1 for name in inner.fields}
    yield from getattr(inner, "values", ())  # of a Literal
    yield from itertools.chain(SIMPLE, ((value,) for value in SIMPLE), ({},))


@dataclass(frozen=True)
class CacheMemory:
    """Where a cache stands, [layers, blocks, heads, tokens, content]; nothing is allocated."""

    address: int = 1 << 40
    layers: int = 3
    blocks: int = 10
    heads: int = 2
    tokens: int = 4
    content: int = 12  # K and V together, of one head of one token

    @property
    def shape(self) -> tuple[int, ...]:
        """All five."""
        return self.layers, self.blocks, self.heads, self.tokens, self.content

    @property
    def span(self) -> Span:
        """All of it."""
        return Span(self.address, math.prod(self.shape))

    def layout(self, first_head: int = 0) -> CacheLayout:
        """The last layer has a sliding window, and with it a group of its own."""
        layer, block, head, token = (math.prod(self.shape[axis:]) for axis in range(1, 5))
        half = self.content // 2
        parts = (Part(0, half), Part(half, half))
        regions = tuple(
            Region(
                f"layer.{n}",
                self.address + n * layer,
                block,
                head,
                token,
                first_head,
                self.heads,
                parts,
            )
            for n in range(self.layers)
        )
        groups = (
            Group(self.tokens, self.blocks, 1, regions[:-1]),
            Group(self.tokens, self.blocks, 1, regions[-1:], WINDOW),
        )
        return CacheLayout(groups, "uint8", "DRAM", 0, (self.span,))
