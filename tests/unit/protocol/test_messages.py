"""Messages on the wire, and refused ones."""

import math
import re
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, Final, get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import inspect

from nixl_kv.errors import ForeignVersion, RemoteProtocolError
from nixl_kv.geometry.layout import CacheLayout, Stripe, Table
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.ids import ANY_INCARNATION, Endpoint, Nonce
from nixl_kv.protocol import messages
from nixl_kv.protocol.messages import (
    MAX_LISTED,
    Drain,
    Draining,
    Find,
    Found,
    Message,
    RankDescription,
    SetWeights,
    Status,
    StatusRequest,
    VersionRefusal,
    WeightsSet,
    encode,
)
from nixl_kv.protocol.ticket import Ticket
from support.records import (
    CLAIM,
    CONTEXT,
    ENGINE_LIFE,
    FENCE_TOKEN,
    HINT_KEY,
    NONCE,
    PREFILL,
    RANK_LIFE,
    READER,
    SUMS,
    ask,
    decode,
    deny,
    describe,
    description,
    digest_reply,
    digest_request,
    grant,
    hex32,
    landed,
    pack_reply,
    pack_request,
    pending,
    rank_description,
    reader,
    ready,
    recall,
    refusal,
    release,
    renew,
    renewed,
)

READER_WIRE = ["decode", hex32(0xD), 0]
TELLER_WIRE = ["decode", hex32(0xD00), 0]


def part(offset: int) -> dict[str, int]:
    return {"offset": offset, "length": 4, "count": 1, "stride": 0, "token_stride": 0}


LAYOUT_WIRE = {
    "groups": [
        {
            "block_size": 4,
            "num_blocks": 10,
            "blocks_per_entry": 1,
            "regions": [
                {
                    "layer": "layer.0",
                    "base": 4096,
                    "block_stride": 64,
                    "head_stride": 32,
                    "token_stride": 8,
                    "first_head": 0,
                    "num_heads": 2,
                    "parts": [part(0), part(4)],
                    "opaque": False,
                    "element": "uint8",
                    "scales": [],
                }
            ],
            "window": 0,
            "stripe": {"count": 1, "place": 0, "width": 1},
            "whole": False,
        }
    ],
    "memory": "DRAM",
    "device": 0,
    "spans": [{"address": 4096, "length": 1024}],
}
RANK_WIRE = [RANK_LIFE, "tcp://10.0.0.1:7000", b"agent", [65536, 64], LAYOUT_WIRE, None, None, []]
OFFER_WIRE = [NONCE, CLAIM, READER_WIRE]
TABLE_WIRE = {"first": 0, "ids": b"\7\0\0\0\3\0\0\0"}
LAYER_WIRE = ["layer.0", 0, 2]
SLICE_WIRE = {"layer": "layer.0", "first_head": 0, "end_head": 2, "begin": 0, "stripes": []}

FACTS = {"roles": "kv_both", "rank": 0, "uptime_s": 60.0, "events_since": None}
LISTS = {
    "loads": [{"request": "d1", "reads": [[0, "READING"], [1, "DONE"]], "late_in_s": -1.0}],
    "offers": [{"request": "p1", "num_tokens": 8, "ends_in_s": None}],
    "peers": [],
}


def status(**changed: Any) -> Status:
    values = {
        "incarnation": RANK_LIFE,
        "facts": FACTS,
        "totals": {"loads": 1},
        "lists": LISTS,
    }
    return Status(**{**values, **changed})


OFFER: Final = Nonce(hex32(0xF00D))


def find(**changed: Any) -> Find:
    values = {"engine": PREFILL, "nonce": NONCE, "weights": "step 8", "first_block": 4}
    hashes = (b"\1" * 32,)
    return Find(**{"incarnation": ENGINE_LIFE, "hashes": hashes, **values, **changed})


