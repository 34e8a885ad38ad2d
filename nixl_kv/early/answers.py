"""Early answers of one API server: the promise to the engine, and how many may be open.

The API server draws the nonce of the offer, and promises it: a field of the request's
`kv_transfer_params` tells the engine to make the offer under this nonce. The field has a MAC, since
a client may have sent one through a front end that does not remove it.
"""

import hashlib
import hmac
import math
import re
from collections.abc import Callable
from typing import Final

from nixl_kv.errors import TicketRefused
from nixl_kv.ids import Nonce

PROMISE: Final = "nixl_kv_promise"

# A request is not answered early, because the engine has ended no step. A step of a GPU engine
# takes less than 0.5 s. An engine whose steps take longer only answers its next requests itself.
LIFE_S: Final = 5.0

FULL: Final = "the engine has as many requests that were answered early as it has seats"
SILENT: Final = f"the engine has ended no step for {LIFE_S:g} s"

_FORM: Final = re.compile(r"([0-9a-f]{32})\.((?:[0-9a-f]{32})?)", re.ASCII)


def seal_promise(nonce: Nonce, key: bytes | None) -> str:
    return f"{nonce}.{_mac(nonce, key)}"


def open_promise(value: object, key: bytes | None) -> Nonce:
    """Raises TicketRefused unless the front end of an engine with this key has written it."""
    match = _FORM.fullmatch(value) if isinstance(value, str) else None
    if match is None or not hmac.compare_digest(match[2], _mac(Nonce(match[1]), key)):
        raise TicketRefused(
            f"kv_transfer_params: no front end of this engine has written {PROMISE}; clients and "
            "routers must not send it"
        )
    return Nonce(match[1])


def _mac(nonce: Nonce, key: bytes | None) -> str:
    if key is None:
        return ""
    # Another person than a ticket's MAC, which clients see.
    person = b"nixl_kv promise"
    text = nonce.encode("ascii")
    return hashlib.blake2b(text, digest_size=16, key=key, person=person).hexdigest()


class OpenAnswers:
    """The requests that were answered early, and that one engine has not ended."""

    def __init__(self, seats: int, clock: Callable[[], float]) -> None:
        """`seats`: how many requests the engine computes at a time."""
        self._seats = seats
        self._clock = clock
        self._since: dict[str, float] = {}  # when each was answered, oldest first
        self._heard_at = -math.inf

    def __len__(self) -> int:
        return len(self._since)

    def why_late(self) -> str:
        """Why the engine must answer the next request itself; '' if it need not.

        A client that has its answer could send further requests at once. A hung engine must look
        hung to a router.
        """
        if len(self._since) >= self._seats:
            return FULL
        oldest = next(iter(self._since.values()), math.inf)
        return SILENT if self._clock() - max(oldest, self._heard_at) > LIFE_S else ""

    def begin(self, request: str) -> None:
        self._since[request] = self._clock()

    def hear(self) -> None:
        """The engine has ended a step."""
        self._heard_at = self._clock()

    def end(self, request: str) -> bool:
        """Returns whether the request was answered early."""
        return self._since.pop(request, None) is not None
