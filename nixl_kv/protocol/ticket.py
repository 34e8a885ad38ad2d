"""The ticket: what prefill's answer carries through the router to decode.

It is in the request body as `kv_transfer_params`, so it comes back from a client's hands. It
names no block and no address; it says whom to ask, for which offer, and what the KV depends on.
Where engines share a key, a MAC over all of it proves that one of them made it.

All of it is in one string, in a field of our own. Beside it are fields that routers know: some look
at them, and some overwrite them, so they are written and never read.

    nixl_kv_ticket = "8.0f5c...e2.l6kxMC4w..."
                      |    |         |
             wire version  |         array in msgpack and base64url (no padding):
                           |         [host, port, nonce, and what this version has behind them]
                           MAC: 32 hexadecimal digits, or nothing where there is no key

What stays as it is in every version: the name of the field, these three pieces and the bound of
their length, what the MAC covers and how, and the first three entries of the array. So any version
can check a ticket of any other one, and can tell the engine that made it that nobody comes.

WIRE_VERSION history (of tickets and messages alike)
1  first
2  groups have a window, and may have no layers on a rank; ranks need not pair one to one; a MAC
3  digests
4  one release message in place of two; block tables mark absent blocks; tickets name this version;
   fields that nobody used are gone; status; the answer to a renew has its number
5  a ticket is one string; what another version sends is refused in a form that all versions read;
   an offer can be declined, and what was granted recalled; a renew says which claims are being read
6  block tables leave out the absent entries that they begin with; a description says which tokens
   a rank keeps, and what an engine keeps besides its model; a digest's slices say which tokens
7  a description says how a rank's GPU memory is mapped, and where it packs what is read, on
   request; the hash of a prompt is HMAC-SHA256 over msgpack
8  a ticket says with which weights its KV was computed, and how often prefill's cache was reset
   before; a tool can change the label of an engine's weights, and undo draining; a description
   names bytes that prove a mapping of GPU memory
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
from nixl_kv.errors import ForeignVersion, RemoteProtocolError, printable
from nixl_kv.ids import ANY_INCARNATION, Endpoint, EngineId, Incarnation, Nonce, endpoint_at

WIRE_VERSION: Final = 8
MAC_BYTES: Final = 16

FIELD: Final = "nixl_kv_ticket"
MAX_LENGTH: Final = 4096
"""Of the string, in characters."""
MAX_REASON: Final = 300
"""Characters of what msgspec says about a payload; it quotes what a client has sent."""

SEALED: Final = re.compile(r"(0|[1-9][0-9]{0,8})\.((?:[0-9a-f]{32})?)\.([A-Za-z0-9_-]+)", re.ASCII)
FLAGS: Final[Mapping[str, bool]] = {"do_remote_prefill": True, "do_remote_decode": False}
"""What the request asks for, beside its ticket. Routers may leave it out, or say null."""

HEX32: Final = Meta(pattern=r"^[0-9a-f]{32}\Z")
NAME: Final = Meta(min_length=1, max_length=256)

Context = Annotated[str, HEX32]
"""A hash of everything that the KV of a prompt depends on, see `context_hash`."""

_decoder = msgspec.msgpack.Decoder(list)
_Head = TypeVar("_Head", bound="TicketHead")


class TicketHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a ticket of any version says: who has made it, and for which offer."""

    host: Annotated[str, Meta(min_length=2, max_length=64)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    nonce: Annotated[Nonce, HEX32]

    def __post_init__(self) -> None:
        """Refuse what is no address: nothing that a client sends is ever resolved.

        A scope (`fe80::1%eth0`) may hold any text, so it is refused as well.
        """
        if "%" in self.host:
            raise ValueError(f"host is {self.host!r}; allowed: an IP address")
        ipaddress.ip_address(self.host)

    @property
    def endpoint(self) -> Endpoint:
        """Of the directory of the engine that has made the ticket."""
        return endpoint_at(self.host, self.port)


class Ticket(TicketHead, frozen=True, kw_only=True):
    """One finished prefill on offer.

    `epoch` counts the resets of prefill's cache in this incarnation. `weights` is the label that
    prefill's weights had.
    """

    engine: Annotated[EngineId, NAME]
    incarnation: Annotated[Incarnation, HEX32]
    num_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    context: Context
    epoch: Annotated[int, Meta(ge=0, le=2**62)] = 0
    weights: Annotated[str, Meta(max_length=MAX_LABEL)] = ""

    def __post_init__(self) -> None:
        """Refuse what is no address, and no life of an engine."""
        super().__post_init__()
        if not self.engine.isprintable():
            raise ValueError("engine has characters that cannot be printed")
        if not self.weights.isprintable():
            raise ValueError("weights has characters that cannot be printed")
        if self.incarnation == ANY_INCARNATION:
            raise ValueError("incarnation is all zeros; no engine's is")

    def params(self, key: bytes | None, *, for_in_tree: bool = True) -> dict[str, Any]:
        """The `kv_transfer_params` of prefill's answer, as JSON types; with a key there is a MAC.

        Routers read some of the fields beside the ticket, and so does a decode engine that runs
        vLLM's own NixlConnector. That engine computes a request without `do_remote_prefill`
        itself. If a router sets the flag, vLLM's scheduler raises, and the engine ends, unless the
        `remote_*` fields are present and `remote_block_ids` is true. Its worker then divides by
        `tp_size` before it connects to anything, and only that request fails.

        Args:
            key: of the fleet, if it has one.
            for_in_tree: False sets the flags. vLLM's front end on decode then reports prefill's
                cached tokens, and tells the connector about each request that it rejects.
        """
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
    """A ticket as it has come. Nothing of its payload is looked at before its MAC is checked."""

    version: int
    mac: str
    payload: str

    @classmethod
    def parse(cls, params: object) -> "SealedTicket":
        """Find the ticket in what a client sent.

        Raises:
            RemoteProtocolError: names the field, and what is allowed.
        """
        if not isinstance(params, Mapping):
            raise RemoteProtocolError(
                f"kv_transfer_params is of type {type(params).__name__}; allowed: an object"
            )
        for name, allowed in FLAGS.items():
            if params.get(name) is not None and params[name] is not allowed:
                raise RemoteProtocolError(
                    f"kv_transfer_params: {name} is {_words(params[name])}; "
                    f"allowed: {_words(allowed)}"
                )
        if FIELD not in params:
            raise RemoteProtocolError(f"kv_transfer_params lacks the field {FIELD!r}")
        text = params[FIELD]
        if not isinstance(text, str):
            raise _refused(f"is {_words(text)}; allowed: text")
        if len(text) > MAX_LENGTH:
            raise _refused(f"has {len(text)} characters; allowed: {MAX_LENGTH}")
        match = SEALED.fullmatch(text)
        if match is None:
            raise _refused("is no ticket; allowed: VERSION.MAC.PAYLOAD, as prefill has written it")
        version, mac, payload = match.groups()
        return cls(version=int(version), mac=mac, payload=payload)

    def check_mac(self, key: bytes | None) -> None:
        """Check the MAC; without a key there must be none.

        Raises:
            RemoteProtocolError: says what is wrong with the MAC, and nothing of what it should be.
        """
        if key is None and self.mac:
            reason = "was made by an engine with a key; this one has no key"
        elif key is not None and not self.mac:
            reason = "is missing: made by an engine without a key; this one has a key"
        elif key is not None and not hmac.compare_digest(
            self.mac, _mac(self.version, self.payload, key)
        ):
            reason = (
                "is wrong: the ticket was changed, or made with another key; compare the "
                "fingerprints that both engines log at start"
            )
        else:
            return
        raise _refused(f"mac {reason}")

    def head(self) -> TicketHead:
        """What tickets of all versions say.

        Raises:
            RemoteProtocolError: names the field, and what is allowed.
        """
        return self._convert(TicketHead)

    def open(self) -> Ticket:
        """All of it.

        Raises:
            ForeignVersion: if it is of another version, whatever else it says; names both.
            RemoteProtocolError: names the field, and what is allowed.
        """
        if self.version != WIRE_VERSION:
            raise ForeignVersion(
                f"kv_transfer_params: {FIELD} is of wire version {self.version}; "
                f"this engine speaks {WIRE_VERSION}"
            )
        return self._convert(Ticket)

    def _convert(self, kind: type[_Head]) -> _Head:
        """By position; what a newer version has behind the fields of this kind is left out."""
        try:
            packed = base64.b64decode(
                self.payload + "=" * (-len(self.payload) % 4), altchars=b"-_", validate=True
            )
            values = dict(zip(kind.__struct_fields__, _decoder.decode(packed), strict=False))
            return msgspec.convert(values, kind, strict=True)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise _refused(printable(str(error), MAX_REASON), sep=": ") from error


def _mac(version: int, payload: str, key: bytes) -> str:
    """Over the characters of the version and of the payload, as they travel. The same for ever."""
    message = f"{version}.{payload}".encode("ascii")
    return hashlib.blake2b(message, digest_size=MAC_BYTES, key=key).hexdigest()


def _refused(words: str, sep: str = " ") -> RemoteProtocolError:
    return RemoteProtocolError(f"kv_transfer_params: {FIELD}{sep}{words}")


def _words(value: object) -> str:
    """A value as JSON says it; its type, where a client chooses how long it is."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else f"of type {type(value).__name__}"


def context_hash(nonce: Nonce, token_ids: Sequence[int] | None, extras: Iterable[bytes]) -> str:
    """A keyed hash of everything that the KV of a prompt depends on, as 32 hex digits.

    Keyed by the nonce, so that a ticket in a log says nothing about the prompt to whoever has only
    a guess of it and not the log of the same request.

    It is over the msgpack of the array [token ids, extras], with each number in its shortest form:
    of 16,384 tokens that is made and hashed in half the time that 8 bytes for each would take. The
    scheduler waits for it, so the hash is the one that processors have instructions for.

    Args:
        nonce: the offer's.
        token_ids: of the prompt; None where it came as embeddings.
        extras: adapter, cache salt, multimodal identifiers and positions, embeddings.
    """
    packed = msgspec.msgpack.encode((token_ids, list(extras)), enc_hook=list)
    return hmac.digest(bytes.fromhex(nonce), packed, "sha256")[:16].hex()
