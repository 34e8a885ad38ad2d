"""Reads some bytes from a peer when a tool asks, to find out whether and how fast that works.

`nixl-kv doctor` gets a ticket from the engine that it wants to test (`probe_ticket` in its status)
and hands it to a decode rank (`StatusRequest.probe`). The rank checks it like that of a request: an
engine with the same key has sealed it, and `peers` allows its host. So a tool can make a rank read
from engines only that have sealed their own address, and learns nothing but the result.

The rank meets the peer like any other, and its first read is that of the handshake. Then it reads a
fence slot of each prefill rank, whose packets are small, and 64 KiB of its cache. The bytes are
discarded. A rank makes one probe at a time, which takes up to `messages.PROBE_S`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from nixl_kv.engine.peer_links import UNKNOWN, PeerLinks
from nixl_kv.errors import NixlKVError, TicketRefused
from nixl_kv.ids import FENCE_TOKEN_BYTES, EngineId, Incarnation, Nonce
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.decode import DecodeMachine
from nixl_kv.protocol.peers import Peer, PeerState
from nixl_kv.protocol.ticket import FIELD, SealedTicket, Ticket
from nixl_kv.reading.agent import ActiveRead
from nixl_kv.reading.agents import GREET_S, Agents
from nixl_kv.transport.base import ControlPlane

# Reads of 64 KiB from each rank. The fastest one counts: a busy machine delays some.
NUM_READS: Final = 3

NO_OFFER: Final = "0" * 32  # no offer has this nonce, and no prompt this hash

CheckTicket: TypeAlias = Callable[[object], SealedTicket]
"""See `Trust.check`."""


def probe_ticket(engine: EngineId, incarnation: Incarnation, host: str, port: int) -> Ticket:
    """A ticket that proves an engine's address and offers nothing."""
    return Ticket(
        engine=engine,
        incarnation=incarnation,
        host=host,
        port=port,
        nonce=Nonce(NO_OFFER),
        context=NO_OFFER,
        num_tokens=1,
    )


@dataclass
class _Probe:
    """One question of a tool. Times are monotonic, in seconds."""

    route: bytes
    peer: events.PeerKey
    since: float
    greeted_at: float = math.inf  # while the peer is READY
    reached: PeerState | None = None  # how far the handshake came; None: it has not begun
    reads: Iterator[ActiveRead] | None = None  # begins one after the other; None: not READY yet
    read: ActiveRead | None = None  # in progress
    seconds: list[float] = field(default_factory=list)  # the fastest read of each rank


