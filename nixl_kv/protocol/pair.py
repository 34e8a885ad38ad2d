"""Pair ids: the router starts both legs itself, with one id for both instead of a ticket.

`pair_ids` says where the id is. 'kv_request_id' is the form of llm-d's sidecar for vLLM's
OffloadingConnector. 'request_id' is the form of proxies for vLLM's NixlPushConnector, which send
both requests with one X-Request-Id.

                     to prefill                               to decode
    'kv_request_id'  {"remote_decoder": {"kv_request_id"}}    {"remote_prefiller": {"kv_request_id",
                                                                "remote_host", "remote_port"}}
    'request_id'     {"do_remote_decode": true}               {"do_remote_prefill": true,
                                                                "remote_host", "remote_port"}

Both engines derive the nonce of the offer from the id and their key. No engine has made these
fields, so a client may have: decode sends the hash of its own prompt, and prefill compares. So a
client gets the KV of its own prompt only, and decode connects only to hosts that `peers` allows.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from nixl_kv.errors import TicketRefused, printable
from nixl_kv.ids import Nonce
from nixl_kv.protocol.ticket import FIELD, MAX_REASON, check_literal

BY_FIELD: Final = "kv_request_id"
BY_REQUEST: Final = "request_id"
DECODER: Final = "remote_decoder"  # for prefill: the leg that reads
PREFILLER: Final = "remote_prefiller"  # for decode: the leg that is read
SUFFIX: Final = re.compile(r"-[0-9a-f]{8}\Z", re.ASCII)

NOT_READY: Final = (
    "kv_transfer_params: remote_ready is false: the router starts decode before prefill answers, "
    "and will name prefill at /v1/pd_kv_ready, which vLLM lacks; prefill computes this prompt too; "
    "unset VLLM_PD_CONCURRENT_DISPATCH at the router, and use EarlyAnswer (docs/early-answer.md)"
)
PUSHED: Final = (
    "kv_transfer_params name prefill's address, but neither blocks nor a ticket: the router is for "
    "NixlPushConnector; set pair_ids to 'request_id' on both engines"
)


class PairId(msgspec.Struct, frozen=True, kw_only=True, rename={"name": "kv_request_id"}):
    """The id that a router has given both legs."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]

    def __post_init__(self) -> None:
        if not self.name.isprintable():
            raise ValueError("kv_request_id has characters that cannot be printed")


class PairAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where prefill serves its engine description."""

    remote_host: Annotated[str, Meta(min_length=2, max_length=64)]
    remote_port: Annotated[int, Meta(ge=1, le=65535)]

    def __post_init__(self) -> None:
        check_literal("remote_host", self.remote_host)


_Record = TypeVar("_Record", PairId, PairAddress)


def is_prefill_leg(fields: Mapping[str, Any], pair_ids: str) -> bool:
    """Whether the router wants this request's KV for another engine."""
    return fields.get("do_remote_decode") is True or has_no_ticket(fields, pair_ids)


def has_no_ticket(fields: Mapping[str, Any], pair_ids: str) -> bool:
    """Whether the router will not pass prefill's answer on to decode."""
    return pair_ids == BY_FIELD and DECODER in fields


def on_prefill(fields: Mapping[str, Any], pair_ids: str, request: str) -> str | None:
    """The id of the pair whose prefill leg this `request` is; a TicketRefused if it is bad."""
    if pair_ids == BY_FIELD and DECODER in fields:
        return _convert(fields[DECODER], PairId, DECODER).name
    return base_id(request) if pair_ids == BY_REQUEST else None


def on_decode(
    fields: Mapping[str, Any], pair_ids: str, request: str
) -> tuple[str, PairAddress] | None:
    """The id of the pair whose decode leg this `request` is, and prefill's address.

    Raises:
        TicketRefused: if either is bad, or if the router's form is known, but not accepted.
    """
    if FIELD in fields:
        return None
    if pair_ids == BY_FIELD and PREFILLER in fields:
        record = fields[PREFILLER]
        name = _convert(record, PairId, PREFILLER).name
        return name, _convert(record, PairAddress, PREFILLER)
    if fields.get("do_remote_prefill") is not True:
        return None
    if fields.get("remote_ready") is False:
        raise TicketRefused(NOT_READY)
    if fields.get("remote_host") is None or fields.get("remote_block_ids") is not None:
        return None
    if pair_ids != BY_REQUEST:
        raise TicketRefused(PUSHED)
    return base_id(request), _convert(fields, PairAddress)


def base_id(request: str) -> str:
    """A request's id without the eight random digits that each vLLM engine appends."""
    return SUFFIX.sub("", request)


def nonce_of(name: str, key: bytes | None) -> Nonce:
    """The nonce of a pair's offer; without the `key` of the engines, it cannot be guessed."""
    text = name.encode("utf-8", "surrogatepass")  # a request's id may be any text
    person = b"nixl_kv pair id"
    return Nonce(hashlib.blake2b(text, digest_size=16, key=key or b"", person=person).hexdigest())


def _convert(record: object, kind: type[_Record], name: str = "") -> _Record:
    try:
        return msgspec.convert(record, kind, strict=True)
    except ValueError as error:  # msgspec's, and text that is not UTF-8
        where = f"{name}: " if name else ""
        raise TicketRefused(
            f"kv_transfer_params: {where}{printable(str(error), MAX_REASON)}; allowed: "
            "kv_request_id, 1 to 256 printable characters; for decode also remote_host, an IP "
            "address, and remote_port, 1 to 65535"
        ) from error
