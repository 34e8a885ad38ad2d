"""The prefill side of the protocol: the caller's commands and readers' messages in, actions out."""

from collections.abc import Collection

from nixl_kv.ids import Claim, Incarnation, Nonce, short
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.prefill.offer import Binding, Offer, State, reader_name
from nixl_kv.protocol.prefill.offers import OfferBook
from nixl_kv.protocol.prefill.ring import WaitingChunk


class PrefillMachine:
    """One prefill rank. Its state is changed by `handle` alone; nothing here waits."""

    def __init__(
        self,
        incarnation: Incarnation,
        record: events.Record,
        *,
        num_slots: int,
        offer_ttl_s: float,
        lease_s: float,
        hold_s: float,
    ) -> None:
        """Start the life that `incarnation` names, with no offer. `record` keeps transitions."""
        self._incarnation = incarnation
        self.offers = OfferBook(
            record,
            num_slots=num_slots,
            offer_ttl_s=offer_ttl_s,
            lease_s=lease_s,
            hold_s=hold_s,
        )

    def handle(self, event: events.PrefillEvent, now: float) -> list[events.Action]:
        """All commands, messages and events go through here. `now` is monotonic, in seconds."""
        actions = self._handle(event, now)
        return actions + self._pack_waiting(now) if self.offers.ring.num_waiting else actions

    def _handle(self, event: events.PrefillEvent, now: float) -> list[events.Action]:
        match event:
            case events.PrepareOffer():
                self.offers.prepare(event)
            case events.MarkWritten():
                return self._on_written(event, now)
            case events.PublishOffer():
                self.offers.publish(event, now)
            case events.WithdrawOffer():
                self.offers.withdraw(event)
            case events.RevokeOffer():
                return self._revoke(event)
            case events.ReclaimBlocks():
                return self._reclaim(event, now)
            case events.Tick():
                return self._on_tick(event, now)
            case events.DigestMade() | events.ChunkPacked():
                return self._on_work_done(event)
            case events.Asked():
                return self._on_message(event, now)
        return []

    def clear(self, writing: Collection[int] = ()) -> None:
        """Forget everything, whatever state it is in, but the ring's slots that are written."""
        self.offers.clear(writing)

    def begin_life(self, incarnation: Incarnation, writing: Collection[int] = ()) -> None:
        """Forget everything of this life, and begin another one; all slots have been cleared."""
        self._incarnation = incarnation
        self.clear(writing)

    def is_digest_wanted(self, request: messages.DigestRequest) -> bool:
        """Whether its digest may still be sent."""
        return self._granted_to(request) is not None

    def _revoke(self, command: events.RevokeOffer) -> list[events.Action]:
        """It may have ended, or be granted, by now."""
        offer = self.offers.get(command.nonce)
        if offer is None or offer.state is not State.OFFERED:
            return []
        return self.offers.end_unclaimed(offer, command, events.OfferEnd.REVOKED)

    # --- blocks that are wanted back

    def _reclaim(self, command: events.ReclaimBlocks, now: float) -> list[events.Action]:
        actions: list[events.Action] = []
        for offer in self.offers.to_reclaim(command.num_blocks):
            if offer.state is State.OFFERED:
                actions += self.offers.end_unclaimed(offer, command, events.OfferEnd.REVOKED)
            else:
                actions += self._recall(offer, command, now)
        return actions

    def _on_tick(self, tick: events.Tick, now: float) -> list[events.Action]:
        actions: list[events.Action] = []
        for offer in self.offers.pop_due(now):
            actions += self.offers.on_time(offer, tick, now)
            binding = offer.binding
            if offer.state is State.GRANTED and binding is not None and binding.held_until <= now:
                actions += self._recall(offer, tick, now)
        return actions + self.offers.take_back_slot(tick, now)

    def _recall(
        self, offer: Offer, event: events.Tick | events.ReclaimBlocks, now: float
    ) -> list[events.Action]:
        binding = offer.binding
        if binding is None:
            return []
        return [
            events.Reply(
                route,
                messages.Recall(
                    incarnation=self._incarnation,
                    nonce=offer.nonce,
                    claim=binding.claim,
                    reader=messages.Reader(
                        engine=binding.engine, incarnation=binding.lives[rank], rank=rank
                    ),
                ),
            )
            for rank, route in self.offers.recall(offer, event, now)
        ]

    def _on_message(self, event: events.Asked, now: float) -> list[events.Action]:
        match event.message:
            case messages.Ask() as ask:
                return self._on_ask(ask, event.route, now)
            case messages.DigestRequest() as request:
                return self._on_digest_request(request, event.route)
            case messages.PackRequest() as pack:
                return self._on_pack_request(pack, event.route)
            case messages.Renew() as renew:
                return self._on_renew(renew, event.route, now)
            case messages.Release() as release:
                return self._on_release(release)

    # --- asks

    def _on_ask(self, ask: messages.Ask, route: bytes, now: float) -> list[events.Action]:
        if ask.incarnation != self._incarnation:
            return self._deny(ask, route, f"meant for incarnation {short(ask.incarnation)}")
        offer = self.offers.get(ask.nonce)
        if offer is None:
            return self._deny(ask, route, "no such offer: used, expired, or never made")
        if offer.prepared.context != ask.context:
            return self._deny(ask, route, "another prompt")
        if offer.binding is not None:
            return self._grant(offer, offer.binding, ask, route=route, now=now)
        return self._bind(offer, ask, route, now=now)

    def _bind(
        self, offer: Offer, ask: messages.Ask, route: bytes, *, now: float
    ) -> list[events.Action]:
        """The first ask binds the offer to its claim."""
        if ask.reader.rank not in ask.readers:
            detail = f"rank {ask.reader.rank} is not among its own readers"
            return self._deny(ask, route, detail)
        write_slot = self.offers.bind(offer, ask, now)
        if write_slot is None or offer.binding is None:
            return self._deny(ask, route, "all generation slots are granted")
        return [write_slot, *self._grant(offer, offer.binding, ask, route=route, now=now)]

    def _grant(
        self, offer: Offer, binding: Binding, ask: messages.Ask, *, route: bytes, now: float
    ) -> list[events.Action]:
        """Also for an ask that comes again: the grant may have been lost."""
        if not binding.expects(ask.claim, ask.reader):
            return self._deny(ask, route, "claimed by another, or ended for this reader")
        if offer.state is State.RECALLED:
            return self._deny(ask, route, "its blocks are wanted back")
        rank = ask.reader.rank
        binding.routes[rank] = route
        binding.leases[rank] = now + self.offers.lease_s
        binding.lives[rank] = ask.reader.incarnation
        binding.numbers[rank] = max(ask.number, binding.numbers.get(rank, 0))
        if not offer.is_written:
            return _answer_later(offer, ask, route)
        grant = messages.Grant(
            incarnation=self._incarnation,
            nonce=ask.nonce,
            claim=ask.claim,
            reader=ask.reader,
            lease_s=self.offers.lease_s,
            tables=offer.prepared.tables,
            slot=binding.slot,
            generation=binding.generation,
        )
        return [events.Reply(route, grant)]

    def _on_written(self, command: events.MarkWritten, now: float) -> list[events.Action]:
        """Who asked before is answered now."""
        offer = self.offers.get(command.nonce)
        if offer is None:
            return []
        offer.is_written = True
        early, offer.early = offer.early, {}
        return [action for asked in early.values() for action in self._on_message(asked, now)]

    def _deny(
        self,
        message: messages.Ask | messages.DigestRequest | messages.PackRequest,
        route: bytes,
        reason: str,
    ) -> list[events.Action]:
        """The reason stays on this side: strangers learn nothing from a denial.

        Of an offer that is not known nothing is recorded: strangers could fill the event log.
        """
        offer = self.offers.get(message.nonce)
        if offer is not None:
            cause = f"{type(message).__name__} denied: {reason}"
            offer.note(reader_name(message.reader), cause)
        denial = _denial(self._incarnation, message)
        return [events.AskDenied(message.nonce, reason), events.Reply(route, denial)]

    def _on_work_done(self, event: events.DigestMade | events.ChunkPacked) -> list[events.Action]:
        """What a reader has asked for is made."""
        if isinstance(event, events.DigestMade):
            return self._on_digest_made(event)
        return self._on_packed(event)

    # --- digests

    def _granted_to(self, request: messages.DigestRequest | messages.PackRequest) -> Offer | None:
        """The offer, while it is granted to this reader, who has asked for it."""
        offer = self.offers.get(request.nonce)
        if offer is None or offer.binding is None or request.incarnation != self._incarnation:
            return None
        has_asked = request.reader.rank in offer.binding.lives
        is_expected = offer.binding.expects(request.claim, request.reader)
        return offer if has_asked and is_expected else None

    def _on_digest_request(
        self, request: messages.DigestRequest, route: bytes
    ) -> list[events.Action]:
        """Digest what a reader reads, if it may. It may ask right after it has asked for blocks."""
        offer = self.offers.get(request.nonce)
        if offer is None:  # its ask was denied, and that was told
            return [events.Reply(route, _denial(self._incarnation, request))]
        if request.incarnation == self._incarnation and offer.may_be_asked_by(request):
            return []  # it has overtaken its ask; to a denial the reader would give all of it up
        offer = self._granted_to(request)
        if offer is None:
            return self._deny(request, route, "a digest of what is not granted to it")
        if not offer.is_written:
            return _answer_later(offer, request, route)
        num_tokens = offer.prepared.num_tokens
        if request.end > num_tokens:
            return self._deny(request, route, f"a digest up to token {request.end} of {num_tokens}")
        return [events.MakeDigest(route, request, offer.prepared.tables)]

    def _on_digest_made(self, event: events.DigestMade) -> list[events.Action]:
        """The blocks were held until now, or else the digest may be of anything.

        A reader that left meanwhile is nothing to tell people of.
        """
        request = event.digest_request
        if not self.is_digest_wanted(request):
            return [events.Reply(event.route, _denial(self._incarnation, request))]
        if event.refusal is not None:
            return self._deny(request, event.route, event.refusal)
        reply = messages.DigestReply(
            incarnation=self._incarnation,
            nonce=request.nonce,
            claim=request.claim,
            reader=request.reader,
            rows=event.rows,
            columns=event.columns,
        )
        return [events.Reply(event.route, reply)]

    # --- chunks that are packed

    def _on_pack_request(self, request: messages.PackRequest, route: bytes) -> list[events.Action]:
        """Pack what a reader reads, if it may, once there is a slot for it.

        A request that comes again, since its answer may have been lost, is answered again.
        """
        offer, ring = self._granted_to(request), self.offers.ring
        if offer is None or not offer.is_written:
            return self._deny(request, route, "a chunk of what is not granted to it")
        num_tokens = offer.prepared.num_tokens
        if request.end > num_tokens:
            return self._deny(request, route, f"a chunk up to token {request.end} of {num_tokens}")
        holder = offer.nonce, request.reader.rank
        if not ring.is_latest(holder, request.number):
            return []
        ring.release(holder, request.holds)
        if request.chunk not in request.holds:
            return []  # the reader has read it, and asks for nothing
        slot = ring.slot_of(holder, request.chunk)
        if slot is not None:
            return [self._packed(request, route, slot)] if ring.is_packed(slot) else []
        if ring.wait(WaitingChunk(route, request)):
            return []
        return [self._packed(request, route, None)]

    def _pack_waiting(self, now: float) -> list[events.Action]:
        """Pack what waits into slots that are free, also if this event has freed them."""
        actions: list[events.Action] = []
        for chunk, slot in self.offers.ring.pop_packable(now):
            offer = self.offers.get(Nonce(chunk.request.nonce))
            if offer is not None:  # else `forget` has removed it
                tables = offer.prepared.tables
                actions.append(events.PackChunk(chunk.route, chunk.request, tables, slot))
        return actions

    def _on_packed(self, event: events.ChunkPacked) -> list[events.Action]:
        """A reader that left meanwhile is nothing to tell people of."""
        request = event.pack_request
        is_wanted = self.offers.ring.on_packed(event.slot, is_packed=event.refusal is None)
        offer = self._granted_to(request)
        if not is_wanted or offer is None:
            return []
        if event.refusal is not None:
            offer.note(reader_name(request.reader), f"PackRequest denied: {event.refusal}")
            return [self._packed(request, event.route, None)]
        return [self._packed(request, event.route, event.slot)]

    def _packed(
        self, request: messages.PackRequest, route: bytes, slot: int | None
    ) -> events.Reply:
        reply = messages.PackReply(
            incarnation=self._incarnation,
            nonce=request.nonce,
            claim=request.claim,
            reader=request.reader,
            chunk=request.chunk,
            slot=slot,
        )
        return events.Reply(route, reply)

    # --- leases

    def _on_renew(self, renew: messages.Renew, route: bytes, now: float) -> list[events.Action]:
        """Extend the leases of the claims that are named, and end those that no longer are.

        One that is meant for a former life says nothing about this one's claims.
        """
        if renew.incarnation != self._incarnation:
            return [self._renewed(renew, renew.claims, route)]
        named, reading = set(renew.claims), set(renew.claims[: renew.num_reading])
        rank = renew.reader.rank
        held: set[Claim] = set()
        actions: list[events.Action] = []
        for offer, binding in self.offers.held_by(renew.reader):
            held.add(binding.claim)
            if binding.claim in named:
                binding.leases[rank] = now + self.offers.lease_s
                if rank in binding.lives:
                    binding.routes[rank] = route
                if binding.claim in reading and offer.state is not State.READING:
                    offer.move(State.READING, renew, peer=reader_name(renew.reader))
            elif binding.numbers.get(rank, renew.number) < renew.number:
                binding.ended.add(rank)
                self.offers.ring.forget((offer.nonce, rank))
                actions += self.offers.settle(offer, renew, events.OfferEnd.ABORTED)
        lost = tuple(claim for claim in renew.claims if claim not in held)
        return [*actions, self._renewed(renew, lost, route)]

    def _renewed(
        self, renew: messages.Renew, lost: tuple[Claim, ...], route: bytes
    ) -> events.Reply:
        answer = messages.Renewed(
            incarnation=self._incarnation, reader=renew.reader, number=renew.number, lost=lost
        )
        return events.Reply(route, answer)

    def _on_release(self, release: messages.Release) -> list[events.Action]:
        """A reader has ended, also one who did not ask: then nobody of its engine reads this rank.

        It is then read from other ranks (`complete`), or the whole engine gives it up.
        """
        offer = self.offers.get(release.nonce)
        if offer is None or release.incarnation != self._incarnation:
            return []
        if offer.binding is None:
            return self.offers.end_unclaimed(offer, release, events.OfferEnd.NOT_NEEDED)
        if offer.binding.expects(release.claim, release.reader):
            offer.binding.ended.add(release.reader.rank)
            self.offers.ring.forget((offer.nonce, release.reader.rank))
        is_recalled = offer.state is State.RECALLED
        given_up = events.OfferEnd.REVOKED if is_recalled else events.OfferEnd.ABORTED
        end = events.OfferEnd.READ if release.complete else given_up
        return self.offers.settle(offer, release, end)


def _answer_later(
    offer: Offer, message: messages.Ask | messages.DigestRequest, route: bytes
) -> list[events.Action]:
    offer.early[type(message), message.reader.rank] = events.Asked(route, message)
    return []


def _denial(
    incarnation: Incarnation,
    message: messages.Ask | messages.DigestRequest | messages.PackRequest,
) -> messages.Deny:
    return messages.Deny(
        incarnation=incarnation,
        nonce=message.nonce,
        claim=message.claim,
        reader=message.reader,
    )
