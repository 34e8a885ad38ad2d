"""The ticket: made by prefill, carried by strangers, checked by decode."""

import json
import re
import types
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.errors import RemoteProtocolError
from nixl_kv.ids import Nonce
from nixl_kv.protocol.ticket import WIRE_VERSION, Ticket, context_hash
from support.records import CONTEXT, ENGINE_LIFE, NONCE, hex32, ticket

PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "wire_version": 4,
    "incarnation": ENGINE_LIFE,
    "nonce": NONCE,
    "num_tokens": 8,
    "context": CONTEXT,
    "mac": "",
}

ONE_TWO: dict[Any, Any] = {1: 2}


def test_a_ticket_has_this_form() -> None:
    assert ticket().params() == PARAMS


def test_a_ticket_comes_back_through_json() -> None:
    assert Ticket.parse(json.loads(json.dumps(ticket().params()))) == ticket()


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({**PARAMS, "remote_block_ids": [1], "tp_size": 8}, id="of vLLM's frontend"),
        pytest.param({**PARAMS, "kv": {"deep": [{}]}}, id="of a router"),
        pytest.param(types.MappingProxyType(PARAMS), id="any mapping"),
        pytest.param(
            {key: value for key, value in PARAMS.items() if key != "do_remote_decode"},
            id="without the optional one",
        ),
    ],
)
def test_fields_of_others_do_not_matter(params: object) -> None:
    assert Ticket.parse(params) == ticket()


