"""Two engines to compare: such as numbers describe, or such as run."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from nixl_kv.cli.options import EngineOptions, ModelOptions
from nixl_kv.errors import ConfigError, NixlKVError, TransportError
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.shapes import EngineShape, ModelShape, layouts
from nixl_kv.keys import Keys, read_key_file
from nixl_kv.protocol.messages import (
    WIRE_VERSION,
    Describe,
    Description,
    Refusal,
    decode_answer,
    encode,
)
from nixl_kv.protocol.ticket import ANY
from nixl_kv.transport.control import Control, Lost, Received

ANSWER_TIMEOUT_S: Final = 5.0

FIELDS: Final[Mapping[str, str]] = {
    "tp": "tp",
    "pp": "pp",
    "block": "block_size",
    "blocks": "num_blocks",
    "layout": "order",
    "per-entry": "blocks_per_entry",
    "memory": "memory",
}
"""What an engine's numbers are called on the command line, and in an `EngineShape`."""

TEXTS: Final = frozenset(("order", "memory"))


@dataclass(frozen=True)
class Engine:
    """One of the two: what it is, in words, what it says of its model, its ranks' caches."""

    words: str
    facts: Mapping[str, str]
    layouts: tuple[CacheLayout, ...]


def running(options: EngineOptions) -> bool:
    """Whether the engines are to be asked.

    Raises:
        ValueError: unless either both run, or neither does.
    """
    cut, run = (options.prefill, options.decode), (options.prefill_at, options.decode_at)
    if all(run) and not any(cut):
        return True
    if all(cut) and not any(run):
        return False
    raise ValueError(
        "allowed: --prefill and --decode with a model's numbers, or --prefill-at and --decode-at"
    )


def check_no_model(options: ModelOptions) -> None:
    """Running engines know their model.

    Raises:
        ValueError: names the first option of a model.
    """
    given = [field.name for field in fields(options) if getattr(options, field.name) is not None]
    if given:
        option = given[0].replace("_", "-")
        raise ValueError(f"--{option} is given; allowed: no model's numbers with running engines")


def planned(numbers: str, model: ModelShape, *, option: str, blocks: int) -> Engine:
    """An engine that need not exist.

    Raises:
        ValueError: names the option and what is wrong with it.
    """
    try:
        shape = engine_shape(numbers, blocks)
        caches = tuple(layouts(model, shape))
    except ValueError as error:
        raise ValueError(f"{option} {numbers}: {error}") from error
    words = f"TP{shape.tp}, PP{shape.pp}, {shape.order}, {cache_words(caches[0])}"
    return Engine(words, {}, caches)


def engine_shape(numbers: str, blocks: int) -> EngineShape:
    """Of "tp=2,block=16"; what is left out is as in `EngineShape`, but for the blocks.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """
    found: dict[str, str | int] = {"num_blocks": blocks}
    for item in filter(None, numbers.split(",")):
        name, _, value = item.partition("=")
        if name not in FIELDS:
            raise ValueError(f"{name!r} is no field; allowed: {', '.join(FIELDS)}")
        field = FIELDS[name]
        if field not in TEXTS and not value.isdecimal():
            raise ValueError(f"{name} is {value!r}; allowed: a number")
        found[field] = value if field in TEXTS else int(value)
    return EngineShape(**found)  # type: ignore[arg-type]


def cache_words(cache: CacheLayout) -> str:
    """Blocks and memory, of each group where groups differ."""
    blocks = {(group.entry_size, group.num_entries) for group in cache.groups}
    words = " and ".join(f"{count:,} blocks of {size} tokens" for size, count in sorted(blocks))
    return f"{words} in {cache.memory}"


def asked(where: str, *, option: str, key_file: Path | None) -> Engine:
    """An engine that runs; it answers those who have its key.

    Raises:
        ValueError: names the option, the address, and what went wrong.
    """
    host, _, port = where.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{option} is {where!r}; allowed: HOST:PORT")
    try:
        keys = None if key_file is None else read_key_file(key_file)
    except ConfigError as error:
        raise ValueError(f"--{str(error).replace('_', '-', 1)}") from error
    try:
        description = ask(f"tcp://{where}", keys)
    except NixlKVError as error:
        raise ValueError(f"{option} {where}: {error}") from error
    caches = tuple(rank.layout for rank in description.ranks)
    shape = description.shape
    words = f"{description.engine}, TP{shape.tp}, PP{shape.pp}, {cache_words(caches[0])}"
    return Engine(words, description.model, caches)


def ask(endpoint: str, keys: Keys | None = None) -> Description:
    """What an engine says of itself.

    Raises:
        NixlKVError: if nobody answers, or not with a description.
    """
    control = Control(keys)
    try:
        control.send(endpoint, encode(Describe(WIRE_VERSION, ANY, "any")))
        return _wait(control)
    finally:
        control.close()


def _wait(control: Control) -> Description:
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while (left := deadline - time.monotonic()) > 0:
        for item in control.poll(left):
            return _description(item)
    raise TransportError(f"no answer within {ANSWER_TIMEOUT_S:g} s")


def _description(item: Received) -> Description:
    """The first thing that comes from the only endpoint is the answer, or its loss."""
    if isinstance(item, Lost):
        raise TransportError(item.reason)
    message = decode_answer(item.payload)
    if isinstance(message, Refusal):
        raise TransportError(f"refused: {message.reason}")
    if not isinstance(message, Description):
        raise TransportError(f"answered with {type(message).__name__}")
    return message
