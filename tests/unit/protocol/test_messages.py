"""What goes over the wire, and what is refused."""

import re
import tracemalloc
from collections.abc import Callable
from typing import Any, Final

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from protocol_records import (
    CLAIM,
    CONTEXT,
    ENGINE_LIFE,
    EXCERPTS,
    GENERATION,
    NONCE,
    RANK_LIFE,
    READER,
    SUMS,
    TABLES,
    abort,
    ask,
    decode,
    deny,
    describe,
    description,
    done,
    grant,
    hex32,
    proof,
    prove,
    rank_description,
    refusal,
    renew,
    renewed,
)

from nixl_kv.errors import RemoteProtocolError
from nixl_kv.geometry.digest import MAX_COLUMNS
from nixl_kv.geometry.excerpts import Excerpt
from nixl_kv.protocol import messages
from nixl_kv.protocol.messages import Message, Reader, encode

READER_WIRE = ["decode", hex32(0xD), 0]


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
                }
            ],
            "window": 0,
        }
    ],
    "element": "uint8",
    "memory": "DRAM",
    "device": 0,
    "spans": [{"address": 4096, "length": 1024}],
}
RANK_WIRE = [RANK_LIFE, "tcp://10.0.0.1:7000", b"agent", [65536, 64], LAYOUT_WIRE]
OFFER_WIRE = [NONCE, CLAIM, READER_WIRE]
EXCERPT_WIRE = {"layer": "layer.0", "first_head": 0, "end_head": 2, "begin": 0}

WIRE = [
    pytest.param(describe(), ["Describe", 3, ENGINE_LIFE, "prefill"], id="describe"),
    pytest.param(
        description(),
        [
            "Description",
            3,
            ENGINE_LIFE,
            "prefill",
            {"dtype": "bfloat16"},
            {"tp": 1, "pp": 1},
            [RANK_WIRE],
        ],
        id="description",
    ),
    pytest.param(refusal("no"), ["Refusal", 3, ENGINE_LIFE, "prefill", "no"], id="refusal"),
    pytest.param(
        ask(number=5, readers=(0, 1)),
        ["Ask", 3, RANK_LIFE, NONCE, CLAIM, CONTEXT, READER_WIRE, 5, [0, 1]],
        id="ask",
    ),
    pytest.param(
        grant(),
        ["Grant", 3, RANK_LIFE, *OFFER_WIRE, 8, 2.0, list(TABLES), 3, GENERATION],
        id="grant",
    ),
    pytest.param(deny(), ["Deny", 3, RANK_LIFE, *OFFER_WIRE, "gone"], id="deny"),
    pytest.param(prove(), ["Prove", 3, RANK_LIFE, *OFFER_WIRE, 7, [EXCERPT_WIRE]], id="prove"),
    pytest.param(proof(), ["Proof", 3, RANK_LIFE, *OFFER_WIRE, SUMS * 4, SUMS], id="proof"),
    pytest.param(renew(6, CLAIM), ["Renew", 3, RANK_LIFE, READER_WIRE, 6, [CLAIM]], id="renew"),
    pytest.param(renew(6), ["Renew", 3, RANK_LIFE, READER_WIRE, 6, []], id="renew nothing"),
    pytest.param(
        renewed(6, CLAIM),
        ["Renewed", 3, RANK_LIFE, READER_WIRE, 6, [CLAIM]],
        id="renewed",
    ),
    pytest.param(done(), ["Done", 3, RANK_LIFE, *OFFER_WIRE], id="done"),
    pytest.param(abort(), ["Abort", 3, RANK_LIFE, *OFFER_WIRE], id="abort"),
]
"""The wire's form, field by field: if one of these changes, so must WIRE_VERSION."""


@pytest.mark.parametrize(("message", "wire"), WIRE)
def test_a_message_has_this_form_and_comes_back(message: Message, wire: list[Any]) -> None:
    assert msgspec.msgpack.decode(encode(message)) == wire
    assert decode(msgspec.msgpack.encode(wire)) == message


