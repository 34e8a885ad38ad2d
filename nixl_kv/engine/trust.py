"""Whom this engine trusts: those who hold its key, on hosts that it may talk to."""

from dataclasses import dataclass
from typing import Any

from nixl_kv.config import KEY_VARIABLE, AllowedHosts, Config
from nixl_kv.errors import RemoteProtocolError
from nixl_kv.keys import Keys, make_user_key, parse_key, read_key_file
from nixl_kv.protocol.ticket import FIELD, SealedTicket, Ticket
from nixl_kv.transport.zmq import ZmqControl


@dataclass(frozen=True)
class Trust:
    """As it was at the start: a key file that changes later changes nothing until the next one."""

    keys: Keys | None
    allowed: AllowedHosts
    peer_timeout_s: float
    source: str = ""
    """Where the key comes from."""

    @classmethod
    def of(cls, config: Config) -> "Trust":
        """As configured; without a key, engines of one user on one machine share one.

        Raises:
            ConfigError: if the key file is not one, or others can read it; or for a key that is
                none.
        """
        keys, source = _keys_of(config)
        return cls(keys, config.allowed_hosts, config.peer_timeout_s, source)

    def __str__(self) -> str:
        key = "no key" if self.keys is None else f"the key {self.keys.fingerprint} {self.source}"
        return f"{key.rstrip()}; its peers are {self.allowed}"

    def seal(self, ticket: Ticket, *, for_in_tree: bool = True) -> dict[str, Any]:
        """Make the `kv_transfer_params` of a ticket, see `Ticket.params`."""
        return ticket.params(self._ticket_key, for_in_tree=for_in_tree)

    def check(self, params: object) -> SealedTicket:
        """The ticket in `kv_transfer_params`, of any version; nothing is connected.

        An engine with the same key has made it, and it leads to a host that is allowed.

        Raises:
            RemoteProtocolError: names the field, and what is allowed.
        """
        ticket = SealedTicket.parse(params)
        ticket.check_mac(self._ticket_key)
        host = ticket.head().host
        if not self.allowed.allows(host):
            raise RemoteProtocolError(
                f"kv_transfer_params: {FIELD}: host is {host!r}; allowed by 'peers': {self.allowed}"
            )
        return ticket

    def control(self) -> ZmqControl:
        """Sockets that know the key."""
        return ZmqControl(self.keys, allowed=self.allowed, peer_timeout_s=self.peer_timeout_s)

    @property
    def _ticket_key(self) -> bytes | None:
        return None if self.keys is None else self.keys.tickets


def _keys_of(config: Config) -> tuple[Keys | None, str]:
    """An engine's keys, and where they come from."""
    if config.key_file is not None:
        return read_key_file(config.key_file), f"(from key_file {config.key_file})"
    if config.key is not None:
        return parse_key(config.key, KEY_VARIABLE), f"(from {KEY_VARIABLE})"
    if config.insecure:
        return None, ""
    keys, path = make_user_key()
    return keys, f"(of this user's engines on this machine, in {path})"