@pytest.mark.parametrize(
    ("params", "error"),
    [
        pytest.param(None, "kv_transfer_params is of type NoneType; allowed: an object", id="null"),
        pytest.param([], "kv_transfer_params is of type list; allowed: an object", id="list"),
        pytest.param("{}", "kv_transfer_params is of type str; allowed: an object", id="text"),
        pytest.param({}, "kv_transfer_params lacks the field 'wire_version'", id="empty"),
        pytest.param(
            {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": []},
            "kv_transfer_params lacks the field 'wire_version'",
            id="ticket of another connector",
        ),
        pytest.param(
            {**{key: PARAMS[key] for key in PARAMS if key != "wire_version"}, "ticket_version": 2},
            "kv_transfer_params lacks the field 'wire_version'",
            id="ticket of an earlier version of this one",
        ),
        pytest.param(
            {"wire_version": 4},
            "kv_transfer_params lacks the field 'do_remote_prefill'",
            id="no ticket",
        ),
        pytest.param(PARAMS | ONE_TWO, "Expected `str` - at `key` in `$`", id="key is a number"),
    ],
)
def test_what_is_no_ticket_is_refused(params: object, error: str) -> None:
    with pytest.raises(RemoteProtocolError, match=re.escape(error)):
        Ticket.parse(params)


@pytest.mark.parametrize("name", sorted(set(PARAMS) - {"do_remote_decode", "mac"}))
def test_a_field_that_is_missing_is_named(name: str) -> None:
    params = {key: value for key, value in PARAMS.items() if key != name}
    with pytest.raises(RemoteProtocolError, match=name):
        Ticket.parse(params)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("do_remote_prefill", False, id="no prefill"),
        pytest.param("do_remote_prefill", 1, id="prefill is a number"),
        pytest.param("do_remote_decode", True, id="decode elsewhere"),
        pytest.param("remote_engine_id", "", id="no engine"),
        pytest.param("remote_engine_id", "e" * 257, id="long engine"),
        pytest.param("remote_engine_id", 7, id="engine is a number"),
        pytest.param("remote_port", 0, id="port zero"),
        pytest.param("remote_port", 65536, id="port"),
        pytest.param("remote_port", "5600", id="port is text"),
        pytest.param("remote_port", True, id="port is a truth"),
        pytest.param("wire_version", "4", id="version is text"),
        pytest.param("wire_version", 4.0, id="version is a fraction"),
        pytest.param("wire_version", None, id="version is null"),
        pytest.param("wire_version", [4] * 10_000, id="version is a list"),
        pytest.param("wire_version", 10**5000, id="version beyond what can be written"),
        pytest.param("mac", None, id="mac is null"),
        pytest.param("mac", "a" * 31, id="short mac"),
        pytest.param("mac", "a" * 33, id="long mac"),
        pytest.param("mac", "A" * 32, id="mac in capitals"),
        pytest.param("mac", "é" * 32, id="mac of other letters"),
        pytest.param("incarnation", "a" * 31, id="short incarnation"),
        pytest.param("nonce", "a" * 33, id="long nonce"),
        pytest.param("nonce", "A" * 32, id="nonce in capitals"),
        pytest.param("nonce", None, id="no nonce"),
        pytest.param("context", "x" * 32, id="context of other digits"),
        pytest.param("num_tokens", 0, id="no tokens"),
        pytest.param("num_tokens", -1, id="negative tokens"),
        pytest.param("num_tokens", 2**31, id="tokens"),
        pytest.param("num_tokens", 2**70, id="tokens beyond any integer"),
        pytest.param("num_tokens", 8.0, id="tokens as a fraction"),
        pytest.param("remote_host", 5, id="host is a number"),
        pytest.param("remote_host", ":", id="short host"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(name: str, value: object) -> None:
    with pytest.raises(RemoteProtocolError, match=rf"^kv_transfer_params: .*\$\.{name}"):
        Ticket.parse({**PARAMS, name: value})


@pytest.mark.parametrize("name", ["incarnation", "nonce", "context", "mac"])
def test_a_line_end_is_no_part_of_a_field(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match=name):
        Ticket.parse({**PARAMS, name: hex32(1) + "\n"})


@pytest.mark.parametrize(
    "host",
    [
        pytest.param("localhost", id="name"),
        pytest.param("example.com", id="domain"),
        pytest.param("10.0.0.1 ", id="space"),
        pytest.param("10.0.0.1:80", id="port"),
        pytest.param("10.0.0.1\n", id="line end"),
        pytest.param("[::1]", id="brackets"),
        pytest.param("10.1", id="short form"),
        pytest.param("0x7f000001", id="hexadecimal"),
        pytest.param("*", id="wildcard"),
        pytest.param("::%1]:0;[localhost", id="a name in the scope"),
        pytest.param("fe80::1%eth0", id="scope"),
    ],
)
def test_a_host_is_an_address_and_nothing_else(host: str) -> None:
    """ZMQ connects to `[localhost]` for the endpoint `tcp://[::%1]:0;[localhost]:5600`."""
    with pytest.raises(RemoteProtocolError):
        Ticket.parse({**PARAMS, "remote_host": host})


def test_our_own_tickets_are_checked_as_well() -> None:
    with pytest.raises(ValueError, match="localhost"):
        ticket(remote_host="localhost")


def test_an_engine_id_that_cannot_be_encoded_is_refused() -> None:
    """JSON can write half of a surrogate pair."""
    with pytest.raises(RemoteProtocolError, match="remote_engine_id"):
        Ticket.parse({**PARAMS, "remote_engine_id": "\ud800"})


@given(
    name=st.sampled_from(sorted(PARAMS)),
    value=st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
)
def test_any_value_is_accepted_or_refused(name: str, value: Any) -> None:
    try:
        parsed = Ticket.parse({**PARAMS, name: value})
    except RemoteProtocolError:
        return
    assert parsed.params()[name] == value


@pytest.mark.parametrize("version", [0, 2, 3, 5, -1, 2**31 - 1, True])
def test_a_ticket_of_another_version_is_refused_in_words(version: object) -> None:
    """Whatever else it has, or lacks."""
    for params in (PARAMS, {"do_remote_prefill": True}):
        with pytest.raises(RemoteProtocolError) as refused:
            Ticket.parse({**params, "wire_version": version})
        assert str(refused.value) == (
            f"kv_transfer_params: wire_version is {version!r}; this engine speaks 4"
        )


def test_the_words_of_a_refusal_are_few() -> None:
    """They are logged, and a client chooses what they are about."""
    for value in ("x" * 100_000, ["x"] * 100_000, 10**4000, {"x": "y" * 100_000}):
        with pytest.raises(RemoteProtocolError) as refused:
            Ticket.parse({**PARAMS, "wire_version": value})
        assert len(str(refused.value)) < 200


def test_a_ticket_has_the_version_of_the_wire() -> None:
    assert ticket().wire_version == WIRE_VERSION == 4


# The hash of what the KV depends on


def test_the_hash_is_the_same_on_both_sides_for_ever() -> None:
    """Prefill and decode may be of different builds: a change needs a new wire version."""
    assert context_hash(NONCE, [1, 2, 3], [b"adapter", b""]) == "c0d8e9f213e3da6961d2735f78665917"


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
    "token as an extra": (NONCE, [1, 2], [b"\3\0\0\0\0\0\0\0"]),
}


def test_whatever_the_kv_depends_on_changes_the_hash() -> None:
    hashes = [context_hash(*arguments) for arguments in DIFFERENT.values()]
    assert len(set(hashes)) == len(DIFFERENT)
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in hashes)