def test_every_message_of_the_wire_is_in_the_table() -> None:
    kinds = set(messages.Message.__args__)
    assert {type(param.values[0]) for param in WIRE} == kinds


DIRECTIONS: Final = {
    messages.decode_to_engine: {"Describe"},
    messages.decode_to_rank: {"Ask", "Prove", "Renew", "Done", "Abort"},
    messages.decode_answer: {"Description", "Refusal", "Grant", "Deny", "Proof", "Renewed"},
}


@pytest.mark.parametrize("decoder", DIRECTIONS)
@pytest.mark.parametrize("message", [param.values[0] for param in WIRE])
def test_a_socket_takes_only_what_may_come_to_it(
    message: Message, decoder: Callable[[bytes], Message]
) -> None:
    kind = type(message).__name__
    if kind in DIRECTIONS[decoder]:
        assert decoder(encode(message)) == message
        return
    with pytest.raises(RemoteProtocolError, match=f"Invalid value '{kind}'"):
        decoder(encode(message))


def test_every_message_has_one_direction() -> None:
    kinds = [kind for kinds in DIRECTIONS.values() for kind in kinds]
    assert sorted(kinds) == sorted(kind.__name__ for kind in messages.Message.__args__)


def test_a_rank_describes_itself_in_the_form_that_the_engine_passes_on() -> None:
    payload = messages.encode_rank(rank_description())
    assert msgspec.msgpack.decode(payload) == RANK_WIRE
    assert messages.decode_rank(payload) == rank_description()


MOST_CLAIMS = tuple(hex32(number) for number in range(messages.MAX_CLAIMS))
MOST_RANKS = tuple(range(messages.MAX_RANKS))


