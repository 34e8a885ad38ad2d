"""Records of the protocol, with the values filled in that a test does not care about.

The prefill engine is at HOME; its ranks answer at `at(rank)`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import msgspec

from nixl_kv.geometry.layout import ABSENT, CacheLayout, Group, Part, Region, Span, Table
from nixl_kv.geometry.match import ParallelShape, Route
from nixl_kv.ids import (
    ANY_INCARNATION,
    Claim,
    Endpoint,
    EngineId,
    FenceToken,
    HintKey,
    Incarnation,
    Nonce,
    Rank,
    RequestId,
    new_nonce,
)
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.events import PeerKey, Transition
from nixl_kv.protocol.messages import (
    Answer,
    Description,
    KVSlice,
    Message,
    RankDescription,
    Reader,
    ToPrefill,
)
from nixl_kv.protocol.ticket import SealedTicket, Ticket, context_hash

_Kind = TypeVar("_Kind")

DECODERS: Final[Mapping[bytes, Callable[[bytes], Message]]] = {
    msgspec.msgpack.encode(kind.__name__): decoder
    for kinds, decoder in (
        (messages.ToFinder, messages.decode_to_finder),
        (messages.ToTool, messages.decode_to_tool),
        (messages.ToEngine, messages.decode_to_engine),
        (messages.ToRank | messages.StatusRequest, messages.decode_to_rank),
        (messages.Answer, messages.decode_answer),
    )
    for kind in get_args(kinds)
}
"""Decoders by the tag of a message, as msgpack. If several sockets take it, the last one counts."""


def decode(payload: bytes) -> Message:
    """Decode as the socket for such a message does."""
    decoders = (DECODERS[tag] for tag in DECODERS if tag in payload[:16])
    return next(decoders, messages.decode_answer)(payload)


def _filled(kind: Callable[..., _Kind], **values: Any) -> Callable[..., _Kind]:
    """Makes one with these values, except for those that a call gives."""
    return partial(kind, **values)


def hex32(number: int) -> str:
    return f"{number:032x}"


PREFILL = EngineId("prefill")
DECODE = EngineId("decode")
ENGINE_LIFE = Incarnation(hex32(0xA))
RANK_LIFE = Incarnation(hex32(0xB))
READER_LIFE = Incarnation(hex32(0xD))
OTHER_LIFE = Incarnation(hex32(0xF))
HOME = Endpoint("tcp://10.0.0.1:5600")
ELSEWHERE = Endpoint("tcp://10.9.9.9:5600")
PEER = PeerKey(PREFILL, ENGINE_LIFE, HOME)


def reader(rank: int = 0, engine: str = DECODE, incarnation: Incarnation = READER_LIFE) -> Reader:
    return Reader(engine=EngineId(engine), incarnation=incarnation, rank=Rank(rank))


READER = reader()
STRANGER = reader(engine="stranger")
NONCE = Nonce(hex32(1))
NONCE2 = Nonce(hex32(2))
CLAIM = Claim(hex32(0xC1))
RIVAL = Claim(hex32(0xC2))
HINT_KEY = HintKey(hex32(0x5EC))
CONTEXT = hex32(0xE)
TABLES = (Table.of([7, 3]),)
LEASE_S, HOLD_S, TIMEOUT_S, HEARTBEAT_S = 2.0, 60.0, 30.0, 0.4
FENCE_TOKEN = FenceToken(b"\1" * 16)
SLICES = (KVSlice("layer.0", 0, 2, 0),)
LAYERS = (messages.LayerHeads(layer="layer.0", first=0, end=2),)
SUMS = b"\5" * 8
P1, P2 = RequestId("p1"), RequestId("p2")
D1, D2 = RequestId("d1"), RequestId("d2")


def at(rank: int) -> Endpoint:
    return Endpoint(f"tcp://10.0.0.1:{7000 + rank}")


RANK_0 = at(0)


EXPORT: Final = messages.Export(
    host=f"{Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()} pid:[1]",
    pid=1,
    started=2,
    allocations=(messages.Allocation(address=4096, length=64, handle=b"handle"),),
    proof=messages.Proof(address=4096, value=b"0123456789abcdef"),
)


# --- messages

OF_RANK: Final[dict[str, Any]] = {"incarnation": RANK_LIFE, "reader": READER}
OF_CLAIM: Final[dict[str, Any]] = {**OF_RANK, "nonce": NONCE, "claim": CLAIM}


def describe(incarnation: Incarnation = ENGINE_LIFE) -> messages.Describe:
    return messages.Describe(incarnation=incarnation, engine=PREFILL)


def refusal(reason: str, incarnation: Incarnation = ENGINE_LIFE) -> messages.Refusal:
    return messages.Refusal(incarnation=incarnation, engine=PREFILL, reason=reason)


def find(hashes: Sequence[bytes], first_block: int = 0, weights: str = "") -> messages.Find:
    """A question to the engine "owner" for the blocks with these hashes."""
    return messages.Find(
        incarnation=ANY_INCARNATION,
        engine=EngineId("owner"),
        nonce=new_nonce(),
        weights=weights,
        first_block=first_block,
        hashes=tuple(hashes),
    )


ask = _filled(messages.Ask, **OF_CLAIM, context=CONTEXT, number=1, readers=(Rank(0),))
grant = _filled(
    messages.Grant, **OF_CLAIM, lease_s=LEASE_S, tables=TABLES, slot=3, fence_token=FENCE_TOKEN
)
deny = _filled(messages.Deny, **OF_CLAIM)
recall = _filled(messages.Recall, **OF_CLAIM)
release = _filled(messages.Release, **OF_CLAIM, complete=True)
digest_request = _filled(messages.DigestRequest, **OF_CLAIM, end=7, slices=SLICES)
digest_reply = _filled(messages.DigestReply, **OF_CLAIM, rows=SUMS * 4, columns=SUMS)


def pending(state: messages.PrefillState, **changed: Any) -> messages.Pending:
    return messages.Pending(**{**OF_CLAIM, "state": state, **changed})


def pack_request(chunk: int = 0, **changed: Any) -> messages.PackRequest:
    tokens = {"begin": 0, "end": 7, "layers": LAYERS}
    values = {"number": 2, "chunk": chunk, **tokens, "holds": (chunk,)}
    return messages.PackRequest(**{**OF_CLAIM, **values, **changed})


def pack_reply(chunk: int = 0, **changed: Any) -> messages.PackReply:
    return messages.PackReply(**{**OF_CLAIM, "chunk": chunk, "slot": 0, **changed})


def renew(number: int, *claims: Claim, reading: int = 0, **changed: Any) -> messages.Heartbeat:
    values = {"number": number, "claims": claims, "num_reading": reading}
    return messages.Heartbeat(**{**OF_RANK, **values, **changed})


def teller(rank: int = 0, engine: str = DECODE) -> Reader:
    """A rank that sends hints; each has an incarnation of its own."""
    return reader(rank, engine, Incarnation(hex32(0xD00 + rank)))


_OF_LOAD: Final[dict[str, Any]] = {
    "incarnation": ANY_INCARNATION,
    "hint_key": HINT_KEY,
    "reader": teller(),
}


ready = _filled(messages.Ready, **_OF_LOAD)
landed = _filled(messages.Landed, **_OF_LOAD)


def renewed(*lost: Claim, **changed: Any) -> messages.HeartbeatReply:
    return messages.HeartbeatReply(**{**OF_RANK, "number": 2, "lost": lost, **changed})


def layout() -> CacheLayout:
    region = Region("layer.0", 4096, 64, 32, 8, 0, 2, (Part(0, 4), Part(4, 4)))
    return CacheLayout((Group(4, 10, 1, (region,)),), "DRAM", 0, (Span(4096, 1024),))


def rank_description(rank: int = 0, incarnation: Incarnation = RANK_LIFE) -> RankDescription:
    return RankDescription(
        incarnation=incarnation,
        endpoint=at(rank),
        agent=b"agent",
        slots=messages.Slots(address=65536, count=64),
        layout=layout(),
    )


def description(
    ranks: int = 1,
    incarnation: Incarnation = ENGINE_LIFE,
    rank_incarnation: Incarnation = RANK_LIFE,
) -> Description:
    return Description(
        incarnation=incarnation,
        engine=PREFILL,
        model={"dtype": "bfloat16"},
        shape=ParallelShape(ranks, 1),
        ranks=tuple(rank_description(rank, rank_incarnation) for rank in range(ranks)),
    )


# --- commands


ticket = _filled(
    Ticket,
    engine=PREFILL,
    host="10.0.0.1",
    port=5600,
    incarnation=ENGINE_LIFE,
    nonce=NONCE,
    num_tokens=8,
    context=CONTEXT,
    epoch=0,
    weights="",
)


def ticket_for(token_ids: Sequence[int], nonce: Nonce = NONCE, **changed: Any) -> Ticket:
    """A valid ticket for a prompt, of an engine on this machine; `num_tokens` cuts the prompt."""
    num_tokens = changed.get("num_tokens", len(token_ids))
    context = context_hash(nonce, token_ids[:num_tokens], [])
    values = {"nonce": nonce, "num_tokens": num_tokens, "context": context}
    return ticket(**{"host": "127.0.0.1", **values, **changed})


def written_out(table: Table) -> list[int]:
    """All entries, from that of the prompt's first token on."""
    present: list[int] = table.block_ids.tolist()
    return [ABSENT] * table.first + present


