"""Which loads are still to be reported, so that none is lost with the machine that knew it."""

from collections.abc import Callable

from nixl_kv.ids import RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.events import Failure, Why

_FAILURE = Failure(Why.INTERNAL, "the transfer thread died")


class Ledger:
    """Loads that were commanded and not reported yet, by request, with their number of tokens."""

    def __init__(self) -> None:
        """Begin owing nothing."""
        self._owed: dict[RequestId, int] = {}
        self._orphans: dict[RequestId, int] = {}

    def __repr__(self) -> str:
        """How many."""
        return f"<Ledger: {len(self._owed)} owed, {len(self._orphans)} orphans>"

    def owe(self, load: events.Load) -> None:
        """A load was commanded."""
        self._owed[load.request] = load.end - load.begin

    def paid(self, request: RequestId) -> None:
        """A load was reported."""
        self._owed.pop(request, None)
        self._orphans.pop(request, None)

    def orphan(self) -> list[RequestId]:
        """The machine that knew these loads is gone; returns all that nobody will report now."""
        self._orphans.update(self._owed)
        self._owed.clear()
        return list(self._orphans)

    def drained(self, reading: Callable[[RequestId], bool]) -> list[events.Loaded]:
        """The reports of orphans whose blocks no read can write into any more."""
        return [
            events.Loaded(request, num_tokens, _FAILURE)
            for request, num_tokens in self._orphans.items()
            if not reading(request)
        ]
