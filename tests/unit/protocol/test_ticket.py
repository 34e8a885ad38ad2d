"""The ticket: made by prefill, carried by strangers, checked by decode."""

import base64
import hashlib
import re
import string
import types
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nixl_kv.errors import RemoteProtocolError, TicketRefused
from nixl_kv.ids import EngineId, Nonce
from nixl_kv.protocol.ticket import (
    FIELD,
    MAX_LENGTH,
    WIRE_VERSION,
    SealedTicket,
    Ticket,
    TicketHead,
    context_hash,
)
from support.records import CONTEXT, ENGINE_LIFE, NONCE, hex32, opened, ticket

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
VALUES: dict[str, Any] = {
    "host": "10.0.0.1",
    "port": 5600,
    "nonce": NONCE,
    "engine": "prefill",
    "incarnation": ENGINE_LIFE,
    "num_tokens": 8,
    "context": CONTEXT,
    "epoch": 0,
    "weights": "",
    "media": "",
    "not_offered": "",
    "is_early": False,
}
"""The fields of the string, in this order."""

PAYLOAD = (
    "nKgxMC4wLjAuMc0V4NkgMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDGncHJlZmlsbNkgMDAwMDAwMDAwMDAw"
    "MDAwMDAwMDAwMDAwMDAwMDAwMGEI2SAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwZQCgoKDC"
)
MAC = "3d4add5dc0a5074534cb3c7aae18e1af"
WRITTEN: dict[str, Any] = {
    "remote_engine_id": "prefill",
    "remote_request_id": NONCE,
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [[]],
    "tp_size": 0,
    "nixl_kv_ticket": f"12..{PAYLOAD}",
}
PARAMS: dict[str, Any] = {"do_remote_prefill": True, "do_remote_decode": False, **WRITTEN}
"""The same with the flags, which prefill writes or a router adds."""

ONE_TWO: dict[Any, Any] = {1: 2}
LINE = hex32(1) + "\n"


def packed(entries: object) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(entries)).decode().rstrip("=")


def written(entries: object, *, version: object = 12, mac: str = "") -> dict[str, Any]:
    """Parameters with these entries in the string, as a client may write them."""
    return {FIELD: f"{version}.{mac}.{packed(entries)}"}


def having(**changed: object) -> dict[str, Any]:
    return written(list({**VALUES, **changed}.values()))


# The form


def test_a_ticket_has_this_form() -> None:
    """A change needs a new wire version; the stable fields never change."""
    assert ticket().params(None) == WRITTEN
    assert ticket().params(None, for_in_tree=False) == PARAMS
    assert ticket().params(KEY) == {**WRITTEN, FIELD: f"12.{MAC}.{PAYLOAD}"}
    assert having() == {FIELD: PARAMS[FIELD]}
    assert tuple(VALUES) == Ticket.__struct_fields__


tickets = st.builds(
    Ticket,
    host=st.ip_addresses().map(str),
    port=st.integers(1, 65535),
    nonce=st.integers(0, 2**128 - 1).map(hex32),
    engine=st.text(string.printable[:95], min_size=1, max_size=256),
    incarnation=st.integers(1, 2**128 - 1).map(hex32),
    num_tokens=st.integers(1, 2**31 - 1),
    context=st.integers(0, 2**128 - 1).map(hex32),
    epoch=st.integers(0, 2**62),
    weights=st.text(string.printable[:95], max_size=256),
    media=st.just("") | st.integers(0, 2**128 - 1).map(hex32),
    not_offered=st.text(string.printable[:95], max_size=128),
    is_early=st.booleans(),
)


@given(made=tickets, key=st.none() | st.binary(min_size=1, max_size=64))
@example(
    made=ticket(
        host="f" * 4 + ":ffff" * 7,
        engine=EngineId("\U0001f600" * 256),
        weights="\U0001f600" * 256,
        media=hex32(1),
        not_offered="\U0001f600" * 128,
    ),
    key=KEY,
)
def test_any_ticket_comes_back_and_is_short(made: Ticket, key: bytes | None) -> None:
    params = made.params(key)
    assert len(params[FIELD]) <= MAX_LENGTH
    sealed = SealedTicket.parse(params)
    sealed.check_mac(key)
    assert sealed.open() == made
    head = TicketHead(host=made.host, port=made.port, nonce=made.nonce)
    assert (sealed.version, sealed.head()) == (WIRE_VERSION, head)


