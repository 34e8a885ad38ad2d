"""Engines of two releases side by side, as while a fleet is upgraded: over real sockets.

The other one is a copy of this package with another wire version, in a process of its own.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec
import pytest

from nixl_kv.cli import client
from nixl_kv.errors import ForeignVersion
from nixl_kv.ids import Nonce, endpoint_at
from nixl_kv.keys import read_key_file, write_key_file
from nixl_kv.protocol.ticket import FIELD, WIRE_VERSION, Ticket, context_hash
from support.nixl_kv_command import nixl_kv
from support.other_version import OTHER_VERSION, copy_package
from support.records import ENGINE_LIFE, PREFILL, hex32
from support.scheduled_engine import HOST, TOKENS, EngineProcess, ScheduledEngine, engine_process

Engine: TypeAlias = ScheduledEngine | EngineProcess


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("key") / "key"
    write_key_file(path)
    return str(path)


@pytest.fixture(scope="module")
def ours(key_file: str) -> Iterator[ScheduledEngine]:
    engine = ScheduledEngine("ours", key_file)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def theirs(key_file: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    package = copy_package(tmp_path_factory.mktemp("package"))
    with engine_process("theirs", key_file, package) as engine:
        about = engine.about()
        assert about["version"] == OTHER_VERSION
        assert Path(about["file"]).is_relative_to(package)
        yield engine


@pytest.fixture(params=["ours", "theirs"])
def prefill(request: pytest.FixtureRequest, ours: Engine, theirs: Engine) -> Engine:
    return ours if request.param == "ours" else theirs


@pytest.fixture
def decode(prefill: Engine, ours: Engine, theirs: Engine) -> Engine:
    """The one of the other version."""
    return theirs if prefill is ours else ours


def test_a_request_that_crosses_is_computed_at_once_and_its_blocks_come_free(
    prefill: Engine, decode: Engine
) -> None:
    params = prefill.offer("p1")
    spoken, understood = prefill.about()["version"], decode.about()["version"]
    assert decode.ask("d1", params) == (
        f"kv_transfer_params: {FIELD} is of wire version {spoken}; this engine speaks {understood}"
    )
    assert decode.matched("d1") == [0, False]
    assert prefill.offer_end("p1") == "unclaimed"


@pytest.mark.parametrize("name", ["ours", "theirs"])
def test_each_version_understands_itself(name: str, ours: Engine, theirs: Engine) -> None:
    engine = {"ours": ours, "theirs": theirs}[name]
    assert engine.ask("d3", engine.offer("p3")) is None
    assert engine.matched("d3") == [len(TOKENS) - 1, True]
    engine.finish("d3")
    assert engine.offer_end("p3") in ("aborted", "not_needed")


def test_an_engine_that_was_upgraded_since_its_ticket_says_so_at_once(
    ours: ScheduledEngine, theirs: EngineProcess, key_file: str
) -> None:
    """The ticket is of our version, but where it leads another one listens by now."""
    nonce = Nonce(hex32(77))
    ticket = Ticket(
        host=HOST,
        port=theirs.about()["port"],
        nonce=nonce,
        engine=PREFILL,
        incarnation=ENGINE_LIFE,
        num_tokens=len(TOKENS),
        context=context_hash(nonce, TOKENS, []),
    )
    assert ours.ask("d4", ticket.params(read_key_file(key_file).tickets)) is None
    failure = ours.failure("d4")
    assert failure is not None
    assert f"it speaks wire version {OTHER_VERSION}; this side speaks {WIRE_VERSION}" in failure


def test_a_tool_says_that_an_engine_or_a_rank_is_of_another_version(
    ours: ScheduledEngine, theirs: EngineProcess, key_file: str
) -> None:
    """The rank listens where one did that was described."""
    keys, about = read_key_file(key_file), theirs.about()
    words = f"it speaks wire version {OTHER_VERSION}; this side speaks {WIRE_VERSION}"
    with pytest.raises(ForeignVersion, match=words):
        client.describe(endpoint_at(HOST, about["port"]), keys)
    described = ours.local.description
    rank = msgspec.structs.replace(described.ranks[0], endpoint=about["rank"])
    described = msgspec.structs.replace(described, ranks=(rank,))
    ((_, status),) = client.rank_statuses(described, keys)
    assert str(status) == words


def test_doctor_names_both_versions_and_the_upgrade(theirs: Engine, key_file: str) -> None:
    where = f"{HOST}:{theirs.about()['port']}"
    report = json.loads(nixl_kv(f"doctor --json --peer {where} --key-file {key_file}").stdout)
    (answer,) = (check for check in report["checks"] if check["name"] == "answer")
    words = f"it speaks wire version {OTHER_VERSION}; this side speaks {WIRE_VERSION}"
    assert (answer["verdict"], words in answer["detail"]) == ("error", True)
    assert answer["fix"].startswith("finish the upgrade")
