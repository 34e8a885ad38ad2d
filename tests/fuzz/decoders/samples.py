"""Valid values of any type of the wire, made from the types alone: new fields need no change."""

import re
from typing import Any, Final, TypeVar, get_args

from msgspec import inspect

from harness.local.caches import Cache, Sizes
from nixl_kv.geometry.layout import CacheLayout, Table
from nixl_kv.protocol.messages import KVSlice, Message

T = TypeVar("T")

KINDS: Final[tuple[type[Any], ...]] = get_args(Message)  # all messages of the wire

TEXTS: Final = ("127.0.0.1", "ab" * 16, "ab" * 32, "tcp://127.0.0.1:5600")
"""One of these fits each pattern that the wire has."""


def sample(kind: type[T], **given: Any) -> T:
    """A valid value with the given fields; others keep their default, or get a made-up value."""
    info: Any = inspect.type_info(kind)
    made_up = {
        field.name: _value(field.type)
        for field in info.fields
        if field.name not in given and field.required
    }
    return kind(**{**made_up, **given})


def _value(kind: inspect.Type) -> Any:
    match kind:
        case inspect.StructType():
            return sample(kind.cls)
        case inspect.DataclassType():
            return _dataclass(kind.cls)
        case inspect.VarTupleType():
            return (_value(kind.item_type),)
        case inspect.ListType():
            return [_value(kind.item_type)]
        case inspect.TupleType():
            return tuple(map(_value, kind.item_types))
        case inspect.DictType():
            return {_value(kind.key_type): _value(kind.value_type)}
        case inspect.UnionType():
            return _value(kind.types[0])
        case inspect.LiteralType():
            return kind.values[0]
        case _:
            return _scalar(kind)


def _dataclass(cls: type) -> Any:
    """Some of them have fields that must fit each other, or the bytes of numbers."""
    if cls is CacheLayout:
        return Cache(Sizes()).layout()
    if cls is Table:
        return Table.of([3, 1], first=2)
    return KVSlice("layer.0", 0, 1, 0) if cls is KVSlice else sample(cls)


def _scalar(kind: inspect.Type) -> Any:
    match kind:
        case inspect.AnyType():  # a text, because only texts can be hostile
            return TEXTS[0]
        case inspect.StrType():
            return next(text for text in TEXTS if re.search(kind.pattern or "", text))
        case inspect.BytesType():
            return b"\1" * (kind.min_length or 1)
        case inspect.IntType():
            return max(1, kind.ge or 0)
        case inspect.FloatType():
            return 1.0
        case inspect.BoolType():
            return True
        case _:
            raise TypeError(f"no sample of {kind}")