def test_token_ids_and_extras_may_come_in_any_container() -> None:
    extras = [b"a", b"b"]
    assert context_hash(NONCE, (1,), iter(extras)) == context_hash(NONCE, [1], extras)


def test_a_ticket_names_one_life_of_an_engine() -> None:
    """To ask for any would be answered, by an engine that the ticket does not name."""
    with pytest.raises(RemoteProtocolError, match="incarnation is all zeros"):
        Ticket.parse({**PARAMS, "incarnation": "0" * 32})


# The MAC

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
SEALED = ticket().seal(KEY)


def test_the_mac_is_the_same_on_both_sides_for_ever() -> None:
    """A change needs a new wire version."""
    assert SEALED.mac == "ffaf780dcea35a12ef12066731525c52"
    assert SEALED.seal(KEY) == SEALED


def test_a_sealed_ticket_has_the_right_mac_after_its_journey() -> None:
    Ticket.parse(json.loads(json.dumps(SEALED.params()))).check_mac(KEY)
    ticket().check_mac(None)


CHANGED = {
    "remote_engine_id": "another",
    "remote_host": "10.0.0.2",
    "remote_port": 5601,
    "incarnation": hex32(7),
    "nonce": hex32(7),
    "num_tokens": 9,
    "context": hex32(7),
}
FIXED = {"do_remote_prefill", "do_remote_decode", "wire_version"}


@pytest.mark.parametrize("name", CHANGED)
def test_a_change_of_any_field_makes_the_mac_wrong(name: str) -> None:
    forged = Ticket.parse({**SEALED.params(), name: CHANGED[name]})
    with pytest.raises(RemoteProtocolError, match=r"^kv_transfer_params: mac is wrong: "):
        forged.check_mac(KEY)


def test_every_field_is_changed_above_or_can_have_one_value() -> None:
    assert set(PARAMS) == {*CHANGED, *FIXED, "mac"}


@pytest.mark.parametrize("name", sorted(FIXED))
def test_fields_that_can_have_one_value_are_in_the_mac_too(name: str) -> None:
    """Else a later version could be passed off as an earlier one."""
    other = ticket()
    msgspec.structs.force_setattr(other, name, 7)
    assert other._mac(KEY) != SEALED.mac


@given(position=st.integers(0, 31), digit=st.sampled_from("0123456789abcdef"))
def test_every_digit_of_the_mac_counts(position: int, digit: str) -> None:
    mac = SEALED.mac[:position] + digit + SEALED.mac[position + 1 :]
    forged = ticket(mac=mac)
    if mac == SEALED.mac:
        forged.check_mac(KEY)
        return
    with pytest.raises(RemoteProtocolError):
        forged.check_mac(KEY)


@given(first=st.text("ab", min_size=1, max_size=4), second=st.integers(1, 99))
def test_fields_do_not_run_into_each_other(first: str, second: int) -> None:
    other = ticket(remote_engine_id=first, remote_port=second).seal(KEY)
    assert (other.mac == ticket(remote_engine_id="ab", remote_port=12).seal(KEY).mac) == (
        (first, second) == ("ab", 12)
    )


@pytest.mark.parametrize(
    ("theirs", "key", "words"),
    [
        pytest.param(
            SEALED,
            None,
            "mac was made by an engine with a key; this one has no key_file",
            id="no key here",
        ),
        pytest.param(
            ticket(),
            KEY,
            "mac is missing: made by an engine without a key; this one has a key_file",
            id="no key there",
        ),
        pytest.param(
            SEALED,
            OTHER_KEY,
            "mac is wrong: the ticket was changed, or made with another key",
            id="another key",
        ),
    ],
)
def test_the_mac_of_an_engine_with_another_key_is_refused_in_words(
    theirs: Ticket, key: bytes | None, words: str
) -> None:
    with pytest.raises(RemoteProtocolError) as refusal:
        theirs.check_mac(key)
    assert str(refusal.value) == f"kv_transfer_params: {words}"