# Changes by routers to the fields beside it


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({**PARAMS, "remote_block_ids": [1], "tp_size": 8}, id="of vLLM's frontend"),
        pytest.param({**PARAMS, "kv": {"deep": [{}]}}, id="of a router"),
        pytest.param(types.MappingProxyType(PARAMS), id="any mapping"),
        pytest.param({**dict.fromkeys(PARAMS), FIELD: PARAMS[FIELD]}, id="null instead of all"),
        pytest.param({**PARAMS, "remote_host": None, "remote_port": "x"}, id="no host, no port"),
        pytest.param({**PARAMS, "remote_engine_id": {"a": [1]}}, id="no engine"),
        pytest.param({**PARAMS, "wire_version": 3, "mac": "x", "nonce": []}, id="older fields"),
        pytest.param({FIELD: PARAMS[FIELD]}, id="nothing else"),
    ],
)
def test_other_fields_beside_a_ticket_do_not_matter(params: object) -> None:
    assert opened(params) == ticket()


# Refused tickets


LACKS = (
    "kv_transfer_params lacks the field 'nixl_kv_ticket': prefill does not run nixl_kv, or a "
    "router dropped it; kv_transfer_params must reach decode unchanged"
)
NO_OBJECT = "kv_transfer_params is of type {}; allowed: an object"
NO_FLAG = "kv_transfer_params: {} is {}; allowed: {}"
NO_TEXT = "kv_transfer_params: nixl_kv_ticket is {}; allowed: text"
NO_TICKET = (
    "kv_transfer_params: nixl_kv_ticket is not a ticket; "
    "allowed: VERSION.MAC.PAYLOAD, as prefill wrote it"
)
NO_FORM = [
    *["", "..", "12.AA", "12...AA", "12..AA=", "12..A+/A", "12..AA\n", " 12..AA", "12.0..AA"],
    *["05..AA", "-9..AA", "\u0665..AA", "1234567890..AA", "A" * MAX_LENGTH, "\ud800"],
    *[f"12.{mac}.AA" for mac in ("a" * 31, "a" * 33, "A" * 32, "é" * 32)],
]


@pytest.mark.parametrize(
    ("params", "error"),
    [
        (None, NO_OBJECT.format("NoneType")),
        ([], NO_OBJECT.format("list")),
        ("{}", NO_OBJECT.format("str")),
        ({}, LACKS),
        (ONE_TWO, LACKS),
        ({"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": []}, LACKS),
        (
            {**PARAMS, "do_remote_prefill": False},
            NO_FLAG.format("do_remote_prefill", "false", "true"),
        ),
        (
            {**PARAMS, "do_remote_prefill": 1},
            NO_FLAG.format("do_remote_prefill", "of type int", "true"),
        ),
        ({**PARAMS, "do_remote_decode": True}, NO_FLAG.format("do_remote_decode", "true", "false")),
        (
            {**PARAMS, "do_remote_decode": 10**5000},
            NO_FLAG.format("do_remote_decode", "of type int", "false"),
        ),
        ({FIELD: None}, NO_TEXT.format("null")),
        ({FIELD: True}, NO_TEXT.format("true")),
        ({FIELD: 10**5000}, NO_TEXT.format("of type int")),
        ({FIELD: [["x"] * 10_000]}, NO_TEXT.format("of type list")),
        ({FIELD: b"12..AA"}, NO_TEXT.format("of type bytes")),
        (
            {FIELD: "12.." + "A" * (MAX_LENGTH - 3)},
            "kv_transfer_params: nixl_kv_ticket has 4097 characters; allowed: 4096",
        ),
        *[({FIELD: text}, NO_TICKET) for text in NO_FORM],
    ],
)
def test_a_value_that_is_not_a_ticket_is_refused_with_a_message(params: object, error: str) -> None:
    with pytest.raises(RemoteProtocolError) as refused:
        SealedTicket.parse(params)
    assert str(refused.value) == error


def head_of(params: object) -> TicketHead:
    return SealedTicket.parse(params).head()


