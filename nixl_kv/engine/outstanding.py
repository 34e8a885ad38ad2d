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

_THREAD_DIED = events.Failure(events.FailureKind.INTERNAL, "the transfer thread died")


@dataclass
class _Offer:
    request: RequestId
    is_published: bool = False
    end: events.OfferEnd | None = None  # it ended before it was published


class Outstanding:
    """Loads that were started, and offers that were prepared, until they are reported."""

    def __init__(self) -> None:
        self.orphans: set[RequestId] = set()
        """The loads whose machine is gone."""
        self._loads: dict[RequestId, int] = {}  # number of tokens
        self._offers: dict[Nonce, _Offer] = {}

    def __repr__(self) -> str:
        return (
            f"<Outstanding: {len(self._loads)} loads ({len(self.orphans)} orphans), "
            f"{len(self._offers)} offers>"
        )

    def __len__(self) -> int:
        return len(self._loads) + len(self._offers)

    def admit(self, command: events.Command) -> tuple[bool, events.OfferEnded | None]:
        """Take note of a command.

        Returns:
            Whether the machines may have it: an offer that has ended has blocks that may be free,
            or somebody else's, by now. And a report that is due at once.
        """
        match command:
            case events.StartLoad():
                self._loads[command.request] = command.num_tokens
            case events.PrepareOffer():
                self._offers[command.nonce] = _Offer(command.request)
            case events.PublishOffer():
                return self._publish(command)
            case events.WithdrawOffer():
                offer = self._offers.pop(command.nonce, _Offer(RequestId("")))
                return offer.end is None, None
            case events.RevokeOffer():
                return command.nonce in self._offers, None
        return True, None

    def settle(
        self, report: events.LoadEnded | events.OfferEnded
    ) -> events.LoadEnded | events.OfferEnded | None:
        """What the caller gets of an end: nothing that it is not owed, or not any more."""
        if isinstance(report, events.LoadEnded):
            self.orphans.discard(report.request)
            return None if self._loads.pop(report.request, None) is None else report
        offer = self._offers.get(report.nonce)
        if offer is None or not offer.is_published:
            if offer is not None:
                offer.end = report.end
            return None
        del self._offers[report.nonce]
        return report

    def lose_machines(self) -> list[events.OfferEnded]:
        """All machines are gone. Returns the reports of offers, which are due at once.

        Loads are reported when `drained` says that nothing can write any more.
        """
        self.orphans.update(self._loads)
        return self.lose_offers()

    def lose_offers(self) -> list[events.OfferEnded]:
        """Prefill's machine is gone. Returns the reports, which are due at once."""
        ended: list[events.OfferEnded] = []
        for nonce, offer in list(self._offers.items()):
            if offer.is_published:
                del self._offers[nonce]
                ended.append(events.OfferEnded(nonce, offer.request, events.OfferEnd.LOST))
            elif offer.end is None:
                offer.end = events.OfferEnd.LOST
        return ended

    def drained(
        self, is_read: Callable[[RequestId], bool], why: events.Failure = _THREAD_DIED
    ) -> list[events.LoadEnded]:
        """The reports of orphans whose blocks no read can write into any more."""
        return [
            events.LoadEnded(request, self._loads[request], why)
            for request in self.orphans
            if not is_read(request)
        ]

    def _publish(self, command: events.PublishOffer) -> tuple[bool, events.OfferEnded | None]:
        lost = _Offer(command.request, end=events.OfferEnd.LOST)
        offer = self._offers.get(command.nonce, lost)
        if offer.end is None:
            offer.is_published = True
            return True, None
        self._offers.pop(command.nonce, None)
        return False, events.OfferEnded(command.nonce, command.request, offer.end)
