"""Whom this engine trusts: those who hold its key, on hosts that it may talk to."""

from dataclasses import dataclass

from nixl_kv.config import AllowedHosts, Config
from nixl_kv.errors import RemoteProtocolError
from nixl_kv.keys import Keys, read_key_file
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.transport.zmq import ZmqControl


@dataclass(frozen=True)
class Trust:
    """As it was at the start: a key file that changes later changes nothing until the next one."""

    keys: Keys | None
    allowed: AllowedHosts
    peer_timeout_s: float

    @classmethod
    def of(cls, config: Config) -> "Trust":
        """As configured; reads the key file.

        Raises:
            ConfigError: if the key file is not one, or others can read it.
        """
        keys = None if config.key_file is None else read_key_file(config.key_file)
        return cls(keys, config.allowed_hosts, config.peer_timeout_s)

    def __str__(self) -> str:
        key = "no key" if self.keys is None else f"the key {self.keys.fingerprint}"
        return f"{key}; its peers are {self.allowed}"

    def seal(self, ticket: Ticket) -> Ticket:
        """The ticket as those who trust this engine accept it."""
        return ticket if self.keys is None else ticket.seal(self.keys.tickets)

    def check(self, ticket: Ticket) -> None:
        """Whether an engine with the same key made it, and where it leads; nothing is connected.

        Raises:
            RemoteProtocolError: names the field, and what is allowed.
        """
        ticket.check_mac(None if self.keys is None else self.keys.tickets)
        if not self.allowed.allows(ticket.remote_host):
            raise RemoteProtocolError(
                f"kv_transfer_params: remote_host is {ticket.remote_host!r}; "
                f"allowed by 'peers': {self.allowed}"
            )

    def control(self) -> ZmqControl:
        """Sockets that know the key."""
        return ZmqControl(self.keys, allowed=self.allowed, peer_timeout_s=self.peer_timeout_s)
