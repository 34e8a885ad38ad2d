"""Ids with which a router starts both legs: what each leg says, and the nonce of the offer."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.errors import TicketRefused
from nixl_kv.protocol.pair import (
    BY_FIELD,
    BY_REQUEST,
    PairAddress,
    base_id,
    is_prefill_leg,
    nonce_of,
    on_decode,
    on_prefill,
)
from nixl_kv.protocol.ticket import check_literal
from support.records import ticket

ID = "5f3c8f1e-6a57-4a4c-9d0e-1c2b3a4d5e6f"
SENT = f"cmpl-{ID}-0"
REQUEST = f"{SENT}-0a1b2c3d"
HOST, PORT = "10.0.0.1", 5600
AT = {"remote_host": HOST, "remote_port": PORT}
ADDRESS = PairAddress(remote_host=HOST, remote_port=PORT)

TO_PREFILL: dict[str, dict[str, Any]] = {
    # llm-d's sidecar, `--kv-connector=offloading`; the source of a cached prefix may come too.
    BY_FIELD: {"remote_decoder": {"kv_request_id": ID}, "remote_kv_source": {"kv_request_id": "x"}},
    # vLLM's demo of a proxy for NixlPushConnector.
    BY_REQUEST: {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    },
}
TO_DECODE: dict[str, dict[str, Any]] = {
    BY_FIELD: {"remote_prefiller": {"kv_request_id": ID, **AT}},
    BY_REQUEST: {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "prefill-engine-001",
        "tp_size": 1,
        "pp_size": 1,
        "remote_request_id": ID,
        **AT,
    },
}
NAMES = {BY_FIELD: ID, BY_REQUEST: SENT}
TICKET = ticket().params(None, for_in_tree=False)
NOT_READY = {"do_remote_decode": False, "do_remote_prefill": True, "remote_ready": False}


@pytest.mark.parametrize("pair_ids", [BY_FIELD, BY_REQUEST])
def test_both_legs_have_one_id(pair_ids: str) -> None:
    name = NAMES[pair_ids]
    assert is_prefill_leg(TO_PREFILL[pair_ids], pair_ids)
    assert on_prefill(TO_PREFILL[pair_ids], pair_ids, REQUEST) == name
    assert not is_prefill_leg(TO_DECODE[pair_ids], pair_ids)
    # The other engine has appended other digits to the request's id.
    assert on_decode(TO_DECODE[pair_ids], pair_ids, f"{SENT}-99999999") == (name, ADDRESS)


@pytest.mark.parametrize("pair_ids", ["off", BY_FIELD, BY_REQUEST])
def test_a_ticket_needs_no_id(pair_ids: str) -> None:
    assert on_decode(TICKET | TO_DECODE[BY_FIELD], pair_ids, REQUEST) is None


@pytest.mark.parametrize(
    ("fields", "pair_ids"),
    [
        pytest.param(TO_DECODE[BY_FIELD], "off", id="llm-d's, off"),
        pytest.param(TO_DECODE[BY_FIELD], BY_REQUEST, id="llm-d's, another is on"),
        pytest.param({"do_remote_prefill": True}, BY_REQUEST, id="no address"),
        pytest.param({"do_remote_prefill": True, "remote_host": None}, BY_REQUEST, id="null"),
        pytest.param({**AT, "do_remote_prefill": 1}, BY_REQUEST, id="1 is not true"),
        pytest.param(
            {**TO_DECODE[BY_REQUEST], "remote_block_ids": [[]]}, BY_REQUEST, id="a ticket's fields"
        ),
    ],
)
def test_other_legs_have_no_id(fields: dict[str, Any], pair_ids: str) -> None:
    assert on_decode(fields, pair_ids, REQUEST) is None


@pytest.mark.parametrize("pair_ids", ["off", BY_REQUEST])
def test_prefill_has_no_id_of_a_form_that_is_off(pair_ids: str) -> None:
    assert not is_prefill_leg(TO_PREFILL[BY_FIELD], pair_ids)
    assert on_prefill(TO_PREFILL[BY_REQUEST], "off", REQUEST) is None
    assert on_prefill(TO_PREFILL[BY_REQUEST], BY_FIELD, REQUEST) is None


@pytest.mark.parametrize(
    ("fields", "pair_ids", "words"),
    [
        (TO_DECODE[BY_REQUEST], "off", "set pair_ids to 'request_id' on both engines"),
        (TO_DECODE[BY_REQUEST], BY_FIELD, "set pair_ids to 'request_id' on both engines"),
        (NOT_READY, "off", "unset VLLM_PD_CONCURRENT_DISPATCH"),
        (NOT_READY | TO_DECODE[BY_REQUEST], BY_REQUEST, "remote_ready is false"),
    ],
)
def test_a_form_that_is_known_but_not_accepted_says_what_to_do(
    fields: dict[str, Any], pair_ids: str, words: str
) -> None:
    with pytest.raises(TicketRefused, match=f"^kv_transfer_params.*{words}"):
        on_decode(fields, pair_ids, REQUEST)


BAD_IDS: tuple[object, ...] = ("", "x" * 257, "two\nlines", "\ud800", None, 7, True, [], {})
BAD_HOSTS = ("prefill", "", "fe80::1%eth0", "10.0.0.1:80", "1" * 65, None, 7, ["10.0.0.1"])
BAD_PORTS = (0, 65536, -1, 5600.5, "5600", "\ud800", True, None, 2**64)


@pytest.mark.parametrize(
    "changed",
    [
        *({"kv_request_id": each} for each in BAD_IDS),
        *({"remote_host": each} for each in BAD_HOSTS),
        *({"remote_port": each} for each in BAD_PORTS),
    ],
    ids=lambda changed: f"{changed!a:.40}",
)
def test_a_record_that_is_not_valid_is_refused_with_what_is_allowed(
    changed: dict[str, Any],
) -> None:
    record = {"kv_request_id": ID, **AT, **changed}
    with pytest.raises(
        TicketRefused, match=r"^kv_transfer_params: remote_prefiller: .*allowed: kv"
    ):
        on_decode({"remote_prefiller": record}, BY_FIELD, REQUEST)
    if "kv_request_id" in changed:
        with pytest.raises(TicketRefused, match=r"^kv_transfer_params: remote_decoder: .*allowed"):
            on_prefill({"remote_decoder": record}, BY_FIELD, REQUEST)
    elif changed.get("remote_host", "") is not None:
        with pytest.raises(TicketRefused, match=r"^kv_transfer_params: .*allowed: kv_request_id"):
            on_decode(TO_DECODE[BY_REQUEST] | changed, BY_REQUEST, REQUEST)


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
KEYS = sorted(
    {*TO_PREFILL[BY_FIELD], *TO_DECODE[BY_FIELD], *TO_DECODE[BY_REQUEST], *NOT_READY}
    | {"remote_block_ids", "nixl_kv_ticket"}
)
records = st.dictionaries(
    st.sampled_from(["kv_request_id", "remote_host", "remote_port"]),
    json | st.sampled_from([ID, HOST, PORT]),
)
anything = st.dictionaries(st.sampled_from(KEYS), json | records | st.sampled_from([True, HOST]))


@given(anything, st.sampled_from(["off", BY_FIELD, BY_REQUEST]), st.text(max_size=300))
def test_what_a_client_sends_is_read_or_refused(
    fields: dict[str, Any], pair_ids: str, request: str
) -> None:
    for leg in (on_prefill, on_decode):
        found: Any
        try:
            found, text = leg(fields, pair_ids, request), ""
        except TicketRefused as refusal:
            found, text = None, str(refusal)
        assert len(text) < 1000
        assert text.isprintable()
        name, address = found if isinstance(found, tuple) else (found, ADDRESS)
        check_literal("host", address.remote_host)
        assert 0 < address.remote_port < 65536
        assert name is None or len(nonce_of(name, None)) == 32


@pytest.mark.parametrize(
    ("request_id", "base"),
    [
        (REQUEST, SENT),
        (f"chatcmpl-{ID}-01234567", f"chatcmpl-{ID}"),
        (f"chatcmpl-{ID}", f"chatcmpl-{ID}"),  # vLLM may be told to append nothing
        (SENT, SENT),
        ("cmpl-0a1b2c3", "cmpl-0a1b2c3"),
        ("cmpl-0a1b2c3g", "cmpl-0a1b2c3g"),
        ("0a1b2c3d", "0a1b2c3d"),
        ("x-0a1b2c3d\n", "x-0a1b2c3d\n"),
        ("", ""),
    ],
)
def test_each_engine_appends_eight_digits_to_an_id(request_id: str, base: str) -> None:
    assert base_id(request_id) == base


def test_only_the_holders_of_a_key_derive_its_nonces() -> None:
    keys = (b"k" * 32, b"o" * 32, None)
    nonces = {nonce_of(name, key) for name in (ID, SENT, "") for key in keys}
    assert len(nonces) == 9
    assert nonce_of(ID, b"k" * 32) == nonce_of(ID, b"k" * 32)
    # The same on every version: engines of two versions must agree.
    assert nonce_of(ID, b"k" * 32) == "f6cbf003dc2d42bb509df89125b73ceb"