def opened(params: object) -> Ticket:
    """A ticket of this version; only its form is checked."""
    return SealedTicket.parse(params).open()


prepare_offer = _filled(
    events.PrepareOffer, nonce=NONCE, request=P1, context=CONTEXT, num_tokens=8, tables=TABLES
)


def publish_offer(nonce: Nonce = NONCE, request: RequestId = P1) -> events.PublishOffer:
    return events.PublishOffer(nonce, request)


def prepare_load(
    request: RequestId = D1, claim: Claim = CLAIM, **changed: Any
) -> events.PrepareLoad:
    return events.PrepareLoad(request, ticket(**changed), claim, HINT_KEY)


def start_load(
    request: RequestId = D1, num_tokens: int = 7, *, verify: bool = False
) -> events.StartLoad:
    return events.StartLoad(request, 0, num_tokens, (Table.of([2, 5]),), verify)


def cancel_load(request: RequestId = D1) -> events.CancelLoad:
    return events.CancelLoad(request)


# --- events

ROUTE = b"route"


def asked(message: ToPrefill, route: bytes = ROUTE) -> events.Asked:
    return events.Asked(route, message)


def replied(message: Message, route: bytes = ROUTE) -> events.Reply:
    return events.Reply(route, message)


def answered(message: Answer, endpoint: Endpoint = RANK_0) -> events.Answered:
    return events.Answered(endpoint, message)


