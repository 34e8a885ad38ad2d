"""Which tickets an engine accepts, and which peers its sockets admit."""

from pathlib import Path
from typing import Any

import pytest

from nixl_kv import keys
from nixl_kv.config import Config
from nixl_kv.engine.trust import Trust
from nixl_kv.errors import RemoteProtocolError, TicketRefused
from nixl_kv.ids import endpoint_at
from nixl_kv.keys import USER_KEY, Keys, make_user_key, write_key_file
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.transport.base import FromPeer, Lost, Received
from support.polling import wait_until
from support.records import ticket


def trust(extra: dict[str, Any]) -> Trust:
    return Trust.of(Config.parse(extra, {}))


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "key"
    write_key_file(path)
    return str(path)


def at_host(host: str = "127.0.0.1") -> Ticket:
    return ticket(host=host)


def test_engines_with_one_key_accept_each_others_tickets(key_file: str) -> None:
    prefill, decode = trust({"key_file": key_file}), trust({"key_file": key_file})
    sealed = decode.check(prefill.seal(at_host("10.0.0.1")))
    assert sealed.mac
    assert sealed.open() == at_host("10.0.0.1")


def test_engines_of_a_user_on_a_machine_share_a_key_without_configuration() -> None:
    sealed = trust({}).check(trust({}).seal(at_host()))
    assert sealed.mac
    assert sealed.open() == at_host()
    with pytest.raises(RemoteProtocolError, match="mac is missing"):
        trust({}).check(trust({"insecure": True}).seal(at_host()))


def test_an_insecure_engine_has_no_key_unless_one_is_given(key_file: str) -> None:
    assert trust({"insecure": True}).keys is None
    assert trust({"insecure": True, "key_file": key_file}).keys is not None


PLAIN, STRANGE = (at_host().params(key) for key in (None, b"x" * 32))


@pytest.mark.parametrize(
    ("extra", "offered", "words"),
    [
        pytest.param({"key_file": True}, PLAIN, "mac is missing", id="no MAC"),
        pytest.param({"key_file": True}, STRANGE, "mac is wrong", id="another key"),
        pytest.param({"insecure": True}, STRANGE, "this one has no key", id="MAC and no key"),
        pytest.param(
            {"insecure": True},
            at_host("10.0.0.1").params(None),
            "host is '10.0.0.1'; allowed by 'peers': 127.0.0.0/8",
            id="another machine",
        ),
        pytest.param(
            {"peers": ["10.0.0.0/8"], "insecure": True},
            at_host("11.0.0.1").params(None),
            "host is",
            id="not among peers",
        ),
    ],
)
def test_another_ticket_is_refused_in_words(
    key_file: str, extra: dict[str, Any], offered: dict[str, Any], words: str
) -> None:
    who = trust({"key_file": key_file} if "key_file" in extra else extra)
    with pytest.raises(RemoteProtocolError, match=f"^kv_transfer_params: .*{words}"):
        who.check(offered)


@pytest.mark.parametrize("host", ["10.0.0.1", "::ffff:10.0.0.1"], ids=["IPv4", "as IPv6"])
def test_a_ticket_of_a_peer_is_accepted(host: str) -> None:
    trust({"peers": ["10.0.0.0/8"], "insecure": True}).check(at_host(host).params(None))


def test_the_mac_is_checked_before_the_host(key_file: str) -> None:
    """Where a forged ticket leads is not worth an answer."""
    who = trust({"key_file": key_file, "peers": ["10.0.0.0/8"]})
    with pytest.raises(RemoteProtocolError, match="mac is wrong"):
        who.check(at_host("8.8.8.8").params(b"x" * 32))
    with pytest.raises(RemoteProtocolError, match="host is"):
        who.check(who.seal(at_host("8.8.8.8")))


def test_it_is_shown_without_secrets() -> None:
    _, path = make_user_key()
    derived = Keys.derive(b"k" * 32)
    with_key = Trust(derived, Config(key_file="x").allowed_hosts, 2.0, " (from key_file x)")
    words = f"the key {derived.fingerprint} (from key_file x); its peers are 0.0.0.0/0, ::/0"
    assert str(with_key) == words
    here = "its peers are 127.0.0.0/8, ::1/128, 127.0.0.1/32"
    assert str(trust({"insecure": True})) == f"no key; {here}"
    assert str(trust({})).endswith(f"(of this user's engines on this machine, in {path}); {here}")
    for secret in (derived.tickets, derived.server, derived.client):
        assert repr(secret) not in repr(with_key)


@pytest.mark.parametrize("others", [0, 1, 2], ids=["no other key", "one", "two"])
def test_a_wrong_mac_names_the_files_of_generated_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """Two engines of one user may have found different keys; the operator must learn where."""
    own = [tmp_path / "state" / "nixl_kv", tmp_path / "runtime", tmp_path / "tmp"]
    monkeypatch.setattr(keys, "_emptied_directories", lambda: own[1:])
    monkeypatch.setattr(keys, "_lasting_directories", lambda: own[:1])
    for directory in own[: others + 1]:
        directory.mkdir(mode=0o700, parents=True)
        write_key_file(directory / USER_KEY)
    files = [str(directory / USER_KEY) for directory in own]
    decode = trust({})
    with pytest.raises(TicketRefused) as refusal:
        decode.check(at_host("127.0.0.1").params(b"x" * 32))
    text = str(refusal.value)
    assert refusal.value.reason == "key"
    assert f"this engine has the generated key in {files[0]}; prefill may have another" in text
    named = files[1 : others + 1] if others else files[1:]
    assert f"in {' or '.join(named)}: " in text
    assert (files[0] in decode.warning()) == bool(others)
    assert all(file in decode.warning() for file in files[1 : others + 1])


def test_a_wrong_mac_beside_a_configured_key_names_no_generated_one(key_file: str) -> None:
    decode = trust({"key_file": key_file})
    with pytest.raises(TicketRefused, match=r"fingerprints that both engines log at start$"):
        decode.check(at_host("127.0.0.1").params(b"x" * 32))
    assert decode.warning() == ""


@pytest.mark.parametrize(
    ("has_key", "peers", "own", "is_let_in"),
    [
        pytest.param(True, None, [], True, id="the same key"),
        pytest.param(False, None, [], False, id="no key"),
        pytest.param(True, ["10.0.0.0/8"], [], False, id="not among the peers"),
        pytest.param(True, ["10.0.0.0/8"], ["127.0.0.1"], True, id="the engine's own host"),
        pytest.param(False, ["10.0.0.0/8"], ["127.0.0.1"], False, id="its own host, no key"),
    ],
)
def test_its_sockets_admit_the_peers_that_it_trusts(
    key_file: str, *, has_key: bool, peers: list[str] | None, own: list[str], is_let_in: bool
) -> None:
    listener = trust({"key_file": key_file, "peers": peers}).control(*own)
    asker = trust({"key_file": key_file} if has_key else {"insecure": True}).control()
    asker.send(endpoint_at("127.0.0.1", listener.listen("127.0.0.1", 0)), b"hello")
    items: list[Received] = []

    def has_come() -> list[Received]:
        items.extend(listener.poll(0.05) + asker.poll(0.05))
        return items

    wait_until(has_come)
    assert isinstance(items[0], FromPeer if is_let_in else Lost)
    listener.close()
    asker.close()