def found(**changed: Any) -> Found:
    values = {"nonce": NONCE, "num_blocks": 1, "offer": OFFER, "run": b"run", "epoch": 2}
    return Found(**{"incarnation": ENGINE_LIFE, "weights": "step 8", **values, **changed})


WIRE: dict[str, tuple[Message, list[Any]]] = {
    "describe": (describe(), ["Describe", 12, ENGINE_LIFE, "prefill"]),
    "description": (
        description(),
        [
            "Description",
            12,
            ENGINE_LIFE,
            "prefill",
            {"dtype": "bfloat16"},
            {"tp": 1, "pp": 1},
            [RANK_WIRE],
            {},
            None,
        ],
    ),
    "refusal": (refusal("no"), ["Refusal", 12, ENGINE_LIFE, "prefill", "no"]),
    "ask": (
        ask(number=5, readers=(0, 1)),
        ["Ask", 12, RANK_LIFE, NONCE, CLAIM, CONTEXT, READER_WIRE, 5, [0, 1], False, b"", None],
    ),
    "ask for found blocks": (
        ask(found=b"run", directory=Endpoint("tcp://10.0.0.9:5600")),
        [
            *["Ask", 12, RANK_LIFE, NONCE, CLAIM, CONTEXT, READER_WIRE, 1, [0], False],
            *[b"run", "tcp://10.0.0.9:5600"],
        ],
    ),
    "find": (find(), ["Find", 12, ENGINE_LIFE, "prefill", NONCE, "step 8", 4, [b"\1" * 32]]),
    "found": (found(), ["Found", 12, ENGINE_LIFE, NONCE, 1, OFFER, b"run", 2, "step 8"]),
    "grant": (
        grant(num_cached=384),
        ["Grant", 12, RANK_LIFE, *OFFER_WIRE, 2.0, [TABLE_WIRE], 3, FENCE_TOKEN, None, 384],
    ),
    "pending": (pending("queued"), ["Pending", 12, RANK_LIFE, *OFFER_WIRE, "queued"]),
    "deny": (deny(), ["Deny", 12, RANK_LIFE, *OFFER_WIRE, ""]),
    "deny with a cause": (
        deny(cause="not_arrived"),
        ["Deny", 12, RANK_LIFE, *OFFER_WIRE, "not_arrived"],
    ),
    "digest request": (
        digest_request(),
        ["DigestRequest", 12, RANK_LIFE, *OFFER_WIRE, 7, [SLICE_WIRE]],
    ),
    "digest reply": (digest_reply(), ["DigestReply", 12, RANK_LIFE, *OFFER_WIRE, SUMS * 4, SUMS]),
    "pack request": (
        pack_request(3, holds=(2, 3)),
        ["PackRequest", 12, RANK_LIFE, *OFFER_WIRE, 2, 3, 0, 7, [LAYER_WIRE], [2, 3]],
    ),
    "pack reply": (pack_reply(3), ["PackReply", 12, RANK_LIFE, *OFFER_WIRE, 3, 0]),
    "not packed": (pack_reply(3, slot=None), ["PackReply", 12, RANK_LIFE, *OFFER_WIRE, 3, None]),
    "renew": (renew(6, CLAIM, reading=1), ["Heartbeat", 12, RANK_LIFE, READER_WIRE, 6, [CLAIM], 1]),
    "renew nothing": (renew(6), ["Heartbeat", 12, RANK_LIFE, READER_WIRE, 6, [], 0]),
    "recall": (recall(), ["Recall", 12, RANK_LIFE, *OFFER_WIRE]),
    "renewed": (renewed(CLAIM), ["HeartbeatReply", 12, RANK_LIFE, READER_WIRE, 2, [CLAIM]]),
    "release, complete": (release(), ["Release", 12, RANK_LIFE, *OFFER_WIRE, True]),
    "release": (release(complete=False), ["Release", 12, RANK_LIFE, *OFFER_WIRE, False]),
    "status request": (
        StatusRequest(incarnation=ANY_INCARNATION, request="d1", probe="11.a.b"),
        ["StatusRequest", 12, ANY_INCARNATION, "d1", "11.a.b"],
    ),
    "drain": (Drain(incarnation=ANY_INCARNATION, undo=True), ["Drain", 12, ANY_INCARNATION, True]),
    "draining": (
        Draining(incarnation=ENGINE_LIFE, num_awaited=3),
        ["Draining", 12, ENGINE_LIFE, 3, ""],
    ),
    "set weights": (
        SetWeights(incarnation=ANY_INCARNATION, weights="step 8"),
        ["SetWeights", 12, ANY_INCARNATION, "step 8"],
    ),
    "weights set": (
        WeightsSet(incarnation=ENGINE_LIFE, former="step 7", refusal="no"),
        ["WeightsSet", 12, ENGINE_LIFE, "step 7", "no"],
    ),
    "ready": (ready(), ["Ready", 12, ANY_INCARNATION, HINT_KEY, TELLER_WIRE]),
    "landed": (
        landed(num_cached=384),
        ["Landed", 12, ANY_INCARNATION, HINT_KEY, TELLER_WIRE, 384],
    ),
    "status": (status(), ["Status", 12, RANK_LIFE, FACTS, {"loads": 1}, LISTS]),
    "paused": (
        messages.Paused(incarnation=RANK_LIFE, number=3, is_paused=True),
        ["Paused", 12, RANK_LIFE, 3, True],
    ),
    "admit": (
        messages.Admit(
            incarnation=RANK_LIFE, reader=READER, sources=("10.0.0.9",), listens=("fd00::9",)
        ),
        ["Admit", 12, RANK_LIFE, READER_WIRE, ["10.0.0.9"], ["fd00::9"], False],
    ),
    "admitted": (
        messages.Admitted(
            incarnation=RANK_LIFE, reader=READER, sources=("10.0.0.1",), refused=("10.0.0.9",)
        ),
        ["Admitted", 12, RANK_LIFE, READER_WIRE, ["10.0.0.1"], ["10.0.0.9"], b""],
    ),
    "leave": (
        messages.Leave(incarnation=RANK_LIFE, reader=READER),
        ["Leave", 12, RANK_LIFE, READER_WIRE],
    ),
    "key refusal": (
        messages.KeyRefusal(incarnation=RANK_LIFE, reason="no"),
        ["KeyRefusal", 12, RANK_LIFE, "no"],
    ),
    "version refusal": (VersionRefusal(), ["VersionRefusal", 0, 12]),
}
"""The wire's form, field by field: if one of these changes, so must WIRE_VERSION."""