OF_HEAD = ("host", "port", "nonce")
NOT_ALLOWED: dict[str, list[object]] = {
    "host": [5, ":", "1" * 65],
    "port": [0, 65536, "5600", True],
    "nonce": ["a" * 33, "A" * 32, None, LINE],
    "engine": ["", "e" * 257, 7],
    "incarnation": ["a" * 31, LINE],
    "num_tokens": [-1, 0, 2**31, 2**63, 9.0],
    "context": ["x" * 32, LINE],
    "epoch": [-1, "1"],
    "weights": ["w" * 257, 7],
    "media": ["x" * 32, "a" * 64, LINE, None],
    "not_offered": ["n" * 129, 7, None],
    "is_early": [1, None, "true"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in NOT_ALLOWED.items() for value in values]
)
def test_a_value_that_is_not_allowed_is_named(name: str, value: object) -> None:
    parsers: list[Callable[[object], object]] = [opened, *[head_of] * (name in OF_HEAD)]
    for parse in parsers:
        with pytest.raises(RemoteProtocolError) as refused:
            parse(having(**{name: value}))
        assert re.match(rf"kv_transfer_params: nixl_kv_ticket: .*\$\.{name}`", str(refused.value))
        assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "missing required field `host`"),
        (list(VALUES.values())[:2], "missing required field `nonce`"),
        (list(VALUES.values())[:6], "missing required field `context`"),
        (VALUES, "Expected `array`"),
        (None, "Expected `array`"),
    ],
)
def test_a_payload_of_another_form_is_refused(entries: object, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=rf"nixl_kv_ticket: .*{words}"):
        opened(written(entries))


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"\x91" * 3000, id="deep"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="long array, cut"),
        pytest.param(b"\x91\xa1\xff", id="no UTF-8"),
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(None, id="no base64"),
    ],
)
def test_a_payload_must_be_msgpack(payload: bytes | None) -> None:
    text = base64.urlsafe_b64encode(payload).decode().rstrip("=") if payload else "A"
    for parse in (opened, head_of):
        with pytest.raises(RemoteProtocolError, match=r"^kv_transfer_params: nixl_kv_ticket: "):
            parse({FIELD: f"12..{text}"})


def test_entries_of_a_later_revision_are_left_out() -> None:
    assert opened(written([*VALUES.values(), "more", {"x": 1}])) == ticket()


@pytest.mark.parametrize(
    "host",
    [
        *["localhost", "example.com", "10.0.0.1 ", "10.0.0.1:80", "10.0.0.1\n", "[::1]", "10.1"],
        *["0x7f000001", "*", "::%1]:0;[localhost", "fe80::1%eth0"],
    ],
)
def test_a_host_is_an_address_and_nothing_else(host: str) -> None:
    """ZMQ connects to `[localhost]` for the endpoint `tcp://[::%1]:0;[localhost]:5600`."""
    for parse in (opened, head_of):
        with pytest.raises(RemoteProtocolError):
            parse(having(host=host))


def test_our_own_tickets_are_checked_as_well() -> None:
    with pytest.raises(ValueError, match="localhost"):
        ticket(host="localhost")


