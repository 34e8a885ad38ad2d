"""Names that travel have types of their own: whoever swaps two of them is refused by mypy."""

from pathlib import Path

import pytest

SWAPS = """
from nixl_kv.ids import Endpoint, RequestId
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.messages import HeartbeatReply
from nixl_kv.protocol.ticket import Ticket

home = Endpoint("tcp://10.0.0.1:5600")


def right(ask: messages.Ask, ticket: Ticket, request: RequestId) -> None:
    messages.Deny(
        incarnation=ask.incarnation, nonce=ask.nonce, claim=ask.claim, reader=ask.reader
    )
    events.PublishOffer(ticket.nonce, request)
    events.PeerKey(ticket.engine, ticket.incarnation, home)


def swapped(ask: messages.Ask, grant: messages.Grant, ticket: Ticket, request: RequestId) -> None:
    messages.Deny(incarnation=ask.incarnation, nonce=ask.claim, claim=ask.claim, reader=ask.reader)
    messages.Deny(incarnation=ask.incarnation, nonce=ask.nonce, claim=ask.nonce, reader=ask.reader)
    messages.Deny(incarnation=ask.nonce, nonce=ask.nonce, claim=ask.claim, reader=ask.reader)
    HeartbeatReply(incarnation=ask.incarnation, reader=ask.reader, number=1, lost=(ask.nonce,))
    messages.Reader(engine=ask.incarnation, incarnation=ask.incarnation, rank=ask.reader.rank)
    messages.Describe(incarnation=ask.incarnation, engine=ask.incarnation)
    events.WriteSlot(grant.slot, b"sixteen bytes...")
    events.PublishOffer(request, ticket.nonce)
    events.PrepareLoad(request, ticket, ticket.nonce)
    events.PeerKey(ticket.incarnation, ticket.engine, home)
"""


def test_names_of_different_kinds_cannot_be_swapped(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    source = tmp_path / "swaps.py"
    source.write_text(SWAPS)
    config = tmp_path / "mypy.ini"
    config.write_text(
        "[mypy]\nfollow_imports = silent\n[mypy-nixl_kv.geometry.*]\nfollow_imports = skip\n"
    )
    options = ["--config-file", str(config), "--cache-dir", str(tmp_path / "cache")]
    output, errors, _ = api.run([*options, str(source)])
    assert errors == ""
    refused = {int(line.split(":")[1]) for line in output.splitlines() if " error: " in line}
    lines = SWAPS.splitlines()
    first = lines.index(next(line for line in lines if line.startswith("def swapped"))) + 2
    assert refused == set(range(first, len(lines) + 1)), output
