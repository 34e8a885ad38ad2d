"""The ticket: what prefill's answer carries through the router to decode.

It is in the request body as `kv_transfer_params`, so it comes back from a client's hands. It
names no block and no address; it says whom to ask, for which offer, and what the KV depends on.
Where engines share a key, a MAC over all of it proves that one of them made it.

WIRE_VERSION history (of tickets and messages alike)
1  first
2  groups have a window, and may have no layers on a rank; ranks need not pair one to one; a MAC
3  digests
4  one release message in place of two; block tables mark absent blocks; tickets name this version;
   fields that nobody used are gone; status; the answer to a renew has its number
"""

import hashlib
import hmac
import ipaddress
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from nixl_kv.errors import RemoteProtocolError
from nixl_kv.ids import ANY_INCARNATION, EngineId, Incarnation, Nonce

WIRE_VERSION: Final = 4
MAC_BYTES: Final = 16

HEX32: Final = Meta(pattern=r"^[0-9a-f]{32}\Z")
NAME: Final = Meta(min_length=1, max_length=256)

Context = Annotated[str, HEX32]
"""A hash of everything that the KV of a prompt depends on, see `context_hash`."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """One finished prefill on offer, as JSON types only.

    Unknown fields are ignored: routers and vLLM's frontend add their own.
    """

    do_remote_prefill: Literal[True] = True
    do_remote_decode: Literal[False] = False
    remote_engine_id: Annotated[EngineId, NAME]
    remote_host: Annotated[str, Meta(min_length=2, max_length=64)]
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    wire_version: Annotated[int, Meta(ge=WIRE_VERSION, le=WIRE_VERSION)] = WIRE_VERSION
    incarnation: Annotated[Incarnation, HEX32]
    nonce: Annotated[Nonce, HEX32]
    num_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    context: Context
    mac: Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""

    def __post_init__(self) -> None:
        """Refuse what is no address: nothing that a client sends is ever resolved.

        A scope (`fe80::1%eth0`) may hold any text, so it is refused as well.
        """
        if "%" in self.remote_host:
            raise ValueError(f"remote_host is {self.remote_host!r}; allowed: an IP address")
        ipaddress.ip_address(self.remote_host)
        if not self.remote_engine_id.isprintable():
            raise ValueError("remote_engine_id has characters that cannot be printed")
        if self.incarnation == ANY_INCARNATION:
            raise ValueError("incarnation is all zeros; no engine's is")

    @classmethod
    def parse(cls, params: object) -> "Ticket":
        """Validate what a client sent.

        Raises:
            RemoteProtocolError: names the field, and what is allowed.
        """
        if not isinstance(params, Mapping):
            raise RemoteProtocolError(
                f"kv_transfer_params is of type {type(params).__name__}; allowed: an object"
            )
        for name in ("wire_version", "do_remote_prefill"):
            if name not in params:
                raise RemoteProtocolError(f"kv_transfer_params lacks the field {name!r}")
        version = params["wire_version"]
        if isinstance(version, int) and version != WIRE_VERSION and abs(version) < 1 << 31:
            raise RemoteProtocolError(
                f"kv_transfer_params: wire_version is {version!r}; "
                f"this engine speaks {WIRE_VERSION}"
            )
        try:
            return msgspec.convert(params, cls, strict=True)
        except (msgspec.ValidationError, ValueError) as error:
            raise RemoteProtocolError(f"kv_transfer_params: {error}") from error

    def seal(self, key: bytes) -> "Ticket":
        """The same ticket with its MAC."""
        return msgspec.structs.replace(self, mac=self._mac(key))

    def check_mac(self, key: bytes | None) -> None:
        """Check the MAC; without a key there must be none.

        Raises:
            RemoteProtocolError: says what is wrong with the MAC, and nothing of what it should be.
        """
        if key is None and self.mac:
            reason = "was made by an engine with a key; this one has no key_file"
        elif key is not None and not self.mac:
            reason = "is missing: made by an engine without a key; this one has a key_file"
        elif key is not None and not hmac.compare_digest(self.mac, self._mac(key)):
            reason = "is wrong: the ticket was changed, or made with another key"
        else:
            return
        raise RemoteProtocolError(f"kv_transfer_params: mac {reason}")

    def _mac(self, key: bytes) -> str:
        """Over every other field, whichever there are, so that none is ever left out."""
        values = [getattr(self, name) for name in self.__struct_fields__ if name != "mac"]
        message = msgspec.msgpack.encode(values)
        return hashlib.blake2b(message, digest_size=MAC_BYTES, key=key).hexdigest()

    def params(self) -> dict[str, Any]:
        """The `kv_transfer_params` of prefill's answer."""
        params: dict[str, Any] = msgspec.to_builtins(self)
        return params


def context_hash(nonce: Nonce, token_ids: Sequence[int] | None, extras: Iterable[bytes]) -> str:
    """A keyed hash of everything that the KV of a prompt depends on, as 32 hex digits.

    Keyed by the nonce, so that a ticket in a log says nothing about the prompt to whoever has only
    a guess of it and not the log of the same request.

    Args:
        nonce: the offer's.
        token_ids: of the prompt; None where it came as embeddings.
        extras: adapter, cache salt, multimodal identifiers and positions, embeddings; each entry
            is hashed with its length.
    """
    digest = hashlib.blake2b(digest_size=16, key=bytes.fromhex(nonce))
    ids = token_ids or ()
    digest.update(struct.pack(f"<q{len(ids)}q", len(ids) if token_ids is not None else -1, *ids))
    for extra in extras:
        digest.update(struct.pack("<q", len(extra)))
        digest.update(extra)
    return digest.hexdigest()
