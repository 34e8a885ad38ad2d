"""The decode machine under commands, answers and ends of reads in any order that is possible."""

import itertools
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.ids import Claim, Rank
from nixl_kv.protocol import events
from nixl_kv.protocol.decode.machine import DecodeMachine
from nixl_kv.protocol.messages import Ask, Describe, DigestRequest, Renew
from support.records import (
    CLAIM,
    D1,
    GENERATION,
    HOME,
    READER,
    RENEW_S,
    RIVAL,
    SLICES,
    TIMEOUT_S,
    answered,
    at,
    cancel_load,
    deny,
    description,
    digest_reply,
    grant,
    hex32,
    joined,
    lost,
    no_record,
    prepare_load,
    read_done,
    read_failed,
    refusal,
    renewed,
    slot_read,
    start_load,
)

RANKS = (Rank(0), Rank(1))
TROUBLE: dict[str, Callable[[Claim, Rank], events.DecodeEvent]] = {
    "cancelled": lambda _claim, _rank: cancel_load(),
    "granted again": lambda claim, rank: answered(grant(claim=claim), at(rank)),
    "a grant for nobody": lambda _claim, rank: answered(grant(claim=RIVAL), at(rank)),
    "a digest again": lambda claim, rank: answered(digest_reply(claim=claim), at(rank)),
    "denied": lambda claim, rank: answered(deny(claim=claim), at(rank)),
    "the lease is lost": lambda claim, rank: answered(renewed(claim), at(rank)),
    "a rank is lost": lambda _claim, rank: lost(at(rank)),
    "the engine is lost": lambda _claim, _rank: lost(HOME),
    "another life": lambda _claim, _rank: answered(refusal("another life"), HOME),
}