@pytest.mark.parametrize("name", ["engine", "weights"])
def test_a_name_that_cannot_be_printed_is_refused(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{name} has characters that cannot be printed"):
        opened(having(**{name: "a\nb"}))


def test_a_ticket_names_one_life_of_an_engine() -> None:
    """To ask for any would be answered, by an engine that the ticket does not name."""
    with pytest.raises(RemoteProtocolError, match="incarnation is all zeros"):
        opened(having(incarnation="0" * 32))


@given(
    name=st.sampled_from(sorted(VALUES)),
    value=st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
)
def test_any_value_is_accepted_or_refused(name: str, value: Any) -> None:
    try:
        made = opened(having(**{name: value}))
    except RemoteProtocolError:
        return
    assert getattr(made, name) == value


# Other versions


def later(version: int, key: bytes | None = KEY) -> dict[str, Any]:
    """A ticket of another version: the stable part is as here, the rest is not."""
    payload = packed(["10.0.0.1", 5600, NONCE, {"what": "ever"}, b"\0", None])
    sealed = SealedTicket(version=version, mac="", payload=payload)
    return {FIELD: f"{version}.{'' if key is None else mac_of(sealed, key)}.{payload}"}


def mac_of(sealed: SealedTicket, key: bytes) -> str:
    """The MAC that the head of the module defines, for ever."""
    covered = f"{sealed.version}.{sealed.payload}".encode()
    return hashlib.blake2b(covered, digest_size=16, key=key).hexdigest()


@pytest.mark.parametrize("version", [0, 1, 11, 13, 999_999_999])
@pytest.mark.parametrize("key", [None, KEY], ids=["without a key", "with a key"])
def test_a_ticket_of_another_version_is_checked_and_refused_in_words(
    version: int, key: bytes | None
) -> None:
    sealed = SealedTicket.parse(later(version, key))
    sealed.check_mac(key)
    assert sealed.head() == TicketHead(host="10.0.0.1", port=5600, nonce=NONCE)
    with pytest.raises(TicketRefused) as refused:
        sealed.open()
    assert refused.value.reason == "version"
    assert str(refused.value) == (
        f"kv_transfer_params: nixl_kv_ticket is of wire version {version}; this engine speaks 12"
    )


# The MAC

SEALED = ticket().params(KEY)


def checked(params: object, key: bytes | None) -> Ticket:
    """Check a ticket as decode does."""
    sealed = SealedTicket.parse(params)
    sealed.check_mac(key)
    sealed.head()
    return sealed.open()


TEXT = SEALED[FIELD]


@pytest.mark.parametrize("position", range(len(TEXT)))
def test_a_ticket_of_which_any_character_is_changed_is_not_accepted(position: int) -> None:
    """Each by all that may be in a ticket, and some that may not; or it is left out, or doubled."""
    letters = set(string.ascii_letters + string.digits + "-_.=+/ \n\0é") - {TEXT[position]}
    begin, end = TEXT[:position], TEXT[position + 1 :]
    doubled = begin + 2 * TEXT[position] + end
    for text in (begin + end, doubled, *(begin + letter + end for letter in letters)):
        with pytest.raises(RemoteProtocolError):
            checked({FIELD: text}, KEY)


@given(text=st.text(max_size=64) | st.from_regex(r"[0-9]{1,2}\.\.[A-Za-z0-9_-]{1,64}\Z"))
def test_any_text_is_read_or_refused(text: str) -> None:
    for key in (None, KEY):
        try:
            made = checked({FIELD: text}, key)
        except RemoteProtocolError:
            continue
        assert key is None
        assert opened(made.params(None)) == made


def test_the_mac_is_checked_before_the_payload_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the payload was decoded")

    for name in ("b64decode", "urlsafe_b64decode"):
        monkeypatch.setattr(f"base64.{name}", refuse)
    with pytest.raises(RemoteProtocolError, match="mac is wrong"):
        checked(SEALED, OTHER_KEY)


@pytest.mark.parametrize(
    ("theirs", "key", "words"),
    [
        (KEY, None, "mac was made by an engine with a key; this one has no key"),
        (None, KEY, "mac is missing: made by an engine without a key; this one has a key"),
        (
            KEY,
            OTHER_KEY,
            (
                "mac is wrong: the ticket was changed, or made with another key; compare the "
                "fingerprints that both engines log at start"
            ),
        ),
    ],
    ids=["no key here", "no key there", "another key"],
)
def test_the_mac_of_an_engine_with_another_key_is_refused_in_words(
    theirs: bytes | None, key: bytes | None, words: str
) -> None:
    for params in (ticket().params(theirs), later(8, theirs)):
        with pytest.raises(RemoteProtocolError) as refusal:
            SealedTicket.parse(params).check_mac(key)
        assert str(refusal.value) == f"kv_transfer_params: nixl_kv_ticket {words}"


# The hash of what the KV depends on


def test_the_hash_is_the_same_on_both_sides_for_ever() -> None:
    """Prefill and decode may be of different builds: a change needs a new wire version."""
    assert context_hash(NONCE, [1, 2, 3], [b"adapter", b""]) == "e4b0aba36604e897c3413da61fa89419"


DIFFERENT: dict[str, tuple[Nonce, list[int] | None, list[bytes]]] = {
    "plain": (NONCE, [1, 2, 3], []),
    "other nonce": (Nonce(hex32(2)), [1, 2, 3], []),
    "other token": (NONCE, [1, 2, 4], []),
    "fewer tokens": (NONCE, [1, 2], []),
    "other order": (NONCE, [3, 2, 1], []),
    "no tokens": (NONCE, [], []),
    "embeddings": (NONCE, None, []),
    "empty extra": (NONCE, [1, 2, 3], [b""]),
    "two empty extras": (NONCE, [1, 2, 3], [b"", b""]),
    "extra": (NONCE, [1, 2, 3], [b"ab"]),
    "extra, cut": (NONCE, [1, 2, 3], [b"a", b"b"]),
    "extras in another order": (NONCE, [1, 2, 3], [b"b", b"a"]),
    "token as an extra": (NONCE, [1, 2], [b"\3"]),
}


def test_whatever_the_kv_depends_on_changes_the_hash() -> None:
    hashes = [context_hash(*arguments) for arguments in DIFFERENT.values()]
    assert len(set(hashes)) == len(DIFFERENT)
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in hashes)


def test_a_ticket_from_another_label_or_before_a_reset_has_other_hashes() -> None:
    """Prefill compares them with those of its offer when decode asks."""
    labels = [(0, ""), (1, ""), (2, ""), (0, "step 1"), (0, "step 2"), (1, "step 1")]
    hashes = [ticket(epoch=epoch, weights=weights).hashes for epoch, weights in labels]
    assert len(set(hashes)) == len(labels)