@pytest.mark.parametrize(("message", "wire"), WIRE.values(), ids=WIRE)
def test_a_message_has_this_form_and_comes_back(message: Message, wire: list[Any]) -> None:
    assert msgspec.msgpack.decode(encode(message)) == wire
    assert decode(msgspec.msgpack.encode(wire)) == message


def test_every_message_of_the_wire_is_in_the_table() -> None:
    assert {type(message) for message, _ in WIRE.values()} == set(get_args(Message))


DIRECTIONS: Final[dict[Callable[[bytes], Message], set[str]]] = {
    messages.decode_to_engine: {
        *["Describe", "Find", "Drain", "SetWeights", "StatusRequest", "Ready", "Landed"],
    },
    messages.decode_to_rank: {
        *["Ask", "DigestRequest", "PackRequest", "Heartbeat", "Release", "StatusRequest"],
        *["Admit", "Leave", "Paused"],
    },
    messages.decode_answer: {
        "Description",
        "Refusal",
        "Grant",
        "Pending",
        "Deny",
        "DigestReply",
        "PackReply",
        "HeartbeatReply",
        "Recall",
        "Admitted",
        "KeyRefusal",
        "VersionRefusal",
    },
    messages.decode_to_tool: {
        *["Status", "Draining", "WeightsSet", "KeyRefusal", "VersionRefusal"],
    },
    messages.decode_to_finder: {
        *["Description", "Refusal", "Found", "KeyRefusal", "VersionRefusal"],
    },
}