class Prober:
    """The transfer thread owns it, and calls `poll` in each turn while it `is_busy`.

    Without `check_ticket` every probe is refused.
    """

    def __init__(
        self,
        agents: Agents,
        decode: DecodeMachine,
        control: ControlPlane,
        links: PeerLinks,
        check_ticket: CheckTicket | None,
        clock: Callable[[], float],
    ) -> None:
        self._agents = agents
        self._decode = decode
        self._control = control
        self._links = links
        self._check_ticket = check_ticket
        self._clock = clock
        self._probe: _Probe | None = None

    @property
    def is_busy(self) -> bool:
        return self._probe is not None

    @property
    def next_due(self) -> float | None:
        if (probe := self._probe) is None:
            return None
        return min(probe.since + messages.PROBE_S, probe.greeted_at + GREET_S)

    def begin(self, route: bytes, sealed: str) -> Sequence[events.DecodeEvent]:
        """Begin a probe of the engine that has sealed this ticket; `poll` answers.

        Returns what the machine has to do.
        """
        now, reason = self._clock(), ""
        try:
            peer = self._open(sealed)
        except TicketRefused as error:
            reason = str(error)
        if not self._agents.polled:
            reason = "this rank does not decode, so it reads from no engine"
        elif self._probe is not None:
            reason = "another probe is in progress; try again in some seconds"
        if reason:
            self._reply(route, reason)
            return ()
        self._probe = _Probe(route, peer, now)
        return (events.MeetPeer(peer),)

    def clear(self) -> None:
        """The machines were emptied."""
        if self._probe is not None:
            self._end(self._probe, "the transfer thread restarted")

    def poll(self) -> Sequence[events.DecodeEvent]:
        """Continue the probe, and answer once it has ended. Returns what the machine has to do.

        An error in it is a bug, which restarts the thread like any other.
        """
        probe, now = self._probe, self._clock()
        if probe is None:
            return ()
        peer = self._decode.peers.known.get(probe.peer)
        self._follow(probe, peer)
        failure = self._why_failed(probe, peer, now)
        if failure is not None or peer is None:
            self._end(probe, failure or "the engine is forgotten")
            return ()
        if probe.reads is None and peer.state is PeerState.READY:
            probe.reads, probe.greeted_at = self._begin_reads(probe, peer), -math.inf
        if probe.reads is not None and not self._agents.current.ranks.is_adding:
            self._read(probe, probe.reads)
        if now < probe.greeted_at + GREET_S or not self.is_busy:
            return ()
        probe.greeted_at = now  # prefill serves reads for a while after a message
        return (events.PeersMoved((probe.peer,)),)

    def _follow(self, probe: _Probe, peer: Peer | None) -> None:
        """Note how far the handshake is. A connection from before the probe may be found broken."""
        if peer is None or peer.state is PeerState.UNUSABLE:
            return
        read, is_connecting = probe.read, peer.state is PeerState.HANDSHAKING
        if is_connecting and read is not None and read.num_bytes == FENCE_TOKEN_BYTES:
            probe.reads = probe.read = None  # begin again over a new one
            probe.seconds.clear()
        if probe.reads is None:
            probe.reached = peer.state

    def _read(self, probe: _Probe, reads: Iterator[ActiveRead]) -> None:
        """Begin the next read if the last one has ended."""
        if probe.read is not None and not probe.read.op.has_ended:
            return
        try:
            probe.read = next(reads)
        except StopIteration:
            self._end(probe)
        except NixlKVError as error:
            self._end(probe, str(error))

    def _why_failed(self, probe: _Probe, peer: Peer | None, now: float) -> str | None:
        read = probe.read
        if read is not None and read.op.has_ended and read.op.failure is not None:
            return read.op.failure
        if read is not None and read.error:
            return read.error
        if peer is not None and peer.state is PeerState.UNUSABLE and probe.reached is not None:
            return "it cannot be used" if peer.failure is None else peer.failure.detail
        if now >= probe.since + messages.PROBE_S:
            return f"no end in {messages.PROBE_S:g} s"
        return None

    def _begin_reads(self, probe: _Probe, peer: Peer) -> Iterator[ActiveRead]:
        """Each `next` comes when the former read has ended."""
        agent = self._agents.current
        for route in peer.routes:
            rank = agent.ranks.find(probe.peer, route.remote_rank)
            if not route.readers:
                continue
            if rank is None:
                raise NixlKVError(f"prefill rank {route.remote_rank} is gone")
            yield agent.probe(rank, is_small=True)
            fastest = math.inf
            for _ in range(NUM_READS):
                read = agent.probe(rank, is_small=False)
                yield read
                fastest = min(fastest, self._clock() - read.started_at)
            probe.seconds.append(fastest)

    def _end(self, probe: _Probe, error: str = "") -> None:
        self._probe = None
        read, seconds = probe.read, probe.seconds
        peer = self._decode.peers.known.get(probe.peer)
        self._reply(
            probe.route,
            error,
            **(UNKNOWN if peer is None else self._links.links([peer])[0])._asdict(),
            step=None if probe.reached is None else probe.reached.name,
            # Of the read that failed, or of the last one.
            num_bytes=None if read is None else read.num_bytes,
            rank=None if read is None else read.rank,
            seconds=max(seconds) if seconds and not error else None,  # of the slowest rank
            num_ranks=len(seconds),
        )

    def _reply(self, route: bytes, error: str, **facts: Any) -> None:
        status = messages.Status(
            incarnation=self._decode.reader.incarnation,
            facts={"probe": "failed" if error else "read", "error": error, **facts},
            totals={},
            lists={},
        )
        self._control.reply(route, messages.encode(status))

    def _open(self, sealed: str) -> events.PeerKey:
        """Raises TicketRefused, also if this rank cannot check tickets."""
        if self._check_ticket is None:
            raise TicketRefused("this rank does not check tickets of tools")
        ticket = self._check_ticket({FIELD: sealed}).open()
        return events.PeerKey(ticket.engine, ticket.incarnation, ticket.endpoint)
