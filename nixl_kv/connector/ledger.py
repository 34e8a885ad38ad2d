"""What is still to be reported, so that nothing is lost with the machines that knew it."""

from collections.abc import Callable

from nixl_kv.ids import Nonce, RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.events import Failure, Why

_FAILURE = Failure(Why.INTERNAL, "the transfer thread died")


class Ledger:
    """Loads that were commanded, and offers that were prepared, until they are reported."""

    def __init__(self) -> None:
        """Begin owing nothing."""
        self._owed: dict[RequestId, int] = {}  # number of tokens
        self._orphans: dict[RequestId, int] = {}
        self._prepared: dict[Nonce, RequestId] = {}
        self._out: dict[RequestId, Nonce] = {}
        self._void: set[Nonce] = set()  # prepared for machines that are gone

    def __repr__(self) -> str:
        """How many."""
        loads = f"{len(self._owed)} loads, {len(self._orphans)} orphans"
        return f"<Ledger: {loads}, {len(self._prepared)} prepared, {len(self._out)} offered>"

    def owe(self, load: events.Load) -> None:
        """A load was commanded."""
        self._owed[load.request] = load.end - load.begin

    def paid(self, request: RequestId) -> None:
        """A load was reported."""
        self._owed.pop(request, None)
        self._orphans.pop(request, None)

    def drained(self, reading: Callable[[RequestId], bool]) -> list[events.Loaded]:
        """The reports of orphans whose blocks no read can write into any more."""
        return [
            events.Loaded(request, num_tokens, _FAILURE)
            for request, num_tokens in self._orphans.items()
            if not reading(request)
        ]

    def offer(self, command: events.PrefillCommand) -> events.Sent | None:
        """A command about an offer. What must be reported at once, if its machine is gone."""
        match command:
            case events.Prepare():
                if command.nonce not in self._void:
                    self._prepared[command.nonce] = command.request
            case events.Withdraw():
                self._prepared.pop(command.nonce, None)
            case events.Offer() if command.nonce in self._void:
                return events.Sent(command.request, events.How.LOST)
            case events.Offer() if command.nonce in self._prepared:
                self._out[command.request] = command.nonce
                del self._prepared[command.nonce]
        return None

    def is_void(self, command: events.PrefillCommand) -> bool:
        """Whether no machine may hear of it: its blocks may be free, or others', by now."""
        void = command.nonce in self._void
        if isinstance(command, events.Offer | events.Withdraw):
            self._void.discard(command.nonce)
        return void

    def sent(self, request: RequestId) -> None:
        """An offer was reported; readers may be quicker than the step that says it is out."""
        self._out.pop(request, None)
        for nonce in [nonce for nonce, known in self._prepared.items() if known == request]:
            del self._prepared[nonce]

    def lose(self) -> tuple[list[RequestId], list[events.Sent]]:
        """All machines are gone. Returns the loads that have none now, and the offers' reports.

        An offer is reported only if it is known to be out, since only then its blocks are pinned.
        """
        self._orphans.update(self._owed)
        self._owed.clear()
        self._void.update(self._prepared)
        self._prepared.clear()
        sent = [events.Sent(request, events.How.LOST) for request in self._out]
        self._out.clear()
        return list(self._orphans), sent
