"""The engines that a decode rank knows: one record per life of an engine."""

from nixl_kv.ids import EngineId, Incarnation
from nixl_kv.protocol import events
from nixl_kv.protocol.events import Failure, PeerKey
from nixl_kv.protocol.messages import WIRE_VERSION, Describe, Description
from nixl_kv.protocol.peers import BACKOFF_S, CONNECT_TIMEOUT_S, Cause, Peer, State


class Directory:
    """Peers by key. `now` is monotonic, in seconds."""

    def __init__(self) -> None:
        """Begin knowing nobody."""
        self._peers: dict[PeerKey, Peer] = {}

    def __repr__(self) -> str:
        """Each peer and its state."""
        shown = ", ".join(f"{p.key.engine}: {p.state.name}" for p in self._peers.values())
        return f"<Directory {shown or 'empty'}>"

    @property
    def busy(self) -> bool:
        """Whether a time-out or a pause is running, or a peer waits to be forgotten."""
        return any(peer.state is not State.READY for peer in self._peers.values())

    def clear(self) -> None:
        """Forget all of them."""
        self._peers.clear()

    def want(self, key: PeerKey, now: float) -> tuple[Peer, list[events.Action]]:
        """Look a peer up; the first to want it makes it connect."""
        peer = self._peers.setdefault(key, Peer(key))
        if peer.state is not State.UNKNOWN:
            return peer, []
        peer.move(Cause.WANTED)
        peer.until = now + CONNECT_TIMEOUT_S
        describe = Describe(WIRE_VERSION, key.incarnation, key.engine)
        return peer, [events.Send(key.endpoint, describe)]

    def described(self, message: Description, endpoint: str) -> list[events.Action]:
        """An engine described itself; nobody that was not asked is listened to."""
        key = PeerKey(EngineId(message.engine), Incarnation(message.incarnation), endpoint)
        if not self.is_asked(key):
            return []
        return [events.AddPeer(key, message), *self._disconnect(key)]

    def is_asked(self, key: PeerKey) -> bool:
        """Whether this peer has been asked who it is, and has not joined yet."""
        peer = self._peers.get(key)
        return peer is not None and peer.state is State.CONNECTING

    def joined(self, event: events.PeerJoined) -> None:
        """The peer can be read."""
        if self.is_asked(event.peer):
            peer = self._peers[event.peer]
            peer.description = event.description
            peer.routes = event.routes
            peer.move(Cause.JOINED)

    def unusable(self, key: PeerKey, failure: Failure, now: float) -> list[events.Action]:
        """The peer could not be reached or does not fit: not again for a while."""
        if not self.is_asked(key):
            return []
        peer = self._peers[key]
        peer.failure = failure
        peer.until = now + BACKOFF_S
        peer.move(Cause.UNUSABLE)
        return self._disconnect(key)

    def lost(self, endpoint: str, failure: Failure) -> list[PeerKey]:
        """A connection broke. Returns the peers that could not be reached because of it."""
        unreachable = []
        for peer in self._peers.values():
            if peer.state is State.CONNECTING and peer.key.endpoint == endpoint:
                unreachable.append(peer.key)
            elif peer.state is State.READY and endpoint in peer.endpoints:
                peer.failure = failure
                peer.move(Cause.LOST)
        return unreachable

    def late(self, now: float) -> list[PeerKey]:
        """The peers that did not describe themselves in time."""
        return [
            peer.key
            for peer in self._peers.values()
            if peer.state is State.CONNECTING and peer.until <= now
        ]

    def forget(self, in_use: set[PeerKey], now: float) -> list[events.Action]:
        """Remove what is over: pauses that have passed, and gone peers that nothing reads."""
        actions: list[events.Action] = []
        for peer in list(self._peers.values()):
            if peer.state is State.BACKOFF and peer.until <= now:
                peer.move(Cause.PAUSE_OVER)
            elif peer.state is State.GONE and peer.key not in in_use:
                peer.move(Cause.FORGOTTEN)
                actions.append(events.DropPeer(peer.key))
                actions += [events.Disconnect(endpoint) for endpoint in peer.endpoints]
            if peer.state is State.UNKNOWN:
                del self._peers[peer.key]
        return actions

    def _disconnect(self, answered: PeerKey) -> list[events.Action]:
        """Close a description's connection, unless another life is being asked for there."""
        others = (key for key in self._peers if key != answered)
        if any(key.endpoint == answered.endpoint and self.is_asked(key) for key in others):
            return []
        return [events.Disconnect(answered.endpoint)]