def excerpt(**changed: Any) -> Message:
    """Asks for the proof of one excerpt."""
    values = {"layer": "layer.0", "first_head": 0, "end_head": 2, "begin": 0}
    return prove(excerpts=(Excerpt(**{**values, **changed}),))


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(ask(readers=MOST_RANKS), id="readers"),
        pytest.param(ask(reader=Reader("d" * 256, READER.incarnation, 1023)), id="reader"),
        pytest.param(ask(number=2**62), id="number"),
        pytest.param(grant(num_tokens=0, lease_s=3600.0, slot=(1 << 20) - 1), id="grant"),
        pytest.param(grant(tables=(b"",) * 64), id="groups"),
        pytest.param(grant(tables=(b"x" * (4 << 20),)), id="table"),
        pytest.param(renew(0, *MOST_CLAIMS), id="claims"),
        pytest.param(renewed(0, *MOST_CLAIMS), id="lost"),
        pytest.param(refusal("x" * 512), id="reason"),
        pytest.param(deny("incarnation"), id="other life"),
        pytest.param(prove(end=1), id="one token"),
        pytest.param(prove(end=(1 << 31) - 1), id="end"),
        pytest.param(prove(excerpts=EXCERPTS * 4096), id="excerpts"),
        pytest.param(excerpt(end_head=1 << 17), id="heads"),
        pytest.param(excerpt(first_head=(1 << 17) - 1, end_head=1 << 17), id="last head"),
        pytest.param(excerpt(begin=(1 << 31) - 1), id="begin"),
        pytest.param(proof(rows=SUMS, columns=SUMS), id="one sum"),
        pytest.param(proof(rows=SUMS * (1 << 17)), id="rows"),
        pytest.param(proof(columns=SUMS * MAX_COLUMNS), id="columns"),
    ],
)
def test_what_is_at_its_bound_passes(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    ("message", "error"),
    [
        pytest.param(done(life="0" * 31), "matching regex", id="short incarnation"),
        pytest.param(done(nonce="0" * 33), "matching regex", id="long nonce"),
        pytest.param(done(claim="A" * 32), "matching regex", id="claim in capitals"),
        pytest.param(ask(context="g" * 32), "matching regex", id="context of other digits"),
        pytest.param(ask(readers=()), "length >= 1", id="no readers"),
        pytest.param(ask(readers=(*MOST_RANKS, 0)), "length <= 1024", id="readers"),
        pytest.param(ask(readers=(1024,)), "`int` <= 1023", id="reader out of range"),
        pytest.param(ask(readers=(-1,)), "`int` >= 0", id="negative reader"),
        pytest.param(ask(number=-1), "`int` >= 0", id="negative number"),
        pytest.param(ask(number=2**62 + 1), "`int` <= 4611686018427387904", id="number"),
        pytest.param(ask(reader=Reader("", hex32(1), 0)), "length >= 1", id="no name"),
        pytest.param(ask(reader=Reader("d" * 257, hex32(1), 0)), "length <= 256", id="name"),
        pytest.param(ask(reader=Reader("d", hex32(1), 1024)), "`int` <= 1023", id="rank"),
        pytest.param(ask(reader=Reader("d", "x", 0)), "matching regex", id="reader's life"),
        pytest.param(grant(num_tokens=-1), "`int` >= 0", id="negative tokens"),
        pytest.param(grant(lease_s=0.0), "`float` > 0.0", id="no lease"),
        pytest.param(grant(lease_s=3601.0), "`float` <= 3600.0", id="lease"),
        pytest.param(grant(lease_s=float("nan")), "`float`", id="lease that is no number"),
        pytest.param(grant(tables=()), "length >= 1", id="no tables"),
        pytest.param(grant(tables=(b"",) * 65), "length <= 64", id="groups"),
        pytest.param(grant(tables=(b"x" * ((4 << 20) + 1),)), "length <= 4194304", id="table"),
        pytest.param(grant(slot=1 << 20), "`int` <= 1048575", id="slot"),
        pytest.param(grant(slot=-1), "`int` >= 0", id="negative slot"),
        pytest.param(grant(generation=b"\1" * 15), "length >= 16", id="short generation"),
        pytest.param(grant(generation=b"\1" * 17), "length <= 16", id="long generation"),
        pytest.param(deny("busy"), "Invalid enum value 'busy'", id="unknown reason"),
        pytest.param(prove(end=0), "`int` >= 1", id="proof of nothing"),
        pytest.param(prove(end=1 << 31), "`int` <= 2147483647", id="end"),
        pytest.param(prove(excerpts=()), "length >= 1", id="no excerpts"),
        pytest.param(prove(excerpts=EXCERPTS * 4097), "length <= 4096", id="excerpts"),
        pytest.param(proof(rows=SUMS[1:]), "length >= 8", id="no row"),
        pytest.param(proof(rows=SUMS * (1 << 17) + b"\0"), "length <= 1048576", id="rows"),
        pytest.param(proof(columns=SUMS[1:]), "length >= 8", id="no column"),
        pytest.param(proof(columns=SUMS * MAX_COLUMNS + b"\0"), "length <= 32768", id="columns"),
        pytest.param(renew(1, *MOST_CLAIMS, CLAIM), "length <= 65536", id="claims"),
        pytest.param(renewed(1, *MOST_CLAIMS, CLAIM), "length <= 65536", id="lost"),
        pytest.param(refusal("x" * 513), "length <= 512", id="long reason"),
    ],
)
def test_what_is_out_of_bounds_is_refused(message: Message, error: str) -> None:
    with pytest.raises(RemoteProtocolError, match=re.escape(error)):
        decode(encode(message))


def changed_rank(**changed: Any) -> Message:
    rank = msgspec.structs.replace(rank_description(), **changed)
    return msgspec.structs.replace(description(), ranks=(rank,))


