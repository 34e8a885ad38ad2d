"""The ticket: made by prefill, carried by strangers, checked by decode."""

import json
import re
import types
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_records import CONTEXT, ENGINE_LIFE, HOME, NONCE, decode, describe, hex32, ticket

from nixl_kv.errors import RemoteProtocolError
from nixl_kv.ids import Nonce
from nixl_kv.protocol.messages import encode
from nixl_kv.protocol.ticket import Ticket, bind_address, context_hash, endpoint, endpoint_host

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "ticket_version": 2,
    "incarnation": ENGINE_LIFE,
    "nonce": NONCE,
    "num_tokens": 8,
    "context": CONTEXT,
    "mac": "",
}


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
        pytest.param({}, "kv_transfer_params lacks the field 'ticket_version'", id="empty"),
        pytest.param(
            {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": []},
            "kv_transfer_params lacks the field 'ticket_version'",
            id="ticket of another connector",
        ),
        pytest.param(
            {"ticket_version": 1},
            "kv_transfer_params lacks the field 'do_remote_prefill'",
            id="no ticket",
        ),
        pytest.param({**PARAMS, 1: 2}, "Expected `str` - at `key` in `$`", id="key is a number"),
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
        pytest.param("ticket_version", 1, id="old version"),
        pytest.param("ticket_version", 3, id="new version"),
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


def test_a_ticket_of_our_own_is_checked_as_well() -> None:
    with pytest.raises(ValueError, match="localhost"):
        ticket(remote_host="localhost")


def test_an_engine_id_that_the_wire_cannot_carry_is_refused() -> None:
    """JSON can write half of a surrogate pair."""
    with pytest.raises(RemoteProtocolError, match="remote_engine_id"):
        Ticket.parse({**PARAMS, "remote_engine_id": "\ud800"})


@settings(deadline=None, max_examples=150)
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


@pytest.mark.parametrize(
    ("host", "port", "written", "bound"),
    [
        pytest.param("10.0.0.1", 5600, "tcp://10.0.0.1:5600", "tcp://10.0.0.1", id="IPv4"),
        pytest.param("::1", 1, "tcp://[::1]:1", "tcp://[::1]", id="IPv6"),
        pytest.param("fd00::7", 65535, "tcp://[fd00::7]:65535", "tcp://[fd00::7]", id="long port"),
    ],
)
def test_addresses_are_written_as_zmq_reads_them(
    host: str, port: int, written: str, bound: str
) -> None:
    assert endpoint(host, port) == written
    assert ticket(remote_host=host, remote_port=port).endpoint == written
    assert bind_address(host) == bound


def test_a_ticket_leads_home() -> None:
    assert ticket().endpoint == HOME
    assert decode(encode(describe())) == describe()


# The hash of what the KV depends on


def test_the_hash_is_the_same_on_both_sides_for_ever() -> None:
    """Prefill and decode may be of different builds: a change needs a new ticket version."""
    assert context_hash(NONCE, [1, 2, 3], [b"adapter", b""]) == "c0d8e9f213e3da6961d2735f78665917"


DIFFERENT = [
    pytest.param((NONCE, [1, 2, 3], []), id="plain"),
    pytest.param((Nonce(hex32(2)), [1, 2, 3], []), id="other nonce"),
    pytest.param((NONCE, [1, 2, 4], []), id="other token"),
    pytest.param((NONCE, [1, 2], []), id="fewer tokens"),
    pytest.param((NONCE, [3, 2, 1], []), id="other order"),
    pytest.param((NONCE, [], []), id="no tokens"),
    pytest.param((NONCE, None, []), id="embeddings"),
    pytest.param((NONCE, [1, 2, 3], [b""]), id="empty extra"),
    pytest.param((NONCE, [1, 2, 3], [b"", b""]), id="two empty extras"),
    pytest.param((NONCE, [1, 2, 3], [b"ab"]), id="extra"),
    pytest.param((NONCE, [1, 2, 3], [b"a", b"b"]), id="extra, cut"),
    pytest.param((NONCE, [1, 2, 3], [b"b", b"a"]), id="extras in another order"),
    pytest.param((NONCE, [1, 2], [b"\3\0\0\0\0\0\0\0"]), id="token as an extra"),
]


def test_whatever_differs_changes_the_hash() -> None:
    hashes = [context_hash(*param.values[0]) for param in DIFFERENT]
    assert len(set(hashes)) == len(DIFFERENT)
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in hashes)


def test_extras_may_come_from_an_iterator() -> None:
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
    """A change needs a new ticket version."""
    assert SEALED.mac == "1ff56be478b7b0fb1cabe77aee02c4b7"
    assert SEALED.seal(KEY) == SEALED


def test_a_sealed_ticket_holds() -> None:
    Ticket.parse(json.loads(json.dumps(SEALED.params()))).verify(KEY)
    ticket().verify(None)


CHANGED = {
    "remote_engine_id": "another",
    "remote_host": "10.0.0.2",
    "remote_port": 5601,
    "incarnation": hex32(7),
    "nonce": hex32(7),
    "num_tokens": 9,
    "context": hex32(7),
}
FIXED = {"do_remote_prefill", "do_remote_decode", "ticket_version"}


@pytest.mark.parametrize("name", CHANGED)
def test_whatever_is_changed_is_noticed(name: str) -> None:
    forged = Ticket.parse({**SEALED.params(), name: CHANGED[name]})
    with pytest.raises(RemoteProtocolError, match=r"^kv_transfer_params: mac is wrong: "):
        forged.verify(KEY)


def test_every_field_is_changed_above_or_can_have_one_value() -> None:
    assert set(PARAMS) == {*CHANGED, *FIXED, "mac"}


@pytest.mark.parametrize("name", sorted(FIXED))
def test_what_can_have_one_value_is_in_the_mac_too(name: str) -> None:
    """Else a later version could be passed off as an earlier one."""
    other = ticket()
    msgspec.structs.force_setattr(other, name, 7)
    assert other._mac(KEY) != SEALED.mac


@given(position=st.integers(0, 31), digit=st.sampled_from("0123456789abcdef"))
def test_every_digit_of_the_mac_counts(position: int, digit: str) -> None:
    mac = SEALED.mac[:position] + digit + SEALED.mac[position + 1 :]
    forged = ticket(mac=mac)
    if mac == SEALED.mac:
        forged.verify(KEY)
        return
    with pytest.raises(RemoteProtocolError):
        forged.verify(KEY)


@settings(deadline=None)
@given(first=st.text("ab", min_size=1, max_size=4), second=st.integers(1, 99))
def test_fields_do_not_run_into_each_other(first: str, second: int) -> None:
    other = ticket(remote_engine_id=first, remote_port=second).seal(KEY)
    assert (other.mac == ticket(remote_engine_id="ab", remote_port=12).seal(KEY).mac) == (
        (first, second) == ("ab", 12)
    )


@pytest.mark.parametrize(
    ("made", "key", "words"),
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
def test_tickets_of_engines_with_other_keys(made: Ticket, key: bytes | None, words: str) -> None:
    with pytest.raises(RemoteProtocolError) as refusal:
        made.verify(key)
    assert str(refusal.value) == f"kv_transfer_params: {words}"


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "fd00::7"])
def test_an_endpoint_has_a_host(host: str) -> None:
    assert endpoint_host(endpoint(host, 5600)) == host
