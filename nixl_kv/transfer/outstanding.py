"""What is owed to the caller: the one record of it, so that nothing is lost with the machines.

A load is owed a report from the command that starts it, an offer from the command that publishes
it: only then its blocks are pinned. A reader may be quicker than that command; then the offer's end
waits for it. Each report is given once: the caller's engine may end for one that it does not
expect.
"""

from collections.abc import Callable
from dataclasses import dataclass

from nixl_kv.ids import Nonce, RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.events import Failure, FailureKind, LoadEnded, OfferEnd, OfferEnded

_THREAD_DIED = Failure(FailureKind.INTERNAL, "the transfer thread died")


@dataclass
class _Offer:
    request: RequestId
    is_published: bool = False
    end: OfferEnd | None = None  # it ended before it was published


class Outstanding:
    """Loads that were started, and offers that were prepared, until they are reported."""

    def __init__(self) -> None:
        """Start with nothing owed."""
        self._loads: dict[RequestId, int] = {}  # number of tokens
        self._orphans: set[RequestId] = set()  # loads whose machine is gone
        self._offers: dict[Nonce, _Offer] = {}

    def __repr__(self) -> str:
        """How many."""
        return (
            f"<Outstanding: {len(self._loads)} loads ({len(self._orphans)} orphans), "
            f"{len(self._offers)} offers>"
        )

    def __len__(self) -> int:
        """How many loads and offers."""
        return len(self._loads) + len(self._offers)

    def admit(self, command: events.Command) -> tuple[bool, OfferEnded | None]:
        """Take note of a command.

        Returns:
            Whether the machines may have it: an offer that has ended has blocks that may be free,
            or somebody else's, by now. And a report that is due at once.
        """
        match command:
            case events.StartLoad():
                self._loads[command.request] = command.num_tokens
            case events.PrepareOffer():
                offer = self._offers.setdefault(command.nonce, _Offer(command.request))
                return offer.end is None, None
            case events.PublishOffer():
                return self._publish(command)
            case events.WithdrawOffer():
                offer = self._offers.pop(command.nonce, _Offer(RequestId("")))
                return offer.end is None, None
            case events.RevokeOffer():
                return command.nonce in self._offers, None
        return True, None

    def settle(self, report: LoadEnded | OfferEnded) -> LoadEnded | OfferEnded | None:
        """What the caller is to be told of an end: nothing that it is not owed (any more)."""
        if isinstance(report, LoadEnded):
            self._orphans.discard(report.request)
            return None if self._loads.pop(report.request, None) is None else report
        offer = self._offers.get(report.nonce)
        if offer is None or not offer.is_published:
            if offer is not None:
                offer.end = report.end
            return None
        del self._offers[report.nonce]
        return report

    def lose_machines(self) -> list[OfferEnded]:
        """All machines are gone. Returns the reports of offers, which are due at once.

        Loads are reported when `drained` says that nothing can write any more.
        """
        self._orphans.update(self._loads)
        ended: list[OfferEnded] = []
        for nonce, offer in list(self._offers.items()):
            if offer.is_published:
                del self._offers[nonce]
                ended.append(OfferEnded(nonce, offer.request, OfferEnd.LOST))
            elif offer.end is None:
                offer.end = OfferEnd.LOST
        return ended

    @property
    def orphans(self) -> frozenset[RequestId]:
        """The loads whose machine is gone."""
        return frozenset(self._orphans)

    def drained(self, is_read: Callable[[RequestId], bool]) -> list[LoadEnded]:
        """The reports of orphans whose blocks no read can write into any more."""
        return [
            LoadEnded(request, self._loads[request], _THREAD_DIED)
            for request in self._orphans
            if not is_read(request)
        ]

    def _publish(self, command: events.PublishOffer) -> tuple[bool, OfferEnded | None]:
        offer = self._offers.get(command.nonce)
        if offer is not None and offer.end is None:
            offer.is_published = True
            return True, None
        end = OfferEnd.LOST if offer is None or offer.end is None else offer.end
        self._offers.pop(command.nonce, None)
        return False, OfferEnded(command.nonce, command.request, end)
