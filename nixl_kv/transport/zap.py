"""Who may connect: answers to the questions that ZMQ asks before it lets a connection in.

ZMQ asks once per connection, in the frames of its authentication protocol (ZAP, ZMQ RFC 27). By
then CURVE has proved that the client holds the secret of the key that it shows.
"""

import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

VERSION: Final = b"1.0"
DOMAIN: Final = b"nixl_kv"
QUESTION_FRAMES: Final = 8
"""Route, empty, version, number, domain, address, identity, mechanism; then credentials."""


@dataclass(frozen=True)
class Gatekeeper:
    """Admits those who hold the client key, where there is one, from hosts that are allowed."""

    client: bytes | None
    """The public key that a client must show, 32 bytes; None on a side without keys."""

    allows: Callable[[str], bool]
    """Whether an IP literal is among the peers."""

    def answer(self, frames: Sequence[bytes]) -> list[bytes] | None:
        """The frames that answer a question; None to those that cannot be answered."""
        if len(frames) < QUESTION_FRAMES or frames[1]:
            return None
        route, number, admitted = frames[0], frames[3], self._admits(frames)
        status = [b"200", b"OK"] if admitted else [b"400", b"not admitted"]
        return [route, b"", VERSION, number, *status, b"", b""]

    def _admits(self, frames: Sequence[bytes]) -> bool:
        _, _, version, _, domain, address, _, mechanism, *credentials = frames
        if (version, domain) != (VERSION, DOMAIN):
            return False
        if not self.allows(address.decode("ascii", "replace")):
            return False
        if self.client is None:
            return mechanism == b"NULL" and not credentials
        key = credentials[0] if len(credentials) == 1 else b""
        return mechanism == b"CURVE" and hmac.compare_digest(key, self.client)
