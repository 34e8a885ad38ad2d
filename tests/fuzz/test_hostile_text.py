"""Hostile text in each place of each message, ticket and answer: log lines stay lines.

A stranger must not be able to forge a line, to send a terminal commands, or to fill the disk.
"""

import base64
import copy
import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import nixl_kv
from fuzz.decoders.exchange import Exchange
from fuzz.decoders.samples import KINDS, sample
from harness.local.engine import HOST_PATHS
from nixl_kv.engine.event_log import EventLog
from nixl_kv.errors import NixlKVError, get_logger
from nixl_kv.ids import EngineId
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.ticket import FIELD, WIRE_VERSION, SealedTicket, Ticket

FORGED = "CRITICAL vllm.engine: GPU memory is corrupt"
HOSTILE = (f"x\n{FORGED}\r\n\x1b[2J\u2028\u202e\x00", "A" * 300_000)
MAX_LINE = 10_000  # characters: a line may have several texts, and each of them is cut


def text_places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Each text in a tree, and each key; `...` at the end of a path stands for the key itself."""
    if isinstance(tree, str):
        yield path
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield (*path, key, ...)
        yield from text_places(value, (*path, key))
    for key, value in enumerate(tree) if isinstance(tree, list) else ():
        yield from text_places(value, (*path, key))


def with_text(tree: Any, path: tuple[Any, ...], text: str) -> Any:
    changed = copy.deepcopy(tree)
    is_key = path[-1:] == (...,)
    *parents, last = path[:-1] if is_key else path
    node = changed
    for key in parents:
        node = node[key]
    if is_key:
        node[text] = node.pop(last)
    else:
        node[last] = text
    return changed


def check_text(text: str) -> None:
    assert text.isprintable(), repr(text[:500])
    assert len(text) <= MAX_LINE, text[:500]


def check_log(caplog: pytest.LogCaptureFixture) -> None:
    """Each record is one line; the lines of a traceback are indented."""
    formatter = logging.Formatter("%(message)s")
    for record in caplog.records:
        for number, line in enumerate(formatter.format(record).split("\n")):
            check_text(line)
            assert not number or line.startswith(" "), line
    caplog.clear()


@pytest.mark.parametrize("path", HOST_PATHS)
def test_no_text_of_a_message_makes_more_than_a_bounded_printable_line(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "nixl_kv")
    places: dict[tuple[Any, ...], None] = {}

    def record(message: bytes) -> list[bytes]:
        kind, *rest = tree = msgspec.msgpack.decode(message)
        places.update(dict.fromkeys((kind, *place) for place in text_places(tree) if rest))
        return [message]

    def replaced(message: bytes, kind: str, place: tuple[Any, ...]) -> list[bytes]:
        tree = msgspec.msgpack.decode(message)
        if tree[0] != kind:
            return [message]
        # A longer text gets past no decoder, so ranks need not be tried with it.
        return [msgspec.msgpack.encode(with_text(tree, place, HOSTILE[0]))]

    Exchange(path, record).run()
    for kind, *place in places:
        Exchange(path, partial(replaced, kind=kind, place=tuple(place))).run()
        check_log(caplog)
    assert len(places) > 50


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_text_of_a_message_gets_into_the_error_of_its_decoder(kind: type) -> None:
    decoders = [decode for name, decode in vars(messages).items() if name.startswith("decode_to")]
    for tree in hostile(msgspec.msgpack.decode(messages.encode(sample(kind)))):
        for decode in (*decoders, messages.decode_answer):
            check_error(decode, msgspec.msgpack.encode(tree))


def test_no_text_of_a_ticket_gets_into_its_error() -> None:
    for key in (None, b"k" * 32):
        for params in hostile(sample(Ticket).params(key)):
            check_error(open_ticket, params)
    for tree in hostile(msgspec.to_builtins(msgspec.structs.astuple(sample(Ticket)))):
        payload = base64.urlsafe_b64encode(msgspec.msgpack.encode(tree)).decode().rstrip("=")
        check_error(open_ticket, {FIELD: f"{WIRE_VERSION}..{payload}"})


def open_ticket(params: dict[str, Any]) -> None:
    sealed = SealedTicket.parse(params)
    sealed.head()
    sealed.open()


def hostile(tree: Any) -> Iterator[Any]:
    """The tree with each hostile text in each place of a text."""
    for place in text_places(tree):
        for text in HOSTILE:
            yield with_text(tree, place, text)


def check_error(decode: Callable[[Any], object], data: object) -> None:
    try:
        decode(data)
    except NixlKVError as error:
        check_text(str(error))


def test_reasons_that_are_valid_text_are_escaped_where_they_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of a refusal, what a peer is called, and what differs."""
    caplog.set_level(logging.DEBUG, "nixl_kv")
    text = HOSTILE[0] + "B" * 400

    def refuse(description: Any) -> messages.Message:
        life = description.incarnation
        return messages.Refusal(incarnation=life, engine=EngineId("prefill"), reason=text)

    def describe(description: Any) -> messages.Message:
        return msgspec.structs.replace(description, engine=text[:200], model={text[:200]: text})

    def changed(change: Callable[[Any], messages.Message], message: bytes) -> list[bytes]:
        if b"Description" not in message[:16]:
            return [message]
        return [messages.encode(change(messages.decode_answer(message)))]

    for change in (refuse, describe):
        Exchange("direct", partial(changed, change)).run()
    assert any(FORGED in record.getMessage() for record in caplog.records)
    assert any("KV not loaded" in record.getMessage() for record in caplog.records)
    check_log(caplog)


def test_an_unexpected_error_with_hostile_text_forges_no_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = get_logger("nixl_kv.test")
    logger.critical("a bug", exc_info=ValueError(HOSTILE[0]))
    assert FORGED in caplog.text
    check_log(caplog)


def test_every_module_logs_through_the_filter() -> None:
    direct = re.compile(r"logging\.getLogger\((?!\"(nixl_kv|vllm)\"\))|from logging import")
    paths = Path(nixl_kv.__file__).parent.rglob("*.py")
    assert {path.name for path in paths if direct.search(path.read_text("utf-8"))} == {"errors.py"}


def test_a_story_is_of_single_lines() -> None:
    log = EventLog()
    for text in HOSTILE:
        log.record(events.Transition("r", "peer", "A", "B", text, 0))
    for line in log.story_lines(events.RequestId("r"), 10):
        check_text(line)