@pytest.mark.parametrize(
    ("message", "error"),
    [
        pytest.param(
            msgspec.structs.replace(description(), ranks=()), "length >= 1", id="no ranks"
        ),
        pytest.param(
            msgspec.structs.replace(description(), ranks=(rank_description(),) * 1025),
            "length <= 1024",
            id="ranks",
        ),
        pytest.param(
            msgspec.structs.replace(description(), model={"": "x"}), "length >= 1", id="no fact"
        ),
        pytest.param(
            msgspec.structs.replace(description(), model={"x": "y" * 4097}),
            "length <= 4096",
            id="long fact",
        ),
        pytest.param(changed_rank(endpoint="ipc:///tmp/x"), "matching regex", id="no tcp"),
        pytest.param(changed_rank(endpoint="tcp://" + "1" * 123), "<= 128", id="long endpoint"),
        pytest.param(changed_rank(agent=b"x" * ((1 << 20) + 1)), "<= 1048576", id="agent"),
        pytest.param(changed_rank(slots=messages.Slots(0, 1)), ">= 1", id="slots at null"),
        pytest.param(changed_rank(slots=messages.Slots(1 << 62, 1)), "<=", id="slots too high"),
        pytest.param(changed_rank(slots=messages.Slots(1, 0)), ">= 1", id="no slots"),
        pytest.param(changed_rank(slots=messages.Slots(1, (1 << 20) + 1)), "<=", id="slots"),
    ],
)
def test_a_description_out_of_bounds_is_refused(message: Message, error: str) -> None:
    with pytest.raises(RemoteProtocolError, match=re.escape(error)):
        decode(encode(message))


def test_a_rank_that_nobody_reads_has_no_endpoint() -> None:
    message = changed_rank(endpoint="")
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    ("path", "value", "error"),
    [
        pytest.param(["tp"], 0, "tp is 0; allowed: 1 to 1024", id="shape"),
        pytest.param(["pp"], 1025, "pp is 1025; allowed: 1 to 1024", id="shape too large"),
    ],
)
def test_a_record_that_checks_itself_is_refused_by_its_own_words(
    path: list[str], value: int, error: str
) -> None:
    wire = msgspec.msgpack.decode(encode(description()))
    wire[5][path[0]] = value
    with pytest.raises(RemoteProtocolError, match=error):
        decode(msgspec.msgpack.encode(wire))


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        pytest.param({"first_head": 2}, "heads of 'layer.0' are 2 to 2", id="no heads"),
        pytest.param({"first_head": -1}, "heads of 'layer.0' are -1 to 2", id="negative head"),
        pytest.param({"end_head": (1 << 17) + 1}, "are 0 to 131073; allowed", id="heads"),
        pytest.param({"begin": -1}, "begin of 'layer.0' is -1; allowed", id="negative begin"),
        pytest.param({"begin": 1 << 31}, "begin of 'layer.0' is 2147483648", id="begin"),
        pytest.param({"layer": None}, "Expected `str`, got", id="layer"),
    ],
)
def test_an_excerpt_out_of_bounds_is_refused(changed: dict[str, Any], error: str) -> None:
    wire = msgspec.msgpack.decode(encode(prove()))
    wire[-1][0] |= changed
    with pytest.raises(RemoteProtocolError, match=re.escape(error)):
        decode(msgspec.msgpack.encode(wire))


DONE = encode(done())
DEEP = b"\x91" * 100_000 + b"\xc0"


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        pytest.param(b"", "not msgpack: 0 bytes", id="empty"),
        pytest.param(b"\xc1", "not msgpack: 1 bytes", id="no msgpack"),
        pytest.param(DONE + b"\xc0", f"not msgpack: {len(DONE) + 1} bytes", id="trailing"),
        pytest.param(DONE[:-1], f"not msgpack: {len(DONE) - 1} bytes", id="cut"),
        pytest.param(DEEP, "Expected `str`, got `array`", id="deep"),
        pytest.param(b"\xdd\xff\xff\xff\xff", "not msgpack: 5 bytes", id="long array, cut"),
        pytest.param(b"\x92\xa4Done\xa2\xff\xfe", "Expected `array`", id="no UTF-8"),
        pytest.param(msgspec.msgpack.encode({"a": 1}), "Expected `array`", id="map"),
        pytest.param(msgspec.msgpack.encode([]), "at least length 1, got 0", id="empty array"),
        pytest.param(msgspec.msgpack.encode(["Done"]), "at least length", id="tag alone"),
        pytest.param(msgspec.msgpack.encode(["Gone", 3]), "Invalid value 'Gone'", id="no such"),
        pytest.param(msgspec.msgpack.encode([1, 3]), "Expected `str`", id="tag is no string"),
        pytest.param(msgspec.msgpack.encode(["Done", "1"]), "Expected", id="version in words"),
    ],
)
def test_what_is_no_message_is_refused(payload: bytes, error: str) -> None:
    with pytest.raises(RemoteProtocolError, match=re.escape(error)):
        decode(payload)