def routes(*remote_ranks: int, readers: Sequence[int] = (0,)) -> tuple[Route, ...]:
    return tuple(Route(Rank(remote), tuple(map(Rank, readers))) for remote in remote_ranks)


def fits(ranks: int = 1, readers: Sequence[int] = (0,)) -> events.PeerFits:
    """All ranks are read, by these readers."""
    return events.PeerFits(PEER, description(ranks), routes(*range(ranks), readers=readers))


def lost(endpoint: Endpoint = RANK_0, reason: str = "closed") -> events.EndpointLost:
    return events.EndpointLost(endpoint, reason)


def read_done(
    rank: int = 0, request: RequestId = D1, fence_token: bytes = FENCE_TOKEN, **measured: Any
) -> events.ReadDone:
    token = FenceToken(fence_token)
    return events.ReadDone(request, Rank(rank), fence_token=token, **measured)


def read_failed(reason: str = "reset", rank: int = 0, request: RequestId = D1) -> events.ReadFailed:
    return events.ReadFailed(request, Rank(rank), reason)


def digest_compared(
    difference: str | None = None, *, rank: int = 0, claim: Claim = CLAIM
) -> events.DigestCompared:
    return events.DigestCompared(D1, Rank(rank), claim, difference)


def no_record(_transition: Transition) -> None:
    """For tests that do not look at transitions."""
