"""The ticket: the string that prefill's answer carries through the router to decode.

It travels in `kv_transfer_params`, so a client may have changed it. It names no block and no memory
address: it names the engine, the offer and the hash of all that the KV depends on. If the engines
share a key, a MAC over the whole ticket proves that one of them made it. The fields beside it are
for routers; some overwrite them, so decode never reads them.

    nixl_kv_ticket = "12.0f5c...e2.l6kxMC4w..."
                      |    |         |
             wire version  |         array in msgpack and base64url (no padding):
                           |         [host, port, nonce, and then fields of this version]
                           MAC: 32 hexadecimal digits, or empty without a key

Every version keeps the name of the field, the three pieces and the bound of their length, the MAC,
and the first three entries of the array. So each version can check the MAC and the host of a ticket
of any other version.
"""

import base64
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from nixl_kv.config import MAX_LABEL
from nixl_kv.errors import TicketRefused, printable
from nixl_kv.ids import ANY_INCARNATION, Endpoint, EngineId, Incarnation, Nonce, endpoint_at

WIRE_VERSION: Final = 12  # of tickets and messages alike; see docs/protocol.md
MAC_BYTES: Final = 16

FIELD: Final = "nixl_kv_ticket"
MAX_LENGTH: Final = 4096  # characters
MAX_REASON: Final = 300  # characters of an error about a payload; msgspec quotes its sender
MAX_WHY: Final = 128  # characters of the reason why a prompt is not offered

SEALED: Final = re.compile(r"(0|[1-9][0-9]{0,8})\.((?:[0-9a-f]{32})?)\.([A-Za-z0-9_-]+)", re.ASCII)
# vLLM's flags beside the ticket. Routers may leave them out, or set them to null.
FLAGS: Final[Mapping[str, bool]] = {"do_remote_prefill": True, "do_remote_decode": False}

HEX32: Final = Meta(pattern=r"^[0-9a-f]{32}\Z")
MAX_NAME: Final = 256  # characters of an engine's id
NAME: Final = Meta(min_length=1, max_length=MAX_NAME)

Context = Annotated[str, Meta(pattern=r"^([0-9a-f]{32}){1,3}\Z")]  # `Ticket.hashes`
_Hash = Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")]  # from `context_hash`, or empty

_decoder = msgspec.msgpack.Decoder(list)
_Head = TypeVar("_Head", bound="TicketHead")


UNCHANGED: Final = "a client or router changed it; it must reach decode as prefill wrote it"


