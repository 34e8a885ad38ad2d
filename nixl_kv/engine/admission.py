"""Which other machines may connect to UCX's ports of this rank: those that a peer has named.

UCX's ports ask for no key. So they admit this machine, and each address that a peer with the key
has named (`messages.Admit`, `Admitted`) and that `peers` allows, until that peer leaves or is
silent for long. Without a key anyone who reaches the control plane can name addresses, and only
`peers` bounds them.
"""

import contextlib
import ipaddress
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from nixl_kv import addresses
from nixl_kv.config import AllowedHosts, unmapped
from nixl_kv.errors import LimitedLog, get_logger
from nixl_kv.ids import Incarnation, Rank
from nixl_kv.protocol import events, messages
from nixl_kv.transport.base import Ports

logger = get_logger(__name__)

# UCX's ports no longer admit the addresses of a silent peer. Decode keeps connections to an unused
# peer for up to 600 s (protocol/peers.py, KEPT_S), and each use sends messages.
SILENT_S: Final = 900.0
# A rank looks again for silent peers.
LOOK_S: Final = 60.0

# The filter takes one instruction per IPv4 address, and up to ten per IPv6 address. Linux allows
# 4,096, and they must fit into net.core.optmem_max: before Linux 6.7 20 KiB, for 200 of the latter.
MAX_HOSTS: Final = 1024

# A reader of this rank, or an engine that this rank reads.
Holder: TypeAlias = Incarnation | events.PeerKey


class Admission:
    """The transfer thread owns it. `allowed` are the hosts that `peers` allows."""

    def __init__(self, ports: Ports, allowed: AllowedHosts, clock: Callable[[], float]) -> None:
        self._ports = ports
        self._allowed = allowed
        self._clock = clock
        self._named: dict[Holder, frozenset[str]] = {}
        self._heard_at: dict[Incarnation, float] = {}  # of readers that named addresses
        self.next_due: float | None = None  # when `poll` looks for silent readers
        self._is_applied = True
        self._log = LimitedLog(logger, clock, interval_s=LOOK_S)

    def __repr__(self) -> str:
        return f"<Admission: {len(self._named)} peers, {len(self.hosts)} hosts>"

    @property
    def hosts(self) -> frozenset[str]:
        return frozenset().union(*self._named.values())

    # --- addresses of this rank

    def introduction(
        self, rank: Rank, description: messages.RankDescription, *, maps: bool = False
    ) -> events.Introduction | None:
        """Tell a remote rank these before this one connects to it; None: nothing is necessary."""
        sources = self.sources(description.listens)
        if not (sources or maps):
            return None
        return events.Introduction(rank, sources, self._ports.listens, maps)

    def sources(self, listens: Iterable[str]) -> tuple[str, ...]:
        """The addresses from which this machine connects to those of another one."""
        found: set[str] = set()
        for host in listens:
            with contextlib.suppress(OSError, ValueError):  # no route: UCX cannot connect either
                if not addresses.is_local(host):
                    found.add(str(unmapped(ipaddress.ip_address(addresses.towards(host)))))
        return tuple(sorted(found))[: messages.MAX_ADDRESSES]

    # --- addresses of peers

    def admit(self, holder: Holder, named: Sequence[str]) -> tuple[str, ...]:
        """Note the addresses of a peer; `apply` lets them in. Returns the refused ones."""
        self._named.pop(holder, None)
        taken, kept, refused = set(self.hosts), set[str](), set[str]()
        for host in named:
            one = _parse(host)
            has_room = one in taken or len(taken) < MAX_HOSTS
            if has_room and self._may_admit(one):
                taken.add(one)
                kept.add(one)
            else:
                refused.add(host)
        if kept:
            self._named[holder] = frozenset(kept)
        if isinstance(holder, str):
            if holder not in self._heard_at and len(self._heard_at) >= MAX_HOSTS:
                self.drop(min(self._heard_at, key=self._heard_at.__getitem__))  # the most silent
            self._heard_at[holder] = self._clock()
            if self.next_due is None:
                self.next_due = self._clock() + LOOK_S
        self._is_applied = False
        if refused:
            self._log.warning(
                "%s is not admitted to UCX's ports, although a peer has named it; allowed: up to "
                "%d single addresses within 'peers' (%s). If it is an address of an engine, add "
                "its network to 'peers'",
                *(", ".join(sorted(refused)), MAX_HOSTS, self._allowed),
            )
        return tuple(sorted(refused))

    def apply(self) -> bool:
        """Attach the filter for the hosts of all peers. False: too many for the kernel."""
        if self._is_applied:
            return True
        self._is_applied = True
        return self._ports.admit(self.hosts)

    def hear(self, reader: Incarnation) -> None:
        """A reader has sent a message."""
        if reader in self._heard_at:
            self._heard_at[reader] = self._clock()

    def drop(self, holder: Holder) -> None:
        """A peer has left: no connection from its addresses stays, unless another has them."""
        if isinstance(holder, str):
            self._heard_at.pop(holder, None)
        if self._named.pop(holder, None) is not None:
            self._is_applied = False

    def precede(self, action: events.DataAction) -> None:
        """Let a peer in before NIXL connects to it, which it may answer; drop it in the end."""
        if isinstance(action, events.Connect):
            self.admit(action.peer, action.sources)
            self.apply()
        elif isinstance(action, events.DropPeer):
            self.drop(action.peer)

    def drop_peers(self) -> None:
        """The engines that this rank reads are forgotten."""
        for holder in [each for each in self._named if isinstance(each, events.PeerKey)]:
            self.drop(holder)

    def poll(self, now: float) -> None:
        """Drop readers that have been silent for long."""
        if self.next_due is not None and now >= self.next_due:
            for reader in [each for each, at in self._heard_at.items() if at + SILENT_S <= now]:
                self.drop(reader)
            self.next_due = now + LOOK_S if self._heard_at else None
        if not self._is_applied:
            self.apply()

    def _may_admit(self, host: str) -> bool:
        if not host:
            return False
        one = ipaddress.ip_address(host)
        is_single = not (one.is_loopback or one.is_unspecified or one.is_multicast)
        return is_single and self._allowed.allows(host)


def _parse(host: str) -> str:
    """The address in one spelling; empty for other texts."""
    try:
        return str(unmapped(ipaddress.ip_address(host)))
    except ValueError:
        return ""
