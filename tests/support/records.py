"""Records of the protocol, with the values filled in that a test does not care about.

The prefill engine is at HOME; its ranks answer at `at(rank)`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from nixl_kv.geometry.excerpts import Excerpt
from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span
from nixl_kv.geometry.ranks import Route, Shape
from nixl_kv.ids import Claim, EngineId, Generation, Incarnation, Nonce, Rank, RequestId
from nixl_kv.protocol import events, messages, proofs
from nixl_kv.protocol.events import PeerKey
from nixl_kv.protocol.messages import (
    WIRE_VERSION,
    Abort,
    Ask,
    Deny,
    Description,
    Done,
    Grant,
    Message,
    Proof,
    Prove,
    RankDescription,
    Reader,
    Renew,
    Renewed,
    Slots,
)
from nixl_kv.protocol.ticket import Ticket

DECODERS: Final[Mapping[bytes, Callable[[bytes], Message]]] = {
    b"\xa8Describe": messages.decode_to_engine,
    **dict.fromkeys(
        (b"\xa3Ask", b"\xa5Prove", b"\xa5Renew", b"\xa4Done", b"\xa5Abort"),
        messages.decode_to_rank,
    ),
}


def decode(payload: bytes) -> Message:
    """As the socket does that such a message comes to; its tag, as msgpack, tells which."""
    found = (DECODERS[tag] for tag in DECODERS if tag in payload[:12])
    return next(found, messages.decode_answer)(payload)


def hex32(number: int) -> str:
    return f"{number:032x}"


PREFILL = EngineId("prefill")
ENGINE_LIFE = Incarnation(hex32(0xA))
RANK_LIFE = Incarnation(hex32(0xB))
OTHER_LIFE = Incarnation(hex32(0xF))
HOME = "tcp://10.0.0.1:5600"
PEER = PeerKey(PREFILL, ENGINE_LIFE, HOME)
READER = Reader("decode", hex32(0xD), 0)
STRANGER = Reader("stranger", hex32(0xD), 0)
NONCE = Nonce(hex32(1))
CLAIM = Claim(hex32(0xC1))
RIVAL = Claim(hex32(0xC2))
CONTEXT = hex32(0xE)
TABLES = (b"\7\0\0\0\3\0\0\0",)
LEASE_S = 2.0
GENERATION = Generation(b"\1" * 16)
EXCERPTS = (Excerpt("layer.0", 0, 2, 0),)
SUMS = b"\5" * 8
P1, D1, D2 = RequestId("p1"), RequestId("d1"), RequestId("d2")


def at(rank: int) -> str:
    return f"tcp://10.0.0.1:{7000 + rank}"


# --- messages of decode


def ask(**changed: Any) -> Ask:
    values = {
        "version": WIRE_VERSION,
        "incarnation": RANK_LIFE,
        "nonce": NONCE,
        "claim": CLAIM,
        "context": CONTEXT,
        "reader": READER,
        "number": 1,
        "readers": (0,),
    }
    return Ask(**{**values, **changed})


def prove(**changed: Any) -> Prove:
    values = {
        "version": WIRE_VERSION,
        "incarnation": RANK_LIFE,
        "nonce": NONCE,
        "claim": CLAIM,
        "reader": READER,
        "end": 7,
        "excerpts": EXCERPTS,
    }
    return Prove(**{**values, **changed})


def renew(number: int, *claims: str, reader: Reader = READER, life: str = RANK_LIFE) -> Renew:
    return Renew(WIRE_VERSION, life, reader, number, claims)


def done(
    claim: str = CLAIM, *, nonce: str = NONCE, reader: Reader = READER, life: str = RANK_LIFE
) -> Done:
    return Done(WIRE_VERSION, life, nonce, claim, reader)


def abort(
    claim: str = CLAIM, *, nonce: str = NONCE, reader: Reader = READER, life: str = RANK_LIFE
) -> Abort:
    return Abort(WIRE_VERSION, life, nonce, claim, reader)


# --- messages of prefill


def grant(**changed: Any) -> Grant:
    values = {
        "version": WIRE_VERSION,
        "incarnation": RANK_LIFE,
        "nonce": NONCE,
        "claim": CLAIM,
        "reader": READER,
        "num_tokens": 8,
        "lease_s": LEASE_S,
        "tables": TABLES,
        "slot": 3,
        "generation": GENERATION,
    }
    return Grant(**{**values, **changed})


def deny(reason: Any = "gone", **changed: Any) -> Deny:
    values = {
        "version": WIRE_VERSION,
        "incarnation": RANK_LIFE,
        "nonce": NONCE,
        "claim": CLAIM,
        "reader": READER,
        "reason": reason,
    }
    return Deny(**{**values, **changed})


def proof(**changed: Any) -> Proof:
    values = {
        "version": WIRE_VERSION,
        "incarnation": RANK_LIFE,
        "nonce": NONCE,
        "claim": CLAIM,
        "reader": READER,
        "rows": SUMS * 4,
        "columns": SUMS,
    }
    return Proof(**{**values, **changed})


def renewed(number: int, *lost: str, reader: Reader = READER, life: str = RANK_LIFE) -> Renewed:
    return Renewed(WIRE_VERSION, life, reader, number, lost)


def layout() -> CacheLayout:
    region = Region("layer.0", 4096, 64, 32, 8, 0, 2, (Part(0, 4), Part(4, 4)))
    return CacheLayout((Group(4, 10, 1, (region,)),), "uint8", "DRAM", 0, (Span(4096, 1024),))


def rank_description(rank: int = 0, life: str = RANK_LIFE) -> RankDescription:
    return RankDescription(life, at(rank), b"agent", Slots(65536, 64), layout())


def description(ranks: int = 1, life: str = ENGINE_LIFE, rank_life: str = RANK_LIFE) -> Description:
    described = tuple(rank_description(rank, rank_life) for rank in range(ranks))
    return Description(
        WIRE_VERSION, life, PREFILL, {"dtype": "bfloat16"}, Shape(ranks, 1), described
    )


def describe(life: str = ENGINE_LIFE) -> messages.Describe:
    return messages.Describe(WIRE_VERSION, life, PREFILL)


def refusal(reason: str, life: str = ENGINE_LIFE) -> messages.Refusal:
    return messages.Refusal(WIRE_VERSION, life, PREFILL, reason)


# --- commands


def ticket(**changed: Any) -> Ticket:
    values = {
        "remote_engine_id": PREFILL,
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "incarnation": ENGINE_LIFE,
        "nonce": NONCE,
        "num_tokens": 8,
        "context": CONTEXT,
    }
    return Ticket(**{**values, **changed})


def prepare(**changed: Any) -> events.Prepare:
    values = {
        "nonce": NONCE,
        "request": P1,
        "context": CONTEXT,
        "num_tokens": 8,
        "tables": TABLES,
    }
    return events.Prepare(**{**values, **changed})


def fetch(request: str = D1, claim: str = CLAIM, **changed: Any) -> events.Fetch:
    return events.Fetch(RequestId(request), ticket(**changed), Claim(claim))


def load(request: str = D1, num_tokens: int = 7, *, verify: bool = False) -> events.Load:
    return events.Load(RequestId(request), 0, num_tokens, (b"\2\0\0\0\5\0\0\0",), verify)


def drop(request: str = D1) -> events.Drop:
    return events.Drop(RequestId(request))


# --- events


def routes(*sources: int, readers: Sequence[int] = (0,)) -> tuple[Route, ...]:
    return tuple(Route(Rank(source), tuple(map(Rank, readers))) for source in sources)


def joined(ranks: int = 1, readers: Sequence[int] = (0,)) -> events.PeerJoined:
    """All ranks are read, by these readers."""
    return events.PeerJoined(PEER, description(ranks), routes(*range(ranks), readers=readers))


def read_done(source: int = 0, request: str = D1) -> events.ReadDone:
    return events.ReadDone(RequestId(request), Rank(source))


def read_failed(reason: str, source: int = 0, request: str = D1) -> events.ReadFailed:
    return events.ReadFailed(RequestId(request), Rank(source), reason)


def slot_read(
    generation: bytes = GENERATION, source: int = 0, request: str = D1
) -> events.SlotRead:
    return events.SlotRead(RequestId(request), Rank(source), Generation(generation))


def read_begun(source: int = 0, request: str = D1) -> proofs.ReadBegun:
    return proofs.ReadBegun(RequestId(request), Rank(source), EXCERPTS)


def verify(source: int = 0, request: str = D1, given: Proof | None = None) -> proofs.Verify:
    """What a load that is verified asks the data plane."""
    loaded = load(request)
    return proofs.Verify(
        RequestId(request),
        Rank(source),
        EXCERPTS,
        loaded.begin,
        loaded.end,
        loaded.tables,
        given or proof(),
    )


def verified(
    difference: str | None = None, *, source: int = 0, request: str = D1, claim: str = CLAIM
) -> proofs.Verified:
    return proofs.Verified(RequestId(request), Rank(source), Claim(claim), difference)
