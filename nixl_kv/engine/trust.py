"""Which engines this one trusts: those with the same key, on the hosts that `peers` allows."""

import ipaddress
from dataclasses import dataclass
from typing import Any

from nixl_kv.config import KEY_VARIABLE, AllowedHosts, Config
from nixl_kv.errors import TicketRefused
from nixl_kv.keys import (
    Keys,
    make_user_key,
    other_user_keys,
    parse_key,
    read_key_file,
    user_key_paths,
)
from nixl_kv.protocol.ticket import FIELD, SealedTicket, Ticket
from nixl_kv.transport.zmq import ZmqControl


@dataclass(frozen=True)
class Trust:
    """The key and the allowed hosts, as read at the start. Editing the key file needs a restart."""

    keys: Keys | None
    allowed: AllowedHosts
    peer_timeout_s: float
    source: str = ""  # where the key comes from, for the log
    key_path: str = ""  # the file of a generated key
    other_keys: tuple[str, ...] = ()  # files with other generated keys of this user
    other_paths: tuple[str, ...] = ()  # where this user's engines may find other generated keys

    @classmethod
    def of(cls, config: Config) -> "Trust":
        """Read the key. Without one, the engines of a user on one machine share a generated key.

        Raises:
            ConfigError: if the key is malformed, or other users can read the key file.
        """
        keys: Keys | None = None
        source = ""
        generated: dict[str, Any] = {}
        if config.key_file is not None:
            keys, source = read_key_file(config.key_file), f" (from key_file {config.key_file})"
        elif config.key is not None:
            keys, source = parse_key(config.key, KEY_VARIABLE), f" (from {KEY_VARIABLE})"
        elif not config.insecure:
            keys, path = make_user_key()
            source = f" (of this user's engines on this machine, in {path})"
            generated = {
                "key_path": str(path),
                "other_keys": tuple(map(str, other_user_keys(keys))),
                "other_paths": tuple(str(each) for each in user_key_paths() if each != path),
            }
        return cls(keys, config.allowed_hosts, config.peer_timeout_s, source, **generated)

    def __str__(self) -> str:
        key = "no key" if self.keys is None else f"the key {self.keys.fingerprint}{self.source}"
        return f"{key}; its peers are {self.allowed}"

    def warning(self) -> str:
        """Why engines of this user may have different keys; '' if no file says so."""
        if not self.other_keys:
            return ""
        return (
            f"this user has several generated keys: this engine has the one in {self.key_path}, "
            f"not the one in {' or '.join(self.other_keys)}; an engine that has another one cannot "
            "exchange KV with this engine: restart it, and delete the key that no engine has"
        )

    def seal(self, ticket: Ticket, *, for_in_tree: bool = True) -> dict[str, Any]:
        return ticket.params(self.ticket_key, for_in_tree=for_in_tree)

    def check(self, params: object) -> SealedTicket:
        """Find the ticket, of any wire version. Connects to nothing.

        Raises:
            TicketRefused: if no engine with our key has made it, or if it names a host that
                `peers` does not allow.
        """
        ticket = SealedTicket.parse(params)
        try:
            ticket.check_mac(self.ticket_key)
        except TicketRefused as error:
            if not self.key_path:
                raise
            raise TicketRefused(f"{error}; {self._where_keys_are()}", error.reason) from error
        self._check_host(ticket.head().host)
        return ticket

    def _where_keys_are(self) -> str:
        return (
            f"no key is configured here: this engine has the generated key in {self.key_path}; "
            f"prefill may have another one, in {' or '.join(self.other_keys or self.other_paths)}: "
            "its log names the file; start both with the same user, HOME and XDG_STATE_HOME, or "
            "set key_file on both"
        )

    def _check_host(self, host: str) -> None:
        if not self.allowed.allows(host):
            raise TicketRefused(
                f"kv_transfer_params: {FIELD}: host is {host!r}; allowed by 'peers': "
                f"{self.allowed}; if prefill is trusted, add its network to 'peers'",
                "host",
            )

    def open_own(self, params: object) -> Ticket:
        """Open a ticket that this engine has made itself.

        Raises:
            TicketRefused: if no engine with our key has made it, or if it is malformed.
        """
        ticket = SealedTicket.parse(params)
        ticket.check_mac(self.ticket_key)
        return ticket.open()

    def control(self, *own: str) -> ZmqControl:
        """`own` hosts may connect as well: the ranks of this engine, for example."""
        networks = *self.allowed.networks, *map(ipaddress.ip_network, own)
        allowed = AllowedHosts(networks)
        return ZmqControl(self.keys, allowed=allowed, peer_timeout_s=self.peer_timeout_s)

    @property
    def ticket_key(self) -> bytes | None:
        """Protects fields that pass through clients and front ends; None without a key."""
        return None if self.keys is None else self.keys.tickets
