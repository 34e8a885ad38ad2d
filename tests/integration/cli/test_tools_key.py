"""The commands that a host with the tools' key may send to a running engine, and their limits."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import pytest

from harness.local.engine import LocalEngine
from nixl_kv.cli import client
from nixl_kv.config import Config
from nixl_kv.engine.trust import Trust
from nixl_kv.errors import ConfigError, TicketRefused, TransportError
from nixl_kv.ids import ANY_INCARNATION, EngineId, Nonce, endpoint_at
from nixl_kv.keys import Keys, find_user_key, read_any_key_file, read_key_file
from nixl_kv.protocol import messages
from nixl_kv.transport.base import NEEDS_ENGINE_KEY, FromEndpoint
from nixl_kv.transport.zmq import ZmqControl
from support.integration import MakeEngine, address
from support.nixl_kv_command import nixl_kv
from support.records import (
    ask,
    digest_request,
    landed,
    pack_request,
    reader,
    ready,
    release,
    renew,
)

TABLE: Final = [1, 2]
TOKENS: Final = 8


@pytest.fixture
def tools(tmp_path: Path, make_engine: MakeEngine) -> Path:
    """The file with the tools' key of this user's engines."""
    del make_engine
    path = tmp_path / "tools"
    result = nixl_kv(f"keygen --tools {path}")
    assert result.exit_code == 0, result.stderr
    return path


@pytest.fixture
def engine(make_engine: MakeEngine) -> LocalEngine:
    return make_engine("E", 2)


def test_the_engines_key_is_not_in_the_file(engine: LocalEngine, tools: Path) -> None:
    """Only what the gatekeeper knows as the tools', and a public key."""
    del engine
    keys, text = find_user_key(), tools.read_text(encoding="ascii")
    assert keys is not None
    assert tools.stat().st_mode & 0o777 == 0o600
    assert keys.tools.hex() in text
    for secret in (keys.tickets, keys.server, keys.client):
        assert secret.hex() not in text
    with pytest.raises(ConfigError, match="the tools' key; allowed for an engine"):
        read_key_file(tools)


