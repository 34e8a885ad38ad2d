"""Which addresses of peers are admitted, for how long, and which names this rank gives itself."""

import ipaddress
from collections.abc import Iterable

import msgspec
import pytest

from nixl_kv import addresses
from nixl_kv.config import AllowedHosts
from nixl_kv.engine.admission import LOOK_S, MAX_HOSTS, SILENT_S, Admission
from nixl_kv.ids import Incarnation, Rank
from nixl_kv.protocol.events import Connect, DropPeer, Introduction
from nixl_kv.protocol.peers import KEPT_S
from nixl_kv.transport.base import NoPorts
from support.records import PEER, hex32, rank_description
from support.stepped import Clock

READERS = [Incarnation(hex32(number)) for number in range(3)]


class FakePorts(NoPorts):
    """Records who is admitted."""

    def __init__(self) -> None:
        self.listens: tuple[str, ...] = ("192.0.2.1",)
        self.admitted: list[set[str]] = []
        self.has_room = True

    def admit(self, hosts: Iterable[str]) -> bool:
        self.admitted.append(set(hosts))
        return self.has_room


class World:
    def __init__(self, *networks: str) -> None:
        self.ports, self.clock = FakePorts(), Clock()
        allowed = AllowedHosts(tuple(map(ipaddress.ip_network, networks)))
        self.admission = Admission(self.ports, allowed if networks else AllowedHosts(), self.clock)

    def admits(self) -> set[str]:
        self.admission.poll(self.clock.now)
        return self.ports.admitted[-1] if self.ports.admitted else set()

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds


def test_an_address_stays_until_the_last_peer_that_named_it_has_left() -> None:
    world = World()
    assert world.admits() == set()
    assert world.admission.admit(READERS[0], ["10.0.0.1", "fd00::1"]) == ()
    assert world.admission.admit(READERS[1], ["10.0.0.1"]) == ()
    assert world.admits() == {"10.0.0.1", "fd00::1"}
    world.admission.drop(READERS[0])
    assert world.admits() == {"10.0.0.1"}
    world.admission.drop(READERS[0])
    assert world.admits() == {"10.0.0.1"}
    world.admission.drop(READERS[1])
    assert world.admits() == set()
    assert len(world.ports.admitted) == 3, "nothing is attached without a change"


def test_a_peer_that_names_others_leaves_the_former_ones() -> None:
    world = World()
    world.admission.admit(READERS[0], ["10.0.0.1"])
    world.admission.admit(READERS[0], ["10.0.0.2"])
    assert world.admits() == {"10.0.0.2"}


NOT_ONE_HOST = ["127.0.0.1", "::1", "0.0.0.0", "::", "224.0.0.1", "ff02::1", "10.0.0.0/8", "x"]  # noqa: S104


