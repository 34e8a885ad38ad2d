"""Hostile text in each place of each message, ticket and answer: log lines stay lines.

A stranger must not be able to forge a line, to send a terminal commands, or to fill the disk.
"""

import copy
import logging
import re
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import msgspec
import pytest

import nixl_kv
from fuzz.decoders import inputs
from fuzz.decoders.rank import (
    ENDPOINTS,
    LIFE,
    PREFILL,
    BrokenPromiseError,
    RankUnderTest,
    map_memory,
)
from fuzz.decoders.samples import KINDS, sample
from fuzz.decoders.targets import NoInputError, Target, targets
from nixl_kv.errors import NixlKVError, get_logger
from nixl_kv.protocol import messages

FORGED = "CRITICAL vllm.engine: GPU memory is corrupt"
HOSTILE = (f"x\n{FORGED}\r\n\x1b[2J\u2028\u202e\x00", "A" * 300_000)
MAX_LINE = 10_000
"""Characters: a line may have several texts, and each of them is cut."""

WIRE = [target for target in targets() if target.name not in ("Config.parse", "geometry")]


@pytest.fixture(scope="module", autouse=True)
def memory() -> None:
    map_memory()


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
    *parents, last = path[:-1] if path[-1] is ... else path
    node = reduce(getitem, parents, changed)
    if path[-1] is ...:
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
        first, *others = formatter.format(record).split("\n")
        check_text(first)
        for line in others:
            check_text(line)
            assert line.startswith(" "), line
    caplog.clear()


@pytest.mark.parametrize("target", WIRE, ids=lambda target: target.name)
def test_no_text_of_a_message_or_ticket_makes_more_than_a_bounded_printable_line(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "nixl_kv")
    tried = 0
    for seed in target.seeds:
        tree = target.parse(seed)
        for path in text_places(tree):
            # What is too long gets past no decoder, so ranks need not be tried with it.
            for text in HOSTILE[:1] if target.name.endswith(" rank") else HOSTILE:
                tried += 1
                allowed: Any = (*target.allowed, BrokenPromiseError, NoInputError)
                try:
                    target.run(target.write(with_text(tree, path, text)))
                except NixlKVError as error:
                    check_text(str(error))
                except allowed:
                    pass
                check_log(caplog)
    assert tried > 1


def test_reasons_that_are_valid_text_are_escaped_where_they_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of a refusal, what a peer is called, and what differs."""
    caplog.set_level(logging.DEBUG, "nixl_kv")
    text = HOSTILE[0] + "B" * 400
    refusal = sample(messages.Refusal, incarnation=LIFE, engine=PREFILL, reason=text)
    described = sample(messages.Description, engine=text[:200], model={text[:200]: text})
    for answer in (refusal, described):
        with RankUnderTest() as rank:
            rank.answer(ENDPOINTS[0], messages.encode(answer))
            rank.finish()
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
    """So that a new line in the log needs no thought."""
    package = Path(nixl_kv.__file__).parent
    direct = re.compile(r"logging\.getLogger\((?!\"(nixl_kv|vllm)\"\))|from logging import")
    files = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if direct.search(path.read_text(encoding="utf-8"))
    }
    assert files == {"errors.py"}


def test_all_kinds_of_messages_are_tried() -> None:
    """The seeds have one of each, so a new kind is tried as well."""
    tags = {msgspec.msgpack.decode(seed)[0] for seed in inputs.every_message()}
    assert {kind.__name__ for kind in KINDS} <= tags