def test_questions_are_answered(
    engine: LocalEngine, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, option = address(engine), f"--key-file {tools}"
    for command in (
        f"status --at {where}",
        f"ready --at {where}",
        f"plan --prefill-at {where} --decode-at {where}",
    ):
        result = nixl_kv(command, option)
        assert result.exit_code == 0, result.stderr
    report = json.loads(nixl_kv(f"doctor --peer {where} --json", option).stdout)
    assert "it accepts this host with the key" in json.dumps(report)
    monkeypatch.setenv("NIXL_KV_KEY", tools.read_text(encoding="ascii").strip())
    assert nixl_kv(f"ready --at {where}").exit_code == 0


def test_decode_reads_from_prefill_for_a_tool(make_engine: MakeEngine, tools: Path) -> None:
    """It learns how fast that was, and no address of memory."""
    prefill = make_engine("P", 2, roles="prefill")
    decode = make_engine("D", 1, roles="decode")
    options = f"--at {address(decode)} --peer {address(prefill)} --key-file {tools} --json"
    checks = {
        each["name"]: each for each in json.loads(nixl_kv("doctor", options).stdout)["checks"]
    }
    check = checks["engine 'D' reads 64 KiB from engine 'P'"]
    assert check["verdict"] == "ok", check
    status = client.engine_at(address(prefill), read_any_key_file(tools)).status
    assert isinstance(status, messages.Status)
    other = Trust.of(Config.parse({"insecure": True}, {"NIXL_KV_KEY": "5e" * 32}))
    with pytest.raises(TicketRefused, match="mac is wrong"):
        other.check({"nixl_kv_ticket": status.facts["probe_ticket"]})


def test_a_command_that_changes_an_engine_is_refused_with_advice(
    engine: LocalEngine, tools: Path
) -> None:
    option = f"--key-file {tools}"
    for command, name in (
        ("drain --at", "Drain"),
        ("drain --undo --at", "Drain"),
        ("set-weights new --at", "SetWeights"),
    ):
        result = nixl_kv(command, address(engine), option)
        assert result.exit_code == 2
        assert f"refused: {name} {NEEDS_ENGINE_KEY}" in result.stderr
    assert not engine.directory.is_draining


def test_a_plan_is_the_same_with_either_key(make_engine: MakeEngine, tools: Path) -> None:
    prefill, decode = address(make_engine("P", 2)), address(make_engine("D", 1))
    options = f"--prefill-at {prefill} --decode-at {decode} --json"
    assert nixl_kv("plan", options).stdout == nixl_kv("plan", options, f"--key-file {tools}").stdout


def numbers(record: Any) -> Iterator[int]:
    match record:
        case bool() | str() | bytes() | None:
            return
        case int():
            yield record
        case dict():
            for value in record.values():
                yield from numbers(value)
        case list():
            for value in record:
                yield from numbers(value)


def test_a_description_tells_tools_no_address_and_no_way_to_reach_memory(
    engine: LocalEngine, tools: Path
) -> None:
    shown = client.describe_at(address(engine), read_any_key_file(tools))
    whole = client.describe_at(address(engine), find_user_key())
    secret = [(rank.slots.address, rank.slots.count * 16) for rank in whole.ranks]
    secret += [(s.address, s.length) for rank in whole.ranks for s in rank.layout.spans]
    for rank, full in zip(shown.ranks, whole.ranks, strict=True):
        assert (rank.agent, rank.export, rank.ring, rank.listens) == (b"", None, None, ())
        assert full.agent
        assert rank.endpoint == full.endpoint
    for number in numbers(msgspec.msgpack.decode(messages.encode(shown))):
        assert not any(begin <= number < begin + length for begin, length in secret), hex(number)


LIFE: Final[dict[str, Any]] = {"incarnation": ANY_INCARNATION}
TO_RANK: Final[tuple[Any, ...]] = (
    ask(),
    digest_request(),
    pack_request(),
    renew(1),
    release(),
    messages.Admit(reader=reader(), sources=("192.0.2.1",), listens=(), **LIFE),
    messages.Leave(reader=reader(), **LIFE),
    messages.Paused(number=1, is_paused=True, **LIFE),
)
TO_ENGINE: Final[tuple[Any, ...]] = (
    messages.Drain(**LIFE),
    messages.SetWeights(weights="new", **LIFE),
    messages.Find(
        engine=EngineId("engine"),
        nonce=Nonce(32 * "a"),
        weights="",
        first_block=0,
        hashes=(bytes(messages.HASH_BYTES),),
        **LIFE,
    ),
    ready(),
    landed(),
)


def answer(keys: Any, endpoint: Any, message: Any) -> messages.KeyRefusal:
    control = ZmqControl(keys)
    try:
        control.send(endpoint, messages.encode(message))
        (item,) = control.poll(30.0)
    finally:
        control.close()
    assert isinstance(item, FromEndpoint)
    refusal = messages.decode_to_tool(item.payload)
    assert isinstance(refusal, messages.KeyRefusal)
    return refusal


def test_no_other_message_is_obeyed(engine: LocalEngine, tools: Path) -> None:
    """A host with the tools' key asks for no block, ends no offer, and opens no port."""
    assert {type(each) for each in TO_RANK} == set(get_args(messages.ToRank))
    questions: set[type] = {messages.Describe, messages.StatusRequest}
    assert {type(each) for each in TO_ENGINE} | questions == set(get_args(messages.ToEngine))
    keys = read_any_key_file(tools)
    engine.offer("p1", [TABLE], TOKENS)
    (rank, *_), where = engine.ranks, endpoint_at(engine.config.host, engine.directory.port)
    engine.wait(lambda: rank.parts.prefill.offers)
    (offer,) = rank.parts.prefill.offers.values()
    for message in TO_RANK:
        changed: dict[str, Any] = {"incarnation": rank.description.incarnation}
        if hasattr(message, "nonce"):
            changed["nonce"] = offer.nonce
        sent = msgspec.structs.replace(message, **changed)
        refusal = answer(keys, rank.description.endpoint, sent)
        assert refusal.reason == f"{type(message).__name__} {NEEDS_ENGINE_KEY}"
    assert offer.state.name == "OFFERED"
    assert offer.binding is None
    assert not rank.parts.admission.hosts
    for message in TO_ENGINE:
        refusal = answer(keys, where, message)
        assert refusal.reason == f"{type(message).__name__} {NEEDS_ENGINE_KEY}"
    assert not engine.directory.pop_hints()
    assert not engine.directory.is_draining


def test_the_tools_key_of_other_engines_is_none(engine: LocalEngine, tmp_path: Path) -> None:
    """Nor can a host with it pose as an engine: it cannot listen."""
    other, path = tmp_path / "key", tmp_path / "other"
    assert nixl_kv(f"keygen {other}").exit_code == 0
    assert nixl_kv(f"keygen --tools {path} --key-file {other}").exit_code == 0
    result = nixl_kv("status --at", address(engine), f"--key-file {path}")
    assert result.exit_code == 2
    assert "handshake failed" in result.stderr
    keys = read_any_key_file(path)
    assert not isinstance(keys, Keys)
    control = ZmqControl(keys)
    with pytest.raises(TransportError, match="a process with the tools' key cannot listen"):
        control.listen("127.0.0.1", 0)
    control.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--tools {new} --key-file {tools}", "the key is one for tools already"),
        ("{new} --key-file {tools}", "--key-file is given; allowed: only with --tools"),
        ("--tools {tools}", "allowed: the path of a new file"),
    ],
)
def test_a_tools_key_is_made_of_the_engines_key_alone(
    tools: Path, tmp_path: Path, options: str, words: str
) -> None:
    result = nixl_kv("keygen", options.format(new=tmp_path / "new", tools=tools))
    assert result.exit_code == 2
    assert words in result.stderr
    assert not (tmp_path / "new").exists()