@pytest.mark.parametrize(
    "wire",
    [
        pytest.param(["Done", 4], id="shorter"),
        pytest.param(["Shout", 4, {"loud": True}], id="unknown kind"),
        pytest.param(["Done", 4, RANK_LIFE, *OFFER_WIRE, "more"], id="longer"),
        pytest.param([7, 4], id="other tags"),
    ],
)
def test_a_foreign_version_is_what_is_said_first(wire: list[Any]) -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        decode(msgspec.msgpack.encode(wire))
    assert str(raised.value) == "wire version 4; this side speaks 3"


def test_the_version_zero_is_foreign_too() -> None:
    with pytest.raises(RemoteProtocolError, match="wire version 0; this side speaks 3"):
        decode(msgspec.msgpack.encode(["Done", 0, RANK_LIFE, *OFFER_WIRE]))


def test_a_message_with_more_fields_is_read() -> None:
    wire = [*msgspec.msgpack.decode(DONE), "new", {"in": "version 1"}]
    assert decode(msgspec.msgpack.encode(wire)) == done()


def test_an_error_has_its_cause() -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        decode(msgspec.msgpack.encode(["Gone", 3]))
    assert isinstance(raised.value.__cause__, msgspec.ValidationError)


# What a stranger might try


def test_depth_behind_a_good_message_is_refused() -> None:
    """What is skipped is walked through, too."""
    longer = bytes([DONE[0] + 1]) + DONE[1:] + DEEP
    with pytest.raises(RemoteProtocolError):
        decode(longer)


MANY = b"\xdd" + (100_000).to_bytes(4, "big") + b"\x80" * 100_000


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(MANY, id="as the message"),
        pytest.param(b"\x92" + MANY + b"\x01", id="as its kind"),
        pytest.param(b"\x93\xa4Done\x04" + MANY, id="behind another version"),
        pytest.param(DONE[:6] + MANY, id="as a field"),
    ],
)
def test_refusing_takes_little_memory(payload: bytes) -> None:
    """An empty map is one byte on the wire and 72 here: 64 MiB of them would be the end."""
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            decode(payload)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(payload)


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(done(life=hex32(1) + "\n"), id="incarnation"),
        pytest.param(done(nonce=hex32(1) + "\n"), id="nonce"),
        pytest.param(done(claim=hex32(1) + "\n"), id="claim"),
        pytest.param(renew(1, hex32(1) + "\n"), id="claims"),
        pytest.param(changed_rank(endpoint="tcp://10.0.0.1:7000\n"), id="endpoint"),
    ],
)
def test_a_line_end_is_no_part_of_a_field(message: Message) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(encode(message))


def test_a_description_has_a_bounded_number_of_facts() -> None:
    facts = {f"fact {number}": "" for number in range(65_537)}
    message = msgspec.structs.replace(description(), model=facts)
    with pytest.raises(RemoteProtocolError):
        decode(encode(message))


@settings(deadline=None, max_examples=200)
@given(payload=st.binary(max_size=64))
@example(payload=b"\x92\xa4Done\x01")
def test_any_bytes_are_a_message_or_refused(payload: bytes) -> None:
    try:
        message = decode(payload)
    except RemoteProtocolError:
        return
    assert decode(encode(message)) == message


@settings(deadline=None, max_examples=200)
@given(
    message=st.sampled_from([param.values[0] for param in WIRE]),
    position=st.integers(0, 10_000),
    replacement=st.integers(0, 255),
)
def test_a_damaged_message_is_read_or_refused(
    message: Message, position: int, replacement: int
) -> None:
    payload = bytearray(encode(message))
    payload[position % len(payload)] = replacement
    try:
        read = decode(bytes(payload))
    except RemoteProtocolError:
        return
    assert decode(encode(read)) == read
