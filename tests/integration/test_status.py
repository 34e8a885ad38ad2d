"""What a tool learns of a rank over its control port, and who learns nothing."""

import time

import pytest

from nixl_kv.errors import RemoteProtocolError
from nixl_kv.ids import ANY_INCARNATION, Endpoint, RequestId, new_nonce, short
from nixl_kv.keys import Keys
from nixl_kv.protocol.events import PrepareOffer
from nixl_kv.protocol.messages import Status, StatusRequest, decode_status, encode
from nixl_kv.transport.base import FromEndpoint, Lost, Received
from nixl_kv.transport.memory import Fabric
from nixl_kv.transport.zmq import ZmqControl
from support.pair import MakePair, MakeTransport, SmallEngine, exchange

TIMEOUT_S = 30.0


def answers(endpoint: Endpoint, request: str = "", keys: Keys | None = None) -> list[Received]:
    """What comes back when a tool with these keys asks for the status."""
    tool = ZmqControl(keys)
    try:
        tool.send(endpoint, encode(StatusRequest(incarnation=ANY_INCARNATION, request=request)))
        deadline = time.monotonic() + TIMEOUT_S
        received: list[Received] = []
        while not received:
            assert time.monotonic() < deadline, "no answer, and no loss"
            received = tool.poll(1.0)
        return received
    finally:
        tool.close()


def status(engine: SmallEngine, request: str = "", keys: Keys | None = None) -> Status:
    (answer,) = answers(engine.ranks[0].description.endpoint, request, keys)
    assert isinstance(answer, FromEndpoint)
    return decode_status(answer.payload)


def test_an_idle_rank_says_who_it_is(memory: MakeTransport, make_pair: MakePair) -> None:
    prefill, _ = make_pair(memory)
    answer = status(prefill)
    assert answer.incarnation == prefill.ranks[0].description.incarnation
    assert (answer.engine, answer.rank, answer.roles) == ("prefill", 0, "prefill and decode")
    assert answer.uptime_s >= 0
    assert set(answer.totals.values()) == {0}
    assert (answer.peers, answer.links, answer.offers, answer.loads, answer.story) == ((),) * 5


def test_offers_say_what_they_wait_for(memory: MakeTransport, make_pair: MakePair) -> None:
    prefill, decode = make_pair(memory)
    nonce = new_nonce()
    table = (b"\5\0\0\0",)
    prefill.submit(PrepareOffer(nonce, RequestId("prepared"), "0" * 32, 4, table))
    prefill.offer("offered", [[6]], 4)
    decode.prepare_load("d1", prefill.offer("granted", [[7]], 3))
    decode.wait(lambda: prefill.parts.prefill.offers.any_granted)
    answer = status(prefill)
    assert answer.totals["offers"] == 3
    prepared, offered, granted = answer.offers
    assert (prepared.request, prepared.state) == ("prepared", "PREPARED")
    assert (prepared.nonce, prepared.num_tokens) == (short(nonce), 4)
    assert (prepared.waits_for, prepared.ends_in_s) == ("its ticket", None)
    assert (offered.request, offered.state) == ("offered", "OFFERED")
    assert offered.waits_for == "somebody to ask"
    assert offered.ends_in_s is not None
    assert 0 < offered.ends_in_s <= prefill.config.offer_ttl_s
    assert (granted.request, granted.state, granted.num_tokens) == ("granted", "GRANTED", 3)
    assert granted.waits_for == "engine 'decode', ranks 0"
    assert granted.ends_in_s is not None
    assert 0 < granted.ends_in_s <= prefill.config.lease_s