@pytest.mark.parametrize("decoder", DIRECTIONS)
def test_a_socket_accepts_only_its_own_messages(decoder: Callable[[bytes], Message]) -> None:
    for message, _ in WIRE.values():
        kind = type(message).__name__
        if kind in DIRECTIONS[decoder]:
            assert decoder(encode(message)) == message
            continue
        with pytest.raises(RemoteProtocolError, match=f"Invalid value '{kind}'|at least length 14"):
            decoder(encode(message))


def test_a_rank_describes_itself_in_the_form_that_the_engine_passes_on() -> None:
    payload = encode(rank_description())
    assert msgspec.msgpack.decode(payload) == RANK_WIRE
    assert messages.decode_rank(payload) == rank_description()


# Bounds

replace = msgspec.structs.replace

CHECK_THEMSELVES: Final = {CacheLayout, ParallelShape, Stripe, Table}
"""Their types say nothing of their bounds; see `test_layout` and the errors below."""


def is_bounded(kind: inspect.Type) -> bool:
    match kind:
        case inspect.IntType(gt, ge, lt, le) | inspect.FloatType(gt, ge, lt, le):
            return (gt, ge) != (None, None) != (lt, le)
        case inspect.StrType(_, max_length, pattern):
            return max_length is not None or (pattern or "").endswith(r"\Z")
        case inspect.BytesType() | inspect.DictType() | inspect.VarTupleType():
            return kind.max_length is not None
    return True


def inner_types(kind: inspect.Type, path: str) -> Iterator[tuple[inspect.Type, str]]:
    match kind:
        case inspect.UnionType(types):
            yield from ((each, path) for each in types)
        case inspect.VarTupleType(item):
            yield item, f"{path}[]"
        case inspect.DictType(key, value):
            yield from ((key, f"{path} keys"), (value, f"{path} values"))
        case inspect.StructType(cls, fields) | inspect.DataclassType(cls, fields):
            if cls not in CHECK_THEMSELVES:
                yield from ((field.type, f"{path}.{field.name}") for field in fields)


def unbounded(kind: inspect.Type, path: str) -> list[str]:
    """The numbers, texts and collections in it that may have any size."""
    if not is_bounded(kind):
        return [path]
    return [each for inner, where in inner_types(kind, path) for each in unbounded(inner, where)]


def test_each_field_that_a_stranger_sends_has_bounds() -> None:
    """Other than the texts of a status, which an operator's tool has asked for."""
    kinds = (*get_args(Message), Ticket)
    found = [each for kind in kinds for each in unbounded(inspect.type_info(kind), kind.__name__)]
    assert found == ["Status.facts", "Status.totals", "Status.lists"]


LINE = hex32(1) + "\n"
TABLE = Table(0, b"")
FULL = dict.fromkeys(("peers", "loads", "story"), LISTS["loads"] * MAX_LISTED)
"""A status that lists as much as may be listed."""
TOO_FULL = [{name: [*listed, listed[0]]} for name, listed in FULL.items()]


def endpoint(text: str) -> tuple[RankDescription]:
    return (replace(rank_description(), endpoint=Endpoint(text)),)


BOUNDS: list[tuple[Message, str, list[Any], list[Any]]] = [
    (release(), "nonce", [hex32(5)], ["0" * 31, "0" * 33, "A" * 32, LINE]),
    (ask(), "context", [hex32(5)], ["g" * 32, LINE]),
    (ask(), "reader", [reader(1023)], [reader(1024), replace(READER, incarnation="x")]),
    (ask(), "directory", [None], [Endpoint("ipc:///tmp/x")]),
    (grant(), "lease_s", [0.1, 3600.0], [0.0, 3601.0, math.nan]),
    (grant(), "tables", [(TABLE,) * 64], [(), (TABLE,) * 65]),
    (grant(), "tables", [(Table(0, bytes(4 << 20)),), (Table(2**31 - 1, b""),)], []),
    (grant(), "tables", [(Table(2**31 - 2, b"last"),)], []),
    (
        *(description(), "ranks", [endpoint("tcp://[fd00::1]:1")]),
        [endpoint(""), endpoint("ipc:///tmp/x"), endpoint("tcp://10.0.0.1:7000\n")],
    ),
    (status(), "lists", [{}, FULL], TOO_FULL),
]


