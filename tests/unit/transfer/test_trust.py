"""What is checked of a ticket before anything is connected to where it leads."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from protocol_records import PEER, at, description, layout, ticket

from nixl_kv.config import Config
from nixl_kv.connector.sources import Household, Identity, Sources
from nixl_kv.connector.trust import Trust
from nixl_kv.errors import ConfigError, RemoteProtocolError
from nixl_kv.ids import Rank
from nixl_kv.keys import Keys, write_key_file
from nixl_kv.protocol import events
from nixl_kv.protocol.ticket import Ticket, context_hash

decode = pytest.importorskip("nixl_kv.connector.decode")

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def trust(extra: dict[str, Any]) -> Trust:
    return Trust.of(Config.parse(extra, {}))


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "key"
    write_key_file(path)
    return str(path)


def request(**changed: Any) -> Any:
    values: dict[str, Any] = {
        "request_id": "d1",
        "num_prompt_tokens": len(PROMPT),
        "prompt_token_ids": PROMPT,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "prompt_embeds": None,
    }
    return SimpleNamespace(**{**values, **changed})


def good(host: str = "127.0.0.1") -> Ticket:
    made = ticket(remote_host=host)
    return ticket(remote_host=host, context=context_hash(made.nonce, PROMPT, []))  # type: ignore[arg-type]


def arrive(who: Trust, offered: Ticket, **changed: Any) -> list[events.Command]:
    scheduler = decode.DecodeScheduler([4], who)
    scheduler.arrived(request(**changed), offered.params())
    commands: list[events.Command] = scheduler.take()
    return commands


def test_engines_with_one_key_take_each_others_tickets(key_file: str) -> None:
    prefill, reader = trust({"key_file": key_file}), trust({"key_file": key_file})
    offered = prefill.seal(good("10.0.0.1"))
    (fetch,) = arrive(reader, offered)
    assert isinstance(fetch, events.Fetch)
    assert fetch.ticket == offered


def test_engines_of_one_machine_need_none() -> None:
    offered = trust({}).seal(good())
    assert offered.mac == ""
    assert len(arrive(trust({}), offered)) == 1


REFUSED = [
    pytest.param({"key_file": True}, good(), "mac is missing", id="no MAC"),
    pytest.param({"key_file": True}, good().seal(b"x" * 32), "mac is wrong", id="another key"),
    pytest.param({}, good().seal(b"x" * 32), "this one has no key_file", id="MAC and no key"),
    pytest.param(
        {}, good("10.0.0.1"), "remote_host is '10.0.0.1'; allowed by 'peers': 127.0.0.0/8", id="far"
    ),
    pytest.param({"peers": ["10.0.0.0/8"]}, good("10.0.0.1"), None, id="allowed"),
    pytest.param({"peers": ["10.0.0.0/8"]}, good("11.0.0.1"), "remote_host", id="not allowed"),
    pytest.param({"peers": ["10.0.0.0/8"]}, good("::ffff:10.0.0.1"), None, id="as IPv6"),
]


@pytest.mark.parametrize(("extra", "offered", "words"), REFUSED)
@pytest.mark.parametrize("aborted", [False, True], ids=["", "aborted"])
def test_what_does_not_hold_connects_nowhere(
    key_file: str,
    extra: dict[str, Any],
    offered: Ticket,
    words: str | None,
    aborted: bool,  # noqa: FBT001
) -> None:
    if "key_file" in extra:
        extra = {"key_file": key_file}
    scheduler = decode.DecodeScheduler([4], trust(extra))
    if words is None:
        scheduler.arrived(request(abort_immediately=aborted), offered.params())
        return
    with pytest.raises(RemoteProtocolError, match=f"^kv_transfer_params: .*{words}"):
        scheduler.arrived(request(abort_immediately=aborted), offered.params())
    assert scheduler.take() == []


def test_the_mac_is_checked_before_the_host(key_file: str) -> None:
    """Where a forged ticket leads is not worth an answer."""
    who = trust({"key_file": key_file, "peers": ["10.0.0.0/8"]})
    with pytest.raises(RemoteProtocolError, match="mac is wrong"):
        arrive(who, good("8.8.8.8").seal(b"x" * 32))
    with pytest.raises(RemoteProtocolError, match="remote_host"):
        arrive(who, who.seal(good("8.8.8.8")))


def test_a_forged_ticket_does_not_burn_the_true_one(key_file: str) -> None:
    who = trust({"key_file": key_file})
    scheduler = decode.DecodeScheduler([4], who)
    with pytest.raises(RemoteProtocolError):
        scheduler.arrived(request(), good().params())
    scheduler.arrived(request(), who.seal(good()).params())
    assert len(scheduler.take()) == 1


def test_a_bad_key_file_stops_the_start(key_file: str) -> None:
    Path(key_file).chmod(0o644)
    with pytest.raises(ConfigError, match=r"^key_file is "):
        trust({"key_file": key_file})


def test_it_is_shown_without_secrets() -> None:
    keys = Keys.derive(b"k" * 32)
    shown = str(Trust(keys, Config(key_file="x").allowed_peers, 2.0))
    assert shown == f"the key {keys.fingerprint}; its peers are 0.0.0.0/0, ::/0"
    assert str(trust({})) == "no key; its peers are 127.0.0.0/8, ::1/128, 127.0.0.1/32"
    for secret in (keys.tickets, keys.server, keys.client):
        assert repr(secret) not in repr(Trust(keys, Config().allowed_peers, 2.0))


@pytest.mark.parametrize(
    ("cidrs", "allowed"),
    [
        pytest.param(["10.0.0.0/24"], True, id="inside"),
        pytest.param(["10.0.1.0/24"], False, id="outside"),
    ],
)
def test_a_description_leads_only_to_peers(cidrs: list[str], allowed: bool) -> None:  # noqa: FBT001
    """The engine may be allowed, and a rank of it be elsewhere."""
    identity = Identity({"dtype": "float32"}, Rank(0), trust({"peers": cidrs}).peers)
    transport: Any = None  # nothing is added to it
    sources = Sources(transport, Household.alone(layout(), identity))
    event = sources.add(events.AddPeer(PEER, description()))
    assert isinstance(event, events.PeerRefused)
    refused = f"engine 'prefill' has a rank at {at(0)}; allowed by 'peers': {cidrs[0]}"
    assert (event.reason == refused) is not allowed
    assert ("dtype" in event.reason) is allowed


def test_a_rank_that_nobody_reads_leads_nowhere() -> None:
    ranks = (msgspec.structs.replace(description().ranks[0], endpoint=""),)
    unread = msgspec.structs.replace(description(), ranks=ranks)
    identity = Identity({"dtype": "float32"}, Rank(0), trust({"peers": ["10.0.1.0/24"]}).peers)
    transport: Any = None
    sources = Sources(transport, Household.alone(layout(), identity))
    event = sources.add(events.AddPeer(PEER, unread))
    assert isinstance(event, events.PeerRefused)
    assert "dtype" in event.reason
