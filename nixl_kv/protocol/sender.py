"""The prefill side of the protocol: vLLM's commands and readers' messages in, actions out."""

from typing import Literal

from nixl_kv.ids import Incarnation, Nonce, Rank, shown
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import (
    WIRE_VERSION,
    Abort,
    Ask,
    Deny,
    Done,
    Grant,
    Proof,
    Prove,
    Renew,
    Renewed,
    ToRank,
)
from nixl_kv.protocol.offers import Offers
from nixl_kv.protocol.proofs import Digest, Digested
from nixl_kv.protocol.sending import Binding, Cause, Offering


class Sender:
    """One prefill rank. Its state is changed by `handle` alone; nothing here waits."""

    def __init__(self, incarnation: Incarnation, offers: Offers) -> None:
        """Begin the life that `incarnation` names."""
        self._incarnation = incarnation
        self.offers = offers

    def handle(
        self, event: events.PrefillCommand | events.Tick | Digested | ToRank, now: float
    ) -> list[events.Action]:
        """All events go through here. `now` is monotonic, in seconds."""
        match event:
            case events.Prepare():
                self.offers.prepare(event)
            case events.Offer():
                self.offers.ticket_out(event.nonce, now)
            case events.Withdraw():
                self.offers.withdraw(event.nonce)
            case events.Revoke():
                return self._unneeded(event.nonce, Cause.REVOKED, events.How.REVOKED)
            case events.Tick():
                return self.offers.expire(now)
            case Digested():
                return self._digested(event)
            case _:
                return self._message(event, now)
        return []

    def _unneeded(self, nonce: Nonce, cause: Cause, how: events.How) -> list[events.Action]:
        """Decode does not want it, or its blocks are wanted back. It may be gone already."""
        offer = self.offers.get(nonce)
        return [] if offer is None else self.offers.give_up(offer, cause, how)

    def _message(self, message: ToRank, now: float) -> list[events.Action]:
        match message:
            case Ask():
                return self._ask(message, now)
            case Prove():
                return self._prove(message)
            case Renew():
                return self._renew(message, now)
            case Done():
                return self._ended(message, events.How.READ)
            case Abort():
                return self._ended(message, events.How.ABORTED)

    def _ask(self, ask: Ask, now: float) -> list[events.Action]:
        if ask.incarnation != self._incarnation:
            return self._deny(ask, f"meant for incarnation {shown(ask.incarnation)}", "incarnation")
        offer = self.offers.get(ask.nonce)
        if offer is None:
            return self._deny(ask, "no such offer: used, expired, or never made")
        if offer.context != ask.context:
            return self._deny(ask, "another prompt")
        if offer.binding is not None:
            return self._grant(offer, offer.binding, ask, now=now)
        return self._bind(offer, ask, now)

    def _bind(self, offer: Offering, ask: Ask, now: float) -> list[events.Action]:
        """The first ask binds the offer to its claim."""
        if ask.reader.rank not in ask.readers:
            return self._deny(ask, f"rank {ask.reader.rank} is not among its own readers")
        bound = self.offers.bind(offer, ask, now)
        if bound is None or offer.binding is None:
            return self._deny(ask, "all generation slots are granted")
        return [bound, *self._grant(offer, offer.binding, ask, now=now)]

    def _grant(
        self, offer: Offering, binding: Binding, ask: Ask, *, now: float
    ) -> list[events.Action]:
        """Also for an ask that comes again: the grant may have been lost."""
        if not binding.expects(ask.claim, ask.reader):
            return self._deny(ask, "claimed by another, or ended for this reader")
        rank = Rank(ask.reader.rank)
        binding.leases[rank] = now + self.offers.lease_s
        binding.lives[rank] = ask.reader.incarnation
        binding.numbers[rank] = max(ask.number, binding.numbers.get(rank, 0))
        grant = Grant(
            WIRE_VERSION,
            self._incarnation,
            ask.nonce,
            ask.claim,
            ask.reader,
            offer.num_tokens,
            self.offers.lease_s,
            offer.tables,
            binding.slot,
            binding.generation,
        )
        return [events.Reply(grant)]

    def awaits(self, prove: Prove) -> bool:
        """Whether its digest may still be sent."""
        return self._holds(prove) is not None

    def _holds(self, prove: Prove) -> Offering | None:
        """The offer, while it is granted to this reader, who has asked for it."""
        offer = self.offers.get(prove.nonce)
        if offer is None or offer.binding is None or prove.incarnation != self._incarnation:
            return None
        asked = Rank(prove.reader.rank) in offer.binding.lives
        return offer if asked and offer.binding.expects(prove.claim, prove.reader) else None

    def _prove(self, prove: Prove) -> list[events.Action]:
        """Digest what a reader reads, if it may."""
        offer = self._holds(prove)
        if offer is None:
            return self._deny(prove, "nothing is granted to it that could be proven")
        if prove.end > offer.num_tokens:
            return self._deny(prove, f"proof up to token {prove.end} of {offer.num_tokens}")
        return [Digest(prove, offer.tables)]

    def _digested(self, event: Digested) -> list[events.Action]:
        """The blocks were held until now, or else the digest may be of anything."""
        prove = event.prove
        if not self.awaits(prove):
            return self._deny(prove, "it was released while it was proven")
        if event.refusal is not None:
            return self._deny(prove, event.refusal)
        head = (WIRE_VERSION, self._incarnation, prove.nonce, prove.claim, prove.reader)
        return [events.Reply(Proof(*head, event.rows, event.columns))]

    def _deny(
        self, ask: Ask | Prove, detail: str, reason: Literal["gone", "incarnation"] = "gone"
    ) -> list[events.Action]:
        """The detail stays in this side's log; strangers learn no more than 'gone'."""
        deny = Deny(WIRE_VERSION, self._incarnation, ask.nonce, ask.claim, ask.reader, reason)
        return [events.Denied(Nonce(ask.nonce), detail), events.Reply(deny)]

    def _renew(self, renew: Renew, now: float) -> list[events.Action]:
        """Extend the leases of the claims that are named, and end those that no longer are.

        One that is meant for a former life says nothing about this one's claims.
        """
        if renew.incarnation != self._incarnation:
            return [self._renewed(renew, renew.claims)]
        named = set(renew.claims)
        rank = Rank(renew.reader.rank)
        held: set[str] = set()
        actions: list[events.Action] = []
        for offer, binding in self.offers.held_by(renew.reader):
            held.add(binding.claim)
            if binding.claim in named:
                binding.leases[rank] = now + self.offers.lease_s
            elif binding.numbers.get(rank, renew.number) < renew.number:
                binding.ended.add(rank)
                actions += self.offers.settle(offer, events.How.ABORTED)
        lost = tuple(claim for claim in renew.claims if claim not in held)
        return [*actions, self._renewed(renew, lost)]

    def _renewed(self, renew: Renew, lost: tuple[str, ...]) -> events.Reply:
        answer = Renewed(WIRE_VERSION, self._incarnation, renew.reader, renew.number, lost)
        return events.Reply(answer)

    def _ended(self, message: Done | Abort, how: events.How) -> list[events.Action]:
        """A reader has ended, also one who did not ask: then nobody of its engine reads this rank.

        With an abort all of them give the prefill up; with a done, it is read from other ranks.
        """
        offer = self.offers.get(message.nonce)
        if offer is None or message.incarnation != self._incarnation:
            return []
        if offer.binding is None:
            return self._unneeded(offer.nonce, Cause.GIVEN_UP, events.How.NOT_NEEDED)
        if offer.binding.expects(message.claim, message.reader):
            offer.binding.ended.add(Rank(message.reader.rank))
        return self.offers.settle(offer, how)
