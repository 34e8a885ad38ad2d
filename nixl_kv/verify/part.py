"""Digests in the protocol: prefill answers requests for them, and decode compares them.

A digest covers bytes that were computed together. So a verified load whose prefill was preempted
reads all of its bytes again, and asks for a digest only when all of them have landed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.match import Route
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.events import Actions, Failure, FailureKind
from nixl_kv.protocol.load import ASK_AGAIN_S, ENDED, Load, LoadPart, RankRead, ReadState
from nixl_kv.protocol.prefill import PrefillPart

NameSlices: TypeAlias = Callable[
    [Route, CacheLayout, events.StartLoad], tuple[messages.KVSlice, ...]
]
"""Names the slices that a load reads from one rank; a ValueError if the block tables do not fit."""


class DigestPart(PrefillPart):
    """Has the blocks digested that are granted to a reader."""

    def __init__(self) -> None:
        self.message_handlers = {messages.DigestRequest: self._on_request}
        self.event_handlers = {events.DigestMade: self._on_made}

    def is_wanted(self, action: events.MakeDigest) -> bool:
        return self.machine.granted_to(action.digest_request) is not None

    def _on_request(self, request: messages.DigestRequest, route: bytes, _now: float) -> Actions:
        machine, rank = self.machine, request.reader.rank
        offer = machine.offers.get(request.nonce)
        if offer is None and machine.is_expected(request.nonce):  # the reader repeats it
            return []
        if offer is None:  # its ask was denied, and the log says so
            return [events.Reply(route, messages.Deny(**machine.fields(request)))]
        binding = offer.binding
        is_expected = binding is None or binding.expects(request.claim, request.reader)
        if request.incarnation != machine.incarnation or not is_expected:
            return machine.deny(request, route, "a digest of blocks that are not granted to it")
        # The request may have overtaken the reader's ask. A denial would end the reader's whole
        # load; without an answer it repeats the request.
        if binding is None or rank not in binding.asked:
            return []
        num_tokens = offer.prepared.num_tokens
        if offer.written < min(request.end, num_tokens):
            offer.delay(request, route)
            return []
        if request.end > num_tokens:
            reason = f"a digest up to token {request.end} of {num_tokens}"
            return machine.deny(request, route, reason)
        return [events.MakeDigest(route, request, offer.prepared.tables)]

    def _on_made(self, event: events.DigestMade, _now: float) -> Actions:
        machine, request = self.machine, event.digest_request
        # The blocks may have changed under the digest unless the grant still holds.
        offer = machine.granted_to(request)
        if offer is None or machine.is_void(offer):
            return [events.Reply(event.route, messages.Deny(**machine.fields(request)))]
        if event.refusal is not None:
            return machine.deny(request, event.route, event.refusal)
        digest = messages.DigestReply(
            **machine.fields(request), rows=event.rows, columns=event.columns
        )
        return [events.Reply(event.route, digest)]


@dataclass
class _Proof:
    slices: tuple[messages.KVSlice, ...] = ()  # known once there are local blocks
    digest: messages.DigestReply | None = None  # prefill's, of these slices


class ProofPart(LoadPart):
    """Compares the digests of the bytes that the fence has proven with prefill's."""

    def __init__(self, name_slices: NameSlices) -> None:
        self._name_slices = name_slices
        self.handlers = {
            messages.DigestReply: self._on_reply,
            events.DigestCompared: self._on_compared,
        }

    def is_wanted(self, action: events.CompareDigest) -> bool:
        read = self.find(action.claim, action.rank)
        return read is not None and read.state in (ReadState.READING, ReadState.VERIFYING)

    def compares(self, load: Load) -> bool:
        return load.start is not None and load.start.verify

    def _of(self, read: RankRead) -> _Proof:
        return read.keep(self, _Proof)

    def on_blocks(self, load: Load, read: RankRead, now: float) -> Actions:
        if load.start is None or not load.start.verify or read.state in ENDED:
            return []
        try:
            self._of(read).slices = self._name_slices(read.route, read.layout, load.start)
        except ValueError as error:
            load.fail(Failure(FailureKind.INTERNAL, str(error)))
        # Until all parts have landed, prefill may preempt an early request and compute other bits,
        # which a digest of the first ones does not fit.
        return [] if load.ticket.is_early else self._request(load, read, now)

    def on_begun(self, load: Load, read: RankRead, part: events.StartLoad) -> Actions:
        slices = self._of(read).slices
        if load.start is None or not slices or part.end < load.start.end:
            return []
        about = (read.rank, slices, load.start, load.claim)
        return [events.CompareDigest(*about, has_landed=False)]

    def on_new_grant(self, read: RankRead) -> None:
        self._of(read).digest = None  # of bytes that prefill has computed again

    def must_prove(self, load: Load, read: RankRead, event: events.ReadDone) -> bool:
        # Bytes without a named slice cannot be compared: the load must then be late, not good.
        return self.compares(load) and (bool(self._of(read).slices) or event.num_bytes > 0)

    def prove(self, load: Load, read: RankRead, now: float) -> Actions:
        asked = self._request(load, read, now) if load.ticket.is_early else []
        return asked + self._compare(load, read)

    def is_awaiting(self, read: RankRead) -> bool:
        return read.state is ReadState.VERIFYING and self._of(read).digest is None

    def ask(self, load: Load, read: RankRead, now: float) -> Actions:
        return self._request(load, read, now) if read.state is ReadState.VERIFYING else []

    def _request(self, load: Load, read: RankRead, now: float) -> Actions:
        slices = self._of(read).slices
        if load.start is None or not slices:
            return []
        read.ask_again_at = now + ASK_AGAIN_S
        end = load.start.end
        request = messages.DigestRequest(**load.fields(read), end=end, slices=slices)
        return [events.Send(read.endpoint, request)]

    def _on_reply(
        self, load: Load, read: RankRead, reply: messages.DigestReply, _now: float
    ) -> Actions:
        proof = self._of(read)
        if not proof.slices or proof.digest is not None:
            return []
        proof.digest = reply
        return self._compare(load, read)

    def _compare(self, load: Load, read: RankRead) -> Actions:
        """Digest the bytes that the fence has proven, and compare once prefill's digest is here."""
        proof = self._of(read)
        if not proof.slices or read.state is not ReadState.VERIFYING or load.start is None:
            return []
        sums = () if proof.digest is None else (proof.digest.rows, proof.digest.columns)
        return [events.CompareDigest(read.rank, proof.slices, load.start, load.claim, *sums)]

    def _on_compared(
        self, load: Load, read: RankRead, event: events.DigestCompared, now: float
    ) -> Actions:
        # The comparison of an earlier attempt may end when the same request is loaded again.
        if read.state is not ReadState.VERIFYING or event.claim != load.claim:
            return []
        source, failure = f"the bytes from prefill rank {read.rank}", None
        if event.refusal is not None:
            detail = f"{source} cannot be verified: {event.refusal}"
            failure = Failure(FailureKind.INTERNAL, detail)
        elif event.difference is not None:
            failure = Failure(FailureKind.CORRUPT, f"{source} are wrong: {event.difference}")
        return load.end_proof(read, failure, now)
