"""A tool asks a decode rank whether it can read an engine."""

from typing import Any

import pytest

from harness.local.memory_control import MemoryControl
from nixl_kv.engine.loop import Loop
from nixl_kv.engine.probe import NUM_READS
from nixl_kv.ids import FENCE_TOKEN_BYTES, endpoint_at
from nixl_kv.protocol.messages import PROBE_S, Status, StatusRequest, decode_to_tool, encode
from nixl_kv.protocol.peers import MAX_FAILURES, PeerState
from nixl_kv.reading.agents import GREET_S
from nixl_kv.transport.base import FromEndpoint
from support.stepped import MakeWorld, Stepped, World

TABLE, OTHER_TABLE = [7, 3, 4], [2, 9, 1]


class Tool:
    """It has the key for tools, and knows both engines' addresses."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.control = MemoryControl(world.network)

    def tell(self, rank: Stepped, probe: str = "") -> list[dict[str, Any]]:
        incarnation = rank.parts.description.incarnation
        question = StatusRequest(incarnation=incarnation, probe=probe)
        self.control.send(rank.parts.description.endpoint, encode(question))
        rank.turn()
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        found = []
        for item in self.control.poll(0):
            assert isinstance(item, FromEndpoint)
            status = decode_to_tool(item.payload)
            assert isinstance(status, Status)
            found.append(dict(status.facts))
        return found

    def ticket(self, of: Stepped | None = None) -> str:
        of = of or self.world.prefill
        of.directory.publish(of.description)
        return str(of.directory._status().facts["probe_ticket"])

    def result(self, turns: int = 100, step_s: float = 0.0) -> dict[str, Any]:
        """The result of the probe in progress."""
        for _ in range(turns):
            if answers := self.answers():
                (answer,) = answers
                return answer
            self.world.clock.now += step_s
            self.world.run(1)
        raise AssertionError(f"no answer within {turns} turns")

    def probe(self, *, step_s: float = 0.0) -> dict[str, Any]:
        assert self.tell(self.world.decode, self.ticket()) == []
        return self.result(turns=200, step_s=step_s)


@pytest.fixture
def tool(world: World) -> Tool:
    return Tool(world)


def peer_of(world: World) -> Any:
    (peer,) = world.decode.parts.decode.peers.known.values()
    return peer


def test_a_rank_meets_an_engine_and_reads_from_it(tool: Tool) -> None:
    decode = tool.world.decode
    before = decode.cache.memory.copy()
    answer = tool.probe()
    num_bytes = answer.pop("num_bytes")
    assert num_bytes > FENCE_TOKEN_BYTES
    seconds = answer.pop("seconds")
    assert seconds >= 0
    assert answer == {
        "probe": "read",
        "error": "",
        "step": "READY",
        "rank": 0,
        "num_ranks": 1,
        "link": "",
        "why_slow": "",
    }
    assert (decode.cache.memory == before).all(), "no byte of it comes into the cache"
    assert peer_of(tool.world).state is PeerState.READY
    assert not decode.parts.prober.is_busy
    copied = tool.world.fabric.bytes_copied
    assert tool.probe()["error"] == "", "the second time it is READY"
    read = tool.world.fabric.bytes_copied - copied
    assert read == FENCE_TOKEN_BYTES + NUM_READS * num_bytes


def test_a_probe_does_not_count_as_a_first_contact_and_keeps_nothing(tool: Tool) -> None:
    tool.probe()
    counted = tool.world.decode.parts.counts
    tool.world.decode.engine.pop_results()
    counted.pop()
    tool.probe()
    assert not counted.seconds
    assert tool.world.decode.parts.agents.current.warm_ups == []
    assert tool.world.prefill.parts.prefill.offers == {}


def test_only_an_engine_with_the_key_can_be_named(tool: Tool) -> None:
    (answer,) = tool.tell(tool.world.decode, "11." + "0" * 32 + ".kzEyNy4wLjAuMQ")
    assert answer["probe"] == "failed"
    assert "mac is wrong" in answer["error"]
    assert not tool.world.decode.parts.decode.peers.known
    assert not tool.world.decode.control.links(), "it connects to nothing"


def test_the_ticket_of_a_probe_loads_nothing(tool: Tool) -> None:
    """Prefill knows no offer with its nonce."""
    world = tool.world
    ticket = world.trust.check({"nixl_kv_ticket": tool.ticket()}).open()
    world.decode.prepare_load(1, ticket)
    world.decode.start_load(1, OTHER_TABLE, 1)
    world.run()
    assert world.decode.failed_load().kind.value == "denied"


def test_a_rank_that_does_not_decode_says_so(make_world: MakeWorld) -> None:
    world = make_world(roles=("prefill", "decode"))
    tool = Tool(world)
    (answer,) = tool.tell(world.prefill, tool.ticket())
    assert answer["error"] == "this rank does not decode, so it reads from no engine"


def test_a_rank_makes_one_probe_at_a_time(tool: Tool) -> None:
    world = tool.world
    tool.tell(world.decode, tool.ticket())
    (answer,) = tool.tell(world.decode, tool.ticket())
    assert answer["error"].startswith("another probe is in progress")
    assert tool.result()["error"] == ""


def hang_payload(world: World) -> None:
    """Small reads arrive, and long ones do not: a link that loses large packets."""
    transport = world.decode.parts.agents.current.transport
    poll = transport.poll

    def lose_long(read: Any) -> bool:
        is_long = sum(length for (_, length), _ in read.pairs) > FENCE_TOKEN_BYTES
        return False if is_long else poll(read)

    transport.poll = lose_long  # type: ignore[method-assign]


def test_a_probe_ends_in_time_and_says_how_far_it_came(tool: Tool) -> None:
    tool.probe()
    hang_payload(tool.world)
    answer = tool.probe(step_s=GREET_S / 2)
    assert answer["error"] == f"no end in {PROBE_S:g} s"
    assert (answer["step"], answer["seconds"]) == ("READY", None)
    assert answer["num_bytes"] > FENCE_TOKEN_BYTES


def test_prefill_is_kept_awake_meanwhile(tool: Tool) -> None:
    """Over TCP it must take part in each read, and it does so for two seconds after a message."""
    tool.probe()
    hang_payload(tool.world)
    tool.tell(tool.world.decode, tool.ticket())
    serving = tool.world.prefill.parts.serving
    assert serving is not None
    for _ in range(int(PROBE_S / GREET_S) - 1):
        tool.world.clock.now += GREET_S
        tool.world.run(1)
        assert serving.is_awake


def lose(world: World) -> None:
    serving = world.prefill.parts.serving
    assert serving is not None
    world.fabric.lost_peers.add(serving.transport.name)  # type: ignore[attr-defined]


def test_a_first_read_that_fails_is_told_from_large_packets_that_vanish(tool: Tool) -> None:
    """UCX's ports are closed, and the engine's own are not."""
    tool.world.fabric.reads_hang = True
    tool.tell(tool.world.decode, tool.ticket())
    tool.world.until(lambda: tool.world.decode.parts.agents.current.warm_ups)
    lose(tool.world)
    answer = tool.result()
    assert (answer["step"], answer["num_bytes"]) == ("HANDSHAKING", None)
    assert "a firewall may drop packets to UCX's ports" in answer["error"]
    assert peer_of(tool.world).state is PeerState.UNUSABLE


@pytest.mark.parametrize("is_back", [False, True])
def test_a_connection_that_has_broken_since_is_made_anew(tool: Tool, *, is_back: bool) -> None:
    tool.probe()
    lose(tool.world)
    tool.tell(tool.world.decode, tool.ticket())
    tool.world.until(lambda: peer_of(tool.world).state is PeerState.HANDSHAKING)
    if is_back:
        tool.world.fabric.lost_peers.clear()
        assert tool.result()["error"] == ""
        assert peer_of(tool.world).state is PeerState.READY
    else:
        answer = tool.result()
        assert (answer["step"], answer["num_bytes"]) == ("HANDSHAKING", None)
        assert peer_of(tool.world).state is PeerState.UNUSABLE


def test_large_packets_that_vanish_are_told_although_the_connection_breaks(tool: Tool) -> None:
    tool.probe()
    hang_payload(tool.world)
    tool.tell(tool.world.decode, tool.ticket())
    read = tool.world.decode.parts.prober
    tool.world.until(lambda: read._probe and read._probe.read and read._probe.read.num_bytes > 16)
    lose(tool.world)
    del tool.world.decode.parts.agents.current.transport.poll  # type: ignore[attr-defined]
    answer = tool.result()
    assert (answer["step"], answer["num_bytes"] > FENCE_TOKEN_BYTES) == ("READY", True)
    assert "is gone" in answer["error"]


def test_an_engine_that_is_gone_is_told(tool: Tool) -> None:
    sealed = tool.ticket()
    tool.world.prefill.directory.stop()
    tool.tell(tool.world.decode, sealed)
    answer = tool.result()
    assert answer["step"] == "CONNECTING"
    assert "cannot connect" in answer["error"]


def test_a_probe_tries_an_unusable_engine_at_once(tool: Tool) -> None:
    """Whatever its pause, which may last a minute: a person has mended something."""
    world = tool.world
    endpoint = endpoint_at("127.0.0.1", world.prefill.directory.port)
    listening = world.network.listeners.pop(endpoint)
    for number in range(MAX_FAILURES + 1):
        if number:
            world.clock.now = peer_of(world).pause_ends_at
        world.decode.prepare_load(number, world.prefill.offer(number, TABLE, 11))
        world.decode.start_load(number, OTHER_TABLE, 11)
        world.run()
    world.decode.engine.pop_results()
    peer = peer_of(world)
    assert (peer.state, peer.pause_ends_at > world.clock.now + 1) == (PeerState.UNUSABLE, True)
    world.network.listeners[endpoint] = listening
    assert tool.probe()["error"] == ""
    assert peer.state is PeerState.READY


def test_a_restart_of_the_thread_ends_it(tool: Tool) -> None:
    tool.tell(tool.world.decode, tool.ticket())
    loop: Loop = tool.world.decode.loop
    loop.restart()
    (answer,) = tool.answers()
    assert answer["error"] == "the transfer thread restarted"
    assert not loop.parts.prober.is_busy