@pytest.mark.parametrize("host", [*NOT_ONE_HOST, "10.0.1.1", "::ffff:10.0.1.1", "1:2", "10.0.0.1 "])
def test_only_single_hosts_within_peers_are_admitted(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World("10.0.0.0/24", "fd00::/16", "0.0.0.0/32", "224.0.0.0/4", "::/16", "ff00::/8")
    assert world.admission.admit(READERS[0], [host, "10.0.0.7"]) == (host,)
    assert world.admits() == {"10.0.0.7"}
    assert "is not admitted to UCX's ports, although a peer has named it" in caplog.text
    assert "10.0.0.0/24" in caplog.text


def test_one_host_has_one_spelling() -> None:
    world = World("10.0.0.0/24", "fd00::/16")
    assert world.admission.admit(READERS[0], ["::ffff:10.0.0.1", "FD00:0::1"]) == ()
    assert world.admits() == {"10.0.0.1", "fd00::1"}


def test_the_number_of_readers_is_bounded() -> None:
    """A reader invents its incarnations. The one that was silent for longest leaves."""
    world = World()
    for number in range(MAX_HOSTS + 3):
        world.pass_time(0.01)
        world.admission.admit(Incarnation(hex32(number)), [f"10.0.0.{min(number, 2)}"])
        world.admission.hear(Incarnation(hex32(0)))
    assert len(world.admission._named) == len(world.admission._heard_at) == MAX_HOSTS
    assert world.admits() == {"10.0.0.0", "10.0.0.2"}, "the second and third reader have left"


def test_the_number_of_addresses_is_bounded() -> None:
    """And a peer that names one that is there already needs no room."""
    world = World()
    named = [f"10.0.{n // 256}.{n % 256}" for n in range(MAX_HOSTS + 3)]
    assert world.admission.admit(READERS[0], named) == tuple(sorted(named[MAX_HOSTS:]))
    assert len(world.admits()) == MAX_HOSTS
    assert world.admission.admit(READERS[1], [named[0], "10.1.0.1"]) == ("10.1.0.1",)
    world.admission.drop(READERS[0])
    assert world.admits() == {named[0]}
    assert world.admission.admit(READERS[1], ["10.1.0.1"]) == ()


def test_a_reader_that_is_silent_for_long_has_left() -> None:
    """Longer than decode keeps a peer that it does not use."""
    assert SILENT_S > KEPT_S + LOOK_S
    world = World()
    assert world.admission.next_due is None
    world.admission.admit(READERS[0], ["10.0.0.1"])
    world.admission.admit(READERS[1], ["10.0.0.2"])
    assert world.admission.next_due == world.clock.now + LOOK_S
    for _ in range(int(SILENT_S / LOOK_S)):
        assert world.admits() == {"10.0.0.1", "10.0.0.2"}
        world.pass_time(LOOK_S)
        world.admission.hear(READERS[1])
        world.admission.hear(READERS[2])
    assert world.admits() == {"10.0.0.2"}
    world.pass_time(SILENT_S)
    assert world.admits() == set()
    assert world.admission.next_due is None, "an idle rank does not look"


def test_a_peer_is_let_in_before_this_rank_connects_to_it_until_it_is_forgotten() -> None:
    world = World()
    world.admission.precede(Connect(PEER, ("10.0.0.1",)))
    assert world.ports.admitted == [{"10.0.0.1"}]
    world.pass_time(10 * SILENT_S)
    assert world.admits() == {"10.0.0.1"}, "as long as it is known"
    world.admission.admit(READERS[0], ["10.0.0.2"])
    world.admission.precede(DropPeer(PEER))
    assert world.admits() == {"10.0.0.2"}
    world.admission.precede(Connect(PEER, ("10.0.0.1",)))
    world.admission.drop_peers()
    assert world.admits() == {"10.0.0.2"}


def test_it_tells_if_the_kernel_has_no_room() -> None:
    world = World()
    world.ports.has_room = False
    world.admission.admit(READERS[0], ["10.0.0.1"])
    assert not world.admission.apply()


def test_a_rank_names_the_addresses_from_which_it_will_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One per network of the other side, but for addresses that this machine has too."""
    routes = {"10.0.0.1": "10.0.0.9", "10.0.0.2": "10.0.0.9", "fd00::1": "fd00::9"}

    def towards(host: str) -> str:
        if host not in routes:
            raise OSError(101, "Network is unreachable")
        return routes[host]

    monkeypatch.setattr(addresses, "is_local", lambda host: host == "172.17.0.1")
    monkeypatch.setattr(addresses, "towards", towards)
    world = World()
    there = rank_description()
    assert world.admission.introduction(Rank(3), there) is None
    for listens, sources in (
        (("172.17.0.1",), ()),
        (("172.17.0.1", "10.0.0.1", "10.0.0.2"), ("10.0.0.9",)),
        (("10.0.0.1", "fd00::1", "203.0.113.1"), ("10.0.0.9", "fd00::9")),
    ):
        assert world.admission.sources(listens) == sources
        told = world.admission.introduction(
            Rank(3), msgspec.structs.replace(there, listens=listens)
        )
        expected = Introduction(Rank(3), sources, ("192.0.2.1",)) if sources else None
        assert told == expected
    told = world.admission.introduction(Rank(3), there, maps=True)
    assert told == Introduction(Rank(3), (), ("192.0.2.1",), maps=True)


@pytest.mark.parametrize("host", ["", "x", "1:2", "999.1.1.1", "::%eth0", "1" * 45])
def test_an_address_that_is_none_is_skipped(host: str) -> None:
    """A peer may name anything."""
    assert World().admission.sources([host]) == ()