def test_a_load_says_what_it_waits_for(
    memory: MakeTransport, make_pair: MakePair, fabric: Fabric
) -> None:
    prefill, decode = make_pair(memory)
    decode.prepare_load("d1", prefill.offer("p1", [[7]], 4))
    decode.wait(lambda: prefill.parts.prefill.offers.any_granted)
    decode.wait(lambda: status(decode).loads[0].reads == ((0, "GRANTED"),))
    (load,) = status(decode).loads
    assert load.request == "d1"
    assert load.peer == f"engine 'prefill' at tcp://127.0.0.1:{prefill.directory.port}"
    assert load.waits_for == "blocks of its own"
    assert load.late_in_s is None  # it may queue for as long as it likes
    fabric.stuck = True
    decode.load("d1", [2])
    decode.wait(lambda: status(decode).loads[0].waits_for == "data")
    answer = status(decode)
    late_in_s = answer.loads[0].late_in_s
    assert late_in_s is not None
    assert 0 < late_in_s <= decode.config.request_timeout_s
    assert answer.totals | {"events": 0} == {
        "peers": 1,
        "links": 1,
        "offers": 0,
        "loads": 1,
        "reads": 1,
        "digests": 0,
        "events": 0,
    }
    (peer,) = answer.peers
    assert (peer.engine, peer.state, peer.detail) == ("prefill", "READY", "")
    assert peer.incarnation == short(prefill.description.incarnation)
    (link,) = answer.links
    assert link.endpoint == prefill.ranks[0].description.endpoint
    assert link.sent >= 1
    assert link.received >= 1
    assert link.idle_s >= 0


def test_a_rank_that_only_decodes_tells_the_story_of_a_load(
    memory: MakeTransport, make_pair: MakePair
) -> None:
    prefill, decode = make_pair(memory, roles="prefill")[0], make_pair(memory, roles="decode")[1]
    exchange((prefill, decode))
    assert status(decode).story == ()
    answer = status(decode, "d1")
    assert answer.roles == "decode"
    home = f"engine 'prefill' at tcp://127.0.0.1:{prefill.directory.port}"
    rank = f"rank 0 at {prefill.ranks[0].description.endpoint}"
    states = [(event.request, event.peer, event.before, event.after) for event in answer.story]
    assert states == [
        ("d1", home, "", "PREPARED"),
        ("", home, "", "CONNECTING"),
        ("", home, "CONNECTING", "READY"),
        ("d1", rank, "", "ASKING"),
        ("d1", rank, "ASKING", "GRANTED"),
        ("d1", rank, "GRANTED", "READING"),
        ("d1", rank, "READING", "CHECKING"),
        ("d1", rank, "CHECKING", "VERIFYING"),
        ("d1", rank, "VERIFYING", "DONE"),
        ("d1", home, "", "LOADED"),
    ]
    causes = [event.cause for event in answer.story]
    assert causes == [
        "PrepareLoad",
        "PrepareLoad",
        "PeerJoined: 1 of 1 ranks",
        "PeerJoined",
        "Grant",
        "StartLoad",
        "ReadDone",
        "SlotRead",
        "DigestCompared",
        "",
    ]
    (num_bytes,) = [event.num_bytes for event in answer.story if event.num_bytes]
    assert num_bytes == 3 * decode.cache.blocks([0]).nbytes
    times = [event.time for event in answer.story]
    assert times == sorted(times)


def test_prefill_tells_the_story_of_an_offer(memory: MakeTransport, make_pair: MakePair) -> None:
    pair = make_pair(memory)
    exchange(pair)
    story = status(pair[0], "p1").story
    states = [(event.before, event.after) for event in story]
    assert states[0] == ("", "PREPARED")
    assert states[-1] == ("GRANTED", "OVER")
    assert story[-1].cause == "Release: read"
    assert {event.peer for event in story} >= {"engine 'decode', rank 0", "engine 'decode'"}


def test_a_rank_with_a_key_answers_nobody_without_it(
    memory: MakeTransport, make_pair: MakePair
) -> None:
    keys, others = Keys.derive(b"k" * 32), Keys.derive(b"x" * 32)
    pair = make_pair(memory, make_control=lambda: ZmqControl(keys))
    endpoint = pair[0].ranks[0].description.endpoint
    for stranger in (None, others):
        (answer,) = answers(endpoint, keys=stranger)
        assert isinstance(answer, Lost)
        assert "handshake failed" in answer.reason
    assert status(pair[0], keys=keys).engine == "prefill"
    exchange(pair)


def test_a_status_is_no_message_of_the_protocol(memory: MakeTransport, make_pair: MakePair) -> None:
    """To serve it changes nothing: prefill does not take the tool for a reader."""
    prefill, _ = make_pair(memory)
    before = prefill.parts
    assert prefill.ranks[0].engine.loop is not None
    serve_until = prefill.ranks[0].engine.loop._serve_until
    assert status(prefill).totals == status(prefill).totals
    assert prefill.ranks[0].engine.loop._serve_until == serve_until
    assert prefill.parts is before


def test_an_answer_of_another_kind_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        decode_status(encode(StatusRequest(incarnation=ANY_INCARNATION)))
