"""Every exception of the package.

The type says whose fault it was, because that decides what happens next: a ConfigError stops the
start, IncompatiblePeer and RemoteProtocolError cost the peer's requests a recompute,
TransportError costs the transfer, DigestError the comparison, and a LocalProtocolError is a bug of
ours.
"""


class NixlKVError(Exception):
    """The base of all of them. A ValueError is the other one: an argument that cannot be."""


class ConfigError(NixlKVError):
    """A configuration key or value that cannot be used. Names key, value and what is allowed."""


class IncompatiblePeer(NixlKVError):  # noqa: N818 - a state of the world, not a failure of ours
    """Two engines that cannot exchange KV. Names each differing field and both values."""


class LocalProtocolError(NixlKVError):
    """Our own code asked a machine for something that its state does not allow."""


class RemoteProtocolError(NixlKVError):
    """A peer or a client sent something that the protocol does not allow."""


class ForeignVersion(RemoteProtocolError):  # noqa: N818 - a state of the world, not a failure
    """A peer or a ticket is of another wire version. Names both versions."""


class TransportError(NixlKVError):
    """The data plane or the control plane failed."""


class PeerLost(TransportError):  # noqa: N818 - a state of the world, not a failure of ours
    """The peer's process or its connection is gone."""


class DigestError(NixlKVError):
    """KV cannot be digested here."""
