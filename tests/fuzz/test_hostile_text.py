"""Hostile text in each place of each message, ticket and answer: log lines stay lines.

A stranger must not be able to forge a line, to send a terminal commands, or to fill the disk.
"""

import base64
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
from nixl_kv.errors import NixlKVError, get_logger
from nixl_kv.ids import EngineId
from nixl_kv.protocol import messages
from nixl_kv.protocol.ticket import FIELD, WIRE_VERSION, SealedTicket, Ticket

FORGED = "CRITICAL vllm.engine: GPU memory is corrupt"
HOSTILE = (f"x\n{FORGED}\r\n\x1b[2J\u2028\u202e\x00", "A" * 300_000)
MAX_LINE = 10_000  # characters: a line may have several texts, and each of them is cut


def with_text(tree: Any, text: str) -> Iterator[Any]:
    """The tree with this text instead of each text in it, and of each key."""
    if isinstance(tree, str):
        yield text
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield {text if each == key else each: tree[each] for each in tree}
        yield from ({**tree, key: changed} for changed in with_text(value, text))
    for key, value in enumerate(tree) if isinstance(tree, list) else ():
        yield from ([*tree[:key], changed, *tree[key + 1 :]] for changed in with_text(value, text))


def hostile(tree: Any) -> Iterator[Any]:
    for text in HOSTILE:
        yield from with_text(tree, text)


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
    counts: dict[str, int] = {}  # of the texts in the messages of each kind

    def count(message: bytes) -> list[bytes]:
        kind, *_ = tree = msgspec.msgpack.decode(message)
        counts[kind] = max(counts.get(kind, 0), sum(1 for _ in with_text(tree, "")))
        return [message]

    def replace(message: bytes, kind: str, number: int) -> list[bytes]:
        tree = msgspec.msgpack.decode(message)
        # A longer text gets past no decoder, so ranks need not be tried with it.
        changed = list(with_text(tree, HOSTILE[0])) if tree[0] == kind else []
        return [msgspec.msgpack.encode(each) for each in changed[number : number + 1]] or [message]

    Exchange(path, count).run()
    for kind, many in counts.items():
        for number in range(many):
            Exchange(path, partial(replace, kind=kind, number=number)).run()
            check_log(caplog)
    assert sum(counts.values()) > 50


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


def check_error(decode: Callable[[Any], object], data: object) -> None:
    try:
        decode(data)
    except NixlKVError as error:
        check_text(str(error))


def test_reasons_that_are_valid_text_are_escaped_where_they_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A refusal's reason, a peer's name, and the fields that differ."""
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
