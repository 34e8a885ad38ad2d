"""A run of cached blocks, as the scheduler tells it to the ranks of its own engine.

The run travels through the reader, which may keep it, repeat it or change it. So the scheduler
seals it with a key that only this life of its engine knows, for one offer.
"""

import hashlib
import hmac
import secrets
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

from nixl_kv.geometry.layout import BlockIds
from nixl_kv.ids import Nonce
from nixl_kv.protocol.messages import MAX_RUN

KEY_BYTES: Final = 32
MAC_BYTES: Final = 16
PERSON: Final = b"nixl_kv run"  # no other MAC of the project has it

_Number = Annotated[int, Meta(ge=0, le=2**62)]


class Run(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Blocks of a prefix cache that hold the KV of consecutive blocks of one prompt.

    It is true of the cache after `steps` steps were built: a block that a later step may write has
    other KV. Each block is filled once step `need` has ended.
    """

    first_block: _Number  # the place of the first one in the prompt
    ids: bytes  # little-endian int32
    steps: _Number
    need: _Number
    epoch: _Number  # see `events.BlocksTaken`

    @property
    def block_ids(self) -> BlockIds:
        return np.frombuffer(self.ids, dtype="<i4")

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.ids) // 4


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def seal(run: Run, offer: Nonce, key: bytes) -> bytes:
    """At most MAX_RUN bytes, for a run of up to `messages.MAX_HASHES` blocks."""
    payload = msgspec.msgpack.encode(run)
    return _mac(payload, offer, key) + payload


def open_run(sealed: bytes, offer: Nonce, key: bytes) -> Run | None:
    """None: this life of the engine has not sealed it for this offer."""
    mac, payload = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
    if not key or len(sealed) > MAX_RUN or not hmac.compare_digest(mac, _mac(payload, offer, key)):
        return None
    return msgspec.msgpack.decode(payload, type=Run)


def _mac(payload: bytes, offer: Nonce, key: bytes) -> bytes:
    message = offer.encode("ascii") + payload
    return hashlib.blake2b(message, digest_size=MAC_BYTES, key=key, person=PERSON).digest()