@pytest.mark.parametrize(
    ("message", "name", "allowed", "refused"),
    [
        pytest.param(*case, id=f"{number}: {type(case[0]).__name__}.{case[1]}")
        for number, case in enumerate(BOUNDS)
    ],
)
def test_a_message_within_its_bounds_is_read_and_one_out_of_them_refused(
    message: Message, name: str, allowed: list[Any], refused: list[Any]
) -> None:
    for value in allowed:
        accepted = replace(message, **{name: value})
        assert decode(encode(accepted)) == accepted
    for value in refused:
        with pytest.raises(RemoteProtocolError, match=r"Expected|regex|block table"):
            decode(encode(replace(message, **{name: value})))


SLICE_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "no heads": ({"first_head": 2}, "end_head is 2; allowed: 3 to 131072"),
}
SHAPE_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "no TP": ({"tp": 0}, "tp is 0; allowed: 1 to 1024"),
    "PP too large": ({"pp": 1025}, "pp is 1025; allowed: 1 to 1024"),
}
TABLE_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "ids that are cut": (
        {"ids": b"\0" * 7},
        "ids of a block table are 7 bytes; allowed: 4 for each of at most 1048576 entries",
    ),
    "too many ids": ({"ids": bytes((4 << 20) + 4)}, "ids of a block table are 4194308 bytes"),
    "first of no entry": (
        {"first": -1},
        "first of a block table is -1; allowed: 0 to 2147483645",
    ),
    "an end out of range": ({"first": 2**31 - 2}, "first of a block table is 2147483646; allowed"),
}
RECORDS: list[tuple[Message, Callable[[list[Any]], Any], dict[str, Any]]] = [
    (digest_request(), lambda wire: wire[-1][0], SLICE_ERRORS),
    (description(), lambda wire: wire[5], SHAPE_ERRORS),
    (grant(), lambda wire: wire[-5][0], TABLE_ERRORS),
]


@pytest.mark.parametrize(
    ("message", "record_of", "fields", "error"),
    [
        pytest.param(message, record_of, *case, id=name)
        for message, record_of, errors in RECORDS
        for name, case in errors.items()
    ],
)
def test_a_record_that_checks_itself_is_refused_by_its_own_words(
    message: Message, record_of: Callable[[list[Any]], Any], fields: dict[str, Any], error: str
) -> None:
    wire = msgspec.msgpack.decode(encode(message))
    record_of(wire).update(fields)
    with pytest.raises(RemoteProtocolError, match=re.escape(error)):
        decode(msgspec.msgpack.encode(wire))


def test_an_engine_that_describes_itself_names_its_incarnation() -> None:
    wire = msgspec.msgpack.decode(encode(description()))
    wire[2] = ANY_INCARNATION
    with pytest.raises(RemoteProtocolError, match="incarnation is all zeros; no engine's is"):
        decode(msgspec.msgpack.encode(wire))


# Other versions, and bytes that are not a message

RELEASE = encode(release())
DEEP = b"\x91" * 100_000 + b"\xc0"


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        pytest.param(b"", "not msgpack: 0 bytes", id="empty"),
        pytest.param(RELEASE + b"\xc0", f"not msgpack: {len(RELEASE) + 1} bytes", id="trailing"),
        pytest.param(RELEASE[:-1], f"not msgpack: {len(RELEASE) - 1} bytes", id="cut"),
        pytest.param(DEEP, "Expected `str`, got `array`", id="deep"),
        pytest.param(msgspec.msgpack.encode([]), "at least length 1, got 0", id="empty array"),
        pytest.param(msgspec.msgpack.encode(["Gone", 12]), "Invalid value 'Gone'", id="no such"),
        pytest.param(msgspec.msgpack.encode([1, 12]), "Expected `str`", id="tag is not a string"),
    ],
)
def test_bytes_that_are_not_a_message_are_refused(payload: bytes, error: str) -> None:
    with pytest.raises(RemoteProtocolError, match=re.escape(error)):
        decode(payload)