class World:
    """One request is loaded from two ranks, again and again: each attempt has a claim of its own.

    What the data plane does is possible: reads end that were started, once. Each step takes a
    number, by which it chooses.
    """

    def __init__(self) -> None:
        self.machine = DecodeMachine(
            READER, no_record, timeout_s=TIMEOUT_S, renew_interval_s=RENEW_S
        )
        self.now = 100.0
        self.attempts = itertools.count(1)
        self.claim = CLAIM
        self.sent: list[events.Send] = []
        self.fits = True  # whether a peer that joins can be used
        self.readable: set[events.PeerKey] = set()
        self.reads: dict[Rank, events.StartRead | events.ReadSlot] = {}
        self.abandoned: set[Rank] = set()
        self.comparisons: list[events.CompareDigest] = []
        self.valid: set[Rank] = set()
        self.equal: set[Rank] = set()
        self.start: events.StartLoad | None = None
        self.reports = 0

    @property
    def is_prepared(self) -> bool:
        return self.machine.loads.get(D1) is not None

    def handle(self, event: events.DecodeEvent) -> None:
        """Some actions are carried out at once, and what follows from them is handled next."""
        follow_up: list[events.DecodeEvent] = []
        for action in self.machine.handle(event, self.now):
            match action:
                case events.Send():
                    self.sent.append(action)
                case events.JoinPeer():
                    follow_up.append(self.join(action.peer))
                case events.DropPeer():
                    assert not self.reads, "no read of a peer that is dropped"
                    self.readable.discard(action.peer)
                case events.StartRead() | events.ReadSlot():
                    follow_up += self.start_read(action)
                case events.AbandonRead():
                    assert action.rank in self.reads, "only a read under way is abandoned"
                    assert action.rank not in self.abandoned, "once"
                    self.abandoned.add(action.rank)
                case events.CompareDigest():
                    self.comparisons.append(action)
                case events.LoadEnded():
                    self.on_report(action)
        for following in follow_up:
            self.handle(following)

    def join(self, peer: events.PeerKey) -> events.DecodeEvent:
        if not self.fits:
            return events.PeerRefused(peer, "another dtype")
        self.readable.add(peer)
        return joined(2)

    def start_read(self, action: events.StartRead | events.ReadSlot) -> list[events.DecodeEvent]:
        """The data plane says at once which slices it reads of what is to be verified."""
        assert action.peer in self.readable
        assert action.rank not in self.reads, "one read at a time from each rank"
        self.reads[action.rank] = action
        is_verified = isinstance(action, events.StartRead) and action.load.verify
        return [events.ReadStarted(D1, action.rank, SLICES)] if is_verified else []

    def on_report(self, report: events.LoadEnded) -> None:
        assert self.start is not None
        assert not self.reads, "no read may write any more"
        self.reports += 1
        assert self.reports == 1, "a load is reported once"
        if report.failure is None:
            assert self.valid == set(RANKS)
            assert not self.start.verify or self.equal == set(RANKS)
            assert report.verified == self.start.verify

    # --- what a caller and a prefill engine do when all is well

    def prepare_or_start(self, pick: int) -> None:
        if not self.is_prepared:
            self.claim = Claim(hex32(next(self.attempts)))
            self.start, self.reports = None, 0
            self.valid, self.equal, self.abandoned = set(), set(), set()
            self.handle(prepare_load(D1, self.claim))
        elif self.start is None:
            self.start = start_load(verify=pick % 2 == 0)
            self.handle(self.start)

    def end_well(self, pick: int) -> None:
        """Something that was begun ends as it should."""
        match self.choose_pending(pick):
            case events.Send() as send:
                self.sent.remove(send)
                self.answer(send)
            case events.StartRead() as action:
                del self.reads[action.rank]
                self.handle(read_done(action.rank))
            case events.ReadSlot() as action:
                self.valid.add(action.rank)
                self.end_slot_read(action.rank, GENERATION)
            case events.CompareDigest() as action:
                if action.digest_reply.claim == self.claim:
                    self.equal.add(action.rank)
                self.end_comparison(action, None)

    def choose_pending(self, pick: int) -> events.Action | None:
        pending = [*self.sent, *self.reads.values(), *self.comparisons]
        return pending[pick % len(pending)] if pending else None

    def answer(self, send: events.Send) -> None:
        match send.message:
            case Describe():
                self.handle(answered(description(2), send.endpoint))
            case Ask() as ask:
                self.handle(answered(grant(claim=ask.claim), send.endpoint))
            case DigestRequest() as request:
                self.handle(answered(digest_reply(claim=request.claim), send.endpoint))
            case Renew():
                self.handle(answered(renewed(), send.endpoint))

    def end_slot_read(self, rank: Rank, generation: bytes) -> None:
        del self.reads[rank]
        self.handle(slot_read(generation, rank))

    def end_comparison(self, action: events.CompareDigest, difference: str | None) -> None:
        self.comparisons.remove(action)
        claim = action.digest_reply.claim
        self.handle(events.DigestCompared(D1, action.rank, claim, difference))

    # --- what else may happen

    def cause_trouble(self, pick: int) -> None:
        names = sorted(TROUBLE)
        rank = RANKS[pick // len(names) % len(RANKS)]
        self.handle(TROUBLE[names[pick % len(names)]](self.claim, rank))

    def end_badly(self, pick: int) -> None:
        match self.choose_pending(pick):
            case events.Send() as lost_message:
                self.sent.remove(lost_message)
            case events.StartRead() as action:
                del self.reads[action.rank]
                self.handle(read_failed(rank=action.rank))
            case events.ReadSlot() as action:
                self.end_slot_read(action.rank, bytes(16))
            case events.CompareDigest() as action:
                self.end_comparison(action, "K of head 0")

    def change_layout(self, pick: int) -> None:
        """Peers that join do not fit, or fit again."""
        self.fits = pick % 4 > 0

    def wait(self, pick: int) -> None:
        waits_s = (0.1, 0.1, 0.1, 0.5, 1.0, 2.5, TIMEOUT_S)
        self.now += waits_s[pick % len(waits_s)]
        self.handle(events.Tick())

    def check(self) -> None:
        self.machine.loads.validate()
        if self.start is not None:
            assert self.is_prepared != (self.reports == 1), "it is held, or was reported"

    def end(self) -> None:
        """The caller and prefill leave, all reads end: nothing is left."""
        self.handle(cancel_load())
        for rank in sorted(self.reads):
            del self.reads[rank]
            self.handle(read_failed(rank=rank))
        for endpoint in (HOME, *map(at, RANKS)):
            self.handle(lost(endpoint))
        for _ in range(2):
            self.now += TIMEOUT_S
            self.handle(events.Tick())
        self.check()
        assert not self.is_prepared
        assert not self.machine.has_timers


STEPS = (
    *[World.prepare_or_start] * 4,
    *[World.end_well] * 16,
    *[World.wait] * 2,
    World.cause_trouble,
    World.end_badly,
    World.change_layout,
)
"""The frequent ones more often."""


@given(day=st.binary(min_size=100, max_size=300))
def test_in_any_order_each_started_load_is_reported_once_and_no_wrong_byte_is_good(
    day: bytes,
) -> None:
    """Each pair of bytes is a step, and what it chooses."""
    world = World()
    for which, pick in zip(day[::2], day[1::2], strict=False):
        STEPS[which % len(STEPS)](world, pick)
        world.check()
    world.end()
