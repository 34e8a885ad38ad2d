"""Whether the bytes that were read from a prefill rank are the ones that it has.

Decode says what it reads as soon as it does (`Prove`), so that prefill digests while the bytes
travel. When they have landed, and the slot still stands, they are digested here and compared. It
is all one question: what differs is never used, and costs a failed load.
"""

from nixl_kv.protocol import events
from nixl_kv.protocol.events import Failure, Why
from nixl_kv.protocol.messages import WIRE_VERSION, Abort, Done, Proof, Prove
from nixl_kv.protocol.proofs import ReadBegun, Verified, Verify
from nixl_kv.protocol.receiving import Cause, Proving, Source, State
from nixl_kv.protocol.request import ASK_AGAIN_S, Request, hint


def handle(
    request: Request, source: Source, event: ReadBegun | Verified, *, now: float
) -> list[events.Action]:
    """A read to be verified has begun, or its bytes were compared. `now` is in seconds."""
    if isinstance(event, Verified):
        return _verified(request, source, event)
    source.proving = Proving(event.excerpts)
    return ask(request, source, now)


def ask(request: Request, source: Source, now: float) -> list[events.Action]:
    """Ask for the proof of what is read, where it is to be verified; or ask again."""
    if source.proving is None or request.load is None:
        return []
    source.ask_again_at = now + ASK_AGAIN_S
    message = Prove(
        WIRE_VERSION,
        source.incarnation,
        request.ticket.nonce,
        request.claim,
        request.reader,
        request.load.end,
        source.proving.excerpts,
    )
    return [events.Send(source.endpoint, message)]


def is_overdue(source: Source, now: float) -> bool:
    """Whether the proof is waited for and does not come."""
    if source.state is not State.PROVING or source.proving is None:
        return False
    return source.proving.proof is None and source.ask_again_at <= now


def proved(request: Request, source: Source, proof: Proof) -> list[events.Action]:
    """The proof is here; one that comes twice, or too late, changes nothing."""
    if source.proving is None or source.proving.proof is not None:
        return []
    source.proving.proof = proof
    return compare(request, source)


def compare(request: Request, source: Source) -> list[events.Action]:
    """Compare, once both the bytes and the proof are here."""
    proving, load = source.proving, request.load
    if source.state is not State.PROVING or proving is None or load is None:
        return []
    if proving.proof is None:
        return []
    verify = Verify(
        request.request,
        source.rank,
        proving.excerpts,
        load.begin,
        load.end,
        load.tables,
        proving.proof,
    )
    return [verify]


def is_awaited(request: Request | None, verify: Verify) -> bool:
    """Whether anything hangs on this comparison any more."""
    if request is None or request.claim != verify.proof.claim:
        return False
    source = request.sources.get(verify.source)
    return source is not None and source.state is State.PROVING


def _verified(request: Request, source: Source, event: Verified) -> list[events.Action]:
    """The bytes were compared; nobody may want to know any more."""
    if source.state is not State.PROVING or event.claim != request.claim:
        return []
    if event.refusal is None and event.difference is None:
        source.move(Cause.PROVEN)
        return [hint(Done, request, source)]
    read = f"what was read from prefill rank {source.rank}"
    if event.refusal is not None:
        request.fail(Failure(Why.INTERNAL, f"{read} cannot be verified: {event.refusal}"))
        source.move(Cause.REFUSED)
    else:
        request.fail(Failure(Why.CORRUPT, f"{read} is not what it has: {event.difference}"))
        source.move(Cause.CORRUPT)
    return [hint(Abort, request, source)]