class TicketHead(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that a ticket of any version has: the engine's address, and the offer."""

    host: Annotated[str, Meta(min_length=2, max_length=64)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    nonce: Annotated[Nonce, HEX32]

    def __post_init__(self) -> None:
        check_literal("host", self.host)

    @property
    def endpoint(self) -> Endpoint:
        return endpoint_at(self.host, self.port)


class Ticket(TicketHead, frozen=True, kw_only=True):
    """A prefill on offer: finished, or an early one, whose ticket precedes its offer.

    The ticket of a prompt with media that prefill does not offer still has both hashes: by them
    decode knows whether it may compute the prompt itself.
    """

    engine: Annotated[EngineId, NAME]
    incarnation: Annotated[Incarnation, HEX32]
    num_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    context: Annotated[str, HEX32]  # of these tokens, the adapter, the salt and the label
    epoch: Annotated[int, Meta(ge=0, le=2**62)] = 0  # counts resets of prefill's cache
    weights: Annotated[str, Meta(max_length=MAX_LABEL)] = ""  # the label of prefill's weights
    media: _Hash = ""  # of the images, audio and video; empty: the prompt has none
    # The reason, if prefill keeps no blocks for decode.
    not_offered: Annotated[str, Meta(max_length=MAX_WHY)] = ""
    is_early: bool = False  # prefill has not computed the prompt yet

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("engine", "weights", "not_offered"):
            if not getattr(self, name).isprintable():
                raise ValueError(f"{name} has characters that cannot be printed")

    @property
    def hashes(self) -> str:
        """Prefill compares them once more when decode asks."""
        return self.context + self.media + weights_hash(self.epoch, self.weights)

    def params(self, key: bytes | None, *, for_in_tree: bool = True) -> dict[str, Any]:
        """The `kv_transfer_params` of prefill's answer, as JSON types; without a `key` no MAC.

        Not `for_in_tree`, it sets the flags: vLLM's front end on decode then reports prefill's
        cached tokens, and tells the connector about each request that it rejects.
        """
        # A decode engine may run vLLM's own NixlConnector, which computes a request without
        # `do_remote_prefill` itself. If a router sets the flag, that engine's scheduler raises and
        # ends the engine, unless the `remote_*` fields are present and `remote_block_ids` is true.
        # Its worker then divides by `tp_size` before it connects, and only that request fails.
        values = [getattr(self, name) for name in self.__struct_fields__]
        packed = base64.urlsafe_b64encode(msgspec.msgpack.encode(values))
        payload = packed.decode("ascii").rstrip("=")
        mac = "" if key is None else _mac(WIRE_VERSION, payload, key)
        return {
            **({} if for_in_tree else FLAGS),
            "remote_engine_id": self.engine,
            "remote_request_id": self.nonce,
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_block_ids": [[]],
            "tp_size": 0,
            FIELD: f"{WIRE_VERSION}.{mac}.{payload}",
        }


class SealedTicket(msgspec.Struct, frozen=True, kw_only=True):
    """A ticket as it arrived: check its MAC before its host, and its version before the rest.

    All methods raise TicketRefused.
    """

    version: int
    mac: str
    payload: str

    @classmethod
    def parse(cls, params: object) -> "SealedTicket":
        if not isinstance(params, Mapping):
            raise TicketRefused(
                f"kv_transfer_params is of type {type(params).__name__}; allowed: an object"
            )
        for name, allowed in FLAGS.items():
            if params.get(name) is not None and params[name] is not allowed:
                raise TicketRefused(
                    f"kv_transfer_params: {name} is {_words(params[name])}; "
                    f"allowed: {_words(allowed)}"
                )
        if FIELD not in params:
            raise TicketRefused(
                f"kv_transfer_params lacks the field {FIELD!r}: prefill does not run nixl_kv, or a "
                "router dropped it; kv_transfer_params must reach decode unchanged"
            )
        text = params[FIELD]
        if not isinstance(text, str):
            raise _refused(f"is {_words(text)}; allowed: text")
        if len(text) > MAX_LENGTH:
            raise _refused(f"has {len(text)} characters; allowed: {MAX_LENGTH}")
        match = SEALED.fullmatch(text)
        if match is None:
            raise _refused("is not a ticket; allowed: VERSION.MAC.PAYLOAD, as prefill wrote it")
        version, mac, payload = match.groups()
        return cls(version=int(version), mac=mac, payload=payload)

    def check_mac(self, key: bytes | None) -> None:
        """Check the MAC; without a key there must be none. Errors never tell the right MAC."""
        if key is None and self.mac:
            raise _refused("mac was made by an engine with a key; this one has no key", "key")
        if key is None:
            return
        if not self.mac:
            raise _refused(
                "mac is missing: made by an engine without a key; this one has a key", "key"
            )
        if not hmac.compare_digest(self.mac, _mac(self.version, self.payload, key)):
            raise _refused(
                "mac is wrong: the ticket was changed, or made with another key; compare the "
                "fingerprints that both engines log at start",
                "key",
            )

    def head(self) -> TicketHead:
        return self._convert(TicketHead)

    def open(self) -> Ticket:
        if self.version != WIRE_VERSION:
            raise _refused(
                f"is of wire version {self.version}; this engine speaks {WIRE_VERSION}", "version"
            )
        ticket = self._convert(Ticket)
        if ticket.incarnation == ANY_INCARNATION:
            raise _refused(f"incarnation is all zeros; no engine's is; {UNCHANGED}", sep=": ")
        return ticket

    def _convert(self, kind: type[_Head]) -> _Head:
        try:
            packed = base64.b64decode(
                self.payload + "=" * (-len(self.payload) % 4), altchars=b"-_", validate=True
            )
            # By position: a newer version may have more entries, which are skipped.
            values = dict(zip(kind.__struct_fields__, _decoder.decode(packed), strict=False))
            return msgspec.convert(values, kind, strict=True)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            detail = printable(str(error), MAX_REASON)
            raise _refused(f"{detail}; {UNCHANGED}", sep=": ") from error


def check_literal(name: str, host: str) -> None:
    """Raise a ValueError unless a host is an IP literal: no name of a client's is resolved."""
    # A scope (`fe80::1%eth0`) may hold any text, so it is refused as well.
    if "%" in host:
        raise ValueError(f"{name} is {host!r}; allowed: an IP address")
    ipaddress.ip_address(host)


def _mac(version: int, payload: str, key: bytes) -> str:
    # All versions compute it like this.
    message = f"{version}.{payload}".encode("ascii")
    return hashlib.blake2b(message, digest_size=MAC_BYTES, key=key).hexdigest()


def _refused(words: str, reason: str = "malformed", sep: str = " ") -> TicketRefused:
    return TicketRefused(f"kv_transfer_params: {FIELD}{sep}{words}", reason)


def _words(value: object) -> str:
    # Only the type of other values, because a client chooses their length.
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else f"of type {type(value).__name__}"


def weights_hash(epoch: int, weights: str) -> str:
    """Hash of which weights the KV is; empty before the first reset, without a label.

    An API server may not have heard of the latest reset when it makes an early ticket.
    """
    if not (epoch or weights):
        return ""
    return hashlib.blake2b(f"{epoch} {weights}".encode(), digest_size=MAC_BYTES).hexdigest()


def context_hash(nonce: Nonce, token_ids: Sequence[int] | None, extras: Iterable[bytes]) -> str:
    """Hash what the KV of a prompt depends on; 32 hex digits.

    `token_ids` are None if the client sent embeddings. `extras` are the adapter, the cache salt
    and embeddings. The media have a hash of their own (`connector.media.Media.hash`).
    """
    # The nonce is the key, so a hash in a log confirms no guess of the prompt.
    # vLLM's scheduler waits for this. msgpack's short numbers take half the time of 8 bytes each
    # for 16,384 tokens, and CPUs have instructions for SHA-256.
    packed = msgspec.msgpack.encode((token_ids, list(extras)), enc_hook=list)
    return hmac.digest(bytes.fromhex(nonce), packed, "sha256")[:16].hex()
