"""Tickets with other values in their string, as a client without a key writes them."""

import base64
from typing import Any, Final

import msgspec

from harness.cluster.client import Ticket
from nixl_kv.protocol import ticket

INSIDE: Final = {"remote_engine_id": "engine", "remote_host": "host", "remote_port": "port"}
"""The names in the string of fields that routers know."""

NAMES: Final = ticket.Ticket.__struct_fields__


def values(params: Ticket) -> dict[str, Any]:
    """The values in the string, by name."""
    payload = params[ticket.FIELD].rpartition(".")[2]
    packed = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
    return dict(zip(NAMES, msgspec.msgpack.decode(packed), strict=True))


def sealed(params: Ticket, entries: object, version: int = ticket.WIRE_VERSION) -> Ticket:
    """The same ticket, with this in its string. Its MAC stays, and is wrong then."""
    mac = params[ticket.FIELD].split(".")[1]
    payload = base64.urlsafe_b64encode(msgspec.msgpack.encode(entries)).decode().rstrip("=")
    return params | {ticket.FIELD: f"{version}.{mac}.{payload}"}


def changed(params: Ticket, **fields: Any) -> Ticket:
    """The same ticket with these values, wherever it has them."""
    inside = values(params)
    outside = {name: value for name, value in fields.items() if name in params}
    renamed = {INSIDE.get(name, name): value for name, value in fields.items()}
    known = {name: value for name, value in renamed.items() if name in inside}
    return sealed(params, list((inside | known).values())) | outside