@pytest.mark.parametrize("version", [-1, 1, 11, 13, 2**63])
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        pytest.param("Release", [], id="shorter"),
        pytest.param("Shout", [{"loud": True}], id="unknown kind"),
        pytest.param("Release", [RANK_LIFE, *OFFER_WIRE, True, "more"], id="longer"),
        pytest.param("Done", [RANK_LIFE, *OFFER_WIRE], id="a kind of version 3"),
        pytest.param(8, [], id="other tags"),
    ],
)
def test_an_error_names_a_foreign_version_first(
    version: int, kind: object, fields: list[Any]
) -> None:
    with pytest.raises(ForeignVersion) as raised:
        decode(msgspec.msgpack.encode([kind, version, *fields]))
    assert str(raised.value) == f"wire version {version}; this side speaks 12"


def test_a_version_refusal_is_read_in_every_version_for_ever() -> None:
    """Nothing of this may ever change: engines of all versions say it to each other."""
    wire, message = ["VersionRefusal", 0, 12], VersionRefusal(speaks=12)
    for longer in (wire, [*wire, "more", {"of": "a later version"}]):
        assert decode(msgspec.msgpack.encode(longer)) == message
    assert msgspec.msgpack.decode(encode(message)) == wire
    with pytest.raises(ForeignVersion, match="wire version 13"):
        decode(msgspec.msgpack.encode([wire[0], 13, wire[2]]))


def test_an_unknown_message_without_a_version_does_not_count_as_a_foreign_version() -> None:
    """Else two sides could answer each other's refusals for ever."""
    with pytest.raises(RemoteProtocolError, match="Invalid value 'Shout'") as raised:
        decode(msgspec.msgpack.encode(["Shout", 0]))
    assert not isinstance(raised.value, ForeignVersion)


def test_a_message_with_more_fields_is_read() -> None:
    wire = [*msgspec.msgpack.decode(RELEASE), "new", {"in": "version 7"}]
    assert decode(msgspec.msgpack.encode(wire)) == release()


def test_an_engine_that_says_nothing_of_extras_has_none() -> None:
    """An older one's facts are all of its model."""
    wire = msgspec.msgpack.decode(encode(description()))[:-1]
    assert decode(msgspec.msgpack.encode(wire)) == description()


# Messages of a hostile stranger


def test_depth_behind_a_good_message_is_refused() -> None:
    """The decoder walks through skipped fields, too."""
    longer = bytes([RELEASE[0] + 1]) + RELEASE[1:] + DEEP
    with pytest.raises(RemoteProtocolError):
        decode(longer)


MANY = b"\xdd" + (100_000).to_bytes(4, "big") + b"\x80" * 100_000


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(MANY, id="as the message"),
        pytest.param(b"\x92" + MANY + b"\x01", id="as its kind"),
        pytest.param(b"\x93\xa7Release\x08" + MANY, id="behind another version"),
        pytest.param(RELEASE[:9] + MANY, id="as a field"),
    ],
)
def test_refusing_needs_little_memory(payload: bytes) -> None:
    """An empty map is one byte on the wire and 72 here: 64 MiB of them would be the end."""
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            decode(payload)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(payload)


@given(payload=st.binary(max_size=64))
@example(payload=b"\x92\xa7Release\x01")
def test_any_bytes_are_a_message_or_refused(payload: bytes) -> None:
    try:
        message = decode(payload)
    except RemoteProtocolError:
        return
    assert decode(encode(message)) == message
