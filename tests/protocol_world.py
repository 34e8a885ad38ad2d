"""Prefill and decode machines in a world of our own making: no threads, no sockets, no clock.

The world carries messages, moves bytes and keeps the books that vLLM would keep; each of its steps
is one thing that may happen at any moment. After every step it checks what must hold:

    a slot       is written only when clear, and cleared once
    blocks       are freed once per rank, and only when their slot does not stand any more
    a load       is reported once per rank, only if commanded, and only when nothing can write
    a good load  has exactly the bytes of its own prompt, from every rank
    a proof      is made of blocks that were held until it left
    a verified   load is good only if its bytes were compared with every rank's proof, and equal;
                 only these reads are ever damaged on their way
    a read       is served to its end, where no message is lost and no lease runs out (`gentle`)

A block's content is the nonce of the prompt whose KV it holds; freed blocks are used again at once.
"""

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protocol_records import (
    CONTEXT,
    EXCERPTS,
    HOME,
    PREFILL,
    at,
    decode,
    description,
    refusal,
    routes,
    ticket,
)

from nixl_kv.ids import (
    Claim,
    Generation,
    Incarnation,
    Nonce,
    Rank,
    RequestId,
    engine_incarnation,
    new_claim,
    new_incarnation,
    new_nonce,
)
from nixl_kv.protocol import events, messages, proofs
from nixl_kv.protocol.messages import Describe, Message, Reader, encode
from nixl_kv.protocol.offers import Offers
from nixl_kv.protocol.receiver import Receiver
from nixl_kv.protocol.requests import Requests
from nixl_kv.protocol.sender import Sender
from nixl_kv.protocol.ticket import Ticket

OFFER_TTL_S, LEASE_S, TIMEOUT_S, RENEW_S = 3.0, 1.0, 4.0, 0.2
TOKENS = 8
CLEAR = Generation(bytes(16))
USED_AGAIN = "used again"
DAMAGED = "damaged"


@dataclass
class PrefillRank:
    """One life of one prefill rank: its machine, its memory, and what vLLM does with it."""

    rank: Rank
    num_slots: int
    life: Incarnation = field(default_factory=new_incarnation)
    dead: bool = False
    memory: list[str] = field(default_factory=list)
    tables: dict[RequestId, list[int]] = field(default_factory=dict)
    grants: dict[RequestId, messages.Grant] = field(default_factory=dict)
    commands: list[events.PrefillCommand] = field(default_factory=list)
    sent: Counter[RequestId] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.slots = [CLEAR] * self.num_slots
        offers = Offers(num_slots=self.num_slots, offer_ttl_s=OFFER_TTL_S, lease_s=LEASE_S)
        self.sender = Sender(self.life, offers)

    def allocate(self, request: RequestId, nonce: Nonce) -> bytes:
        """Two blocks that hold the prompt's KV, as a block table."""
        self.free(request)
        self.tables[request] = [len(self.memory), len(self.memory) + 1]
        self.memory += [nonce, nonce]
        return struct.pack("<2i", *self.tables[request])

    def free(self, request: RequestId) -> None:
        for block in self.tables.pop(request, ()):
            self.memory[block] = USED_AGAIN


@dataclass
class Offered:
    """A prompt on prefill: its ticket is out or not, or it was withdrawn."""

    request: RequestId
    ticket: Ticket
    out: bool = False


@dataclass
class Wanted:
    """A request on decode, as its scheduler sees it."""

    request: RequestId
    ticket: Ticket
    claim: Claim
    loading: bool = False
    dropped: bool = False
    verify: bool = False


@dataclass
class Read:
    """A read under way; `slot` is that of a check, None for data."""

    request: RequestId
    source: PrefillRank
    blocks: Sequence[int]
    slot: int | None = None
    verify: bool = False
    landed: list[str | Generation] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.landed) == (len(self.blocks) if self.slot is None else 1)

    def of(self, rank: PrefillRank, request: RequestId) -> bool:
        """Whether it reads the blocks of that request."""
        return self.source is rank and self.blocks == tuple(rank.tables[request])

    def land(self) -> None:
        """One more piece of what is read arrives."""
        if self.source.dead or self.complete:
            return
        if self.slot is None:
            self.landed.append(self.source.memory[self.blocks[len(self.landed)]])
        else:
            self.landed.append(self.source.slots[self.slot])


@dataclass
class Digestion:
    """A proof under way: what it has seen of the blocks, one after the other, each at its time."""

    rank: PrefillRank
    packet: "Packet"
    prove: messages.Prove
    blocks: Sequence[int]
    seen: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.seen) == len(self.blocks)

    def look(self) -> None:
        """At one more block."""
        if not self.complete:
            self.seen.append(self.rank.memory[self.blocks[len(self.seen)]])


@dataclass
class DecodeRank:
    """One decode rank: its machine, its reads, and what it has reported."""

    reader: Reader
    joined: dict[events.PeerKey, dict[Rank, PrefillRank]] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    bytes_of: dict[tuple[RequestId, Rank], list[str | Generation]] = field(default_factory=dict)
    commands: list[events.DecodeCommand] = field(default_factory=list)
    loaded: dict[RequestId, events.Loaded] = field(default_factory=dict)
    abandoned: set[tuple[RequestId, Rank]] = field(default_factory=set)
    comparing: list[proofs.Verify] = field(default_factory=list)
    equal: set[tuple[RequestId, Rank]] = field(default_factory=set)

    def __post_init__(self) -> None:
        requests = Requests(self.reader, timeout_s=TIMEOUT_S, renew_interval_s=RENEW_S)
        self.receiver = Receiver(self.reader, requests)


@dataclass(frozen=True, eq=False)
class Packet:
    """A message under way between a decode rank and an endpoint, in either direction."""

    decode: DecodeRank
    endpoint: str
    payload: bytes
    answer: bool

    @property
    def link(self) -> tuple[int, str, bool]:
        return id(self.decode), self.endpoint, self.answer


class World:
    """One prefill engine that may restart, and some decode engines that read from it."""

    def __init__(
        self, *, sources: int = 1, readers: int = 1, engines: int = 2, slots: int = 3
    ) -> None:
        self.now = 1000.0
        self.gentle = False
        self.num_sources, self.num_slots = sources, slots
        self.prefill: list[PrefillRank] = []
        self.computed = 0
        self.offered: list[Offered] = []
        self.announced: list[events.Offer] = []
        self.packets: list[Packet] = []
        self.digestions: list[Digestion] = []
        self.refuses = False
        self.restart()
        self.engines = [
            [DecodeRank(Reader(f"decode{engine}", f"{engine:032x}", r)) for r in range(readers)]
            for engine in range(engines)
        ]
        self.wanted: list[list[Wanted]] = [[] for _ in self.engines]

    @property
    def decode(self) -> list[DecodeRank]:
        return [rank for engine in self.engines for rank in engine]

    @property
    def life(self) -> Incarnation:
        return engine_incarnation(rank.life for rank in self.prefill)

    # --- what vLLM does on prefill

    def compute(self) -> Offered:
        """A prompt is about to be computed."""
        self.computed += 1
        request, nonce = RequestId(f"p{self.computed}"), new_nonce()
        made = ticket(incarnation=self.life, nonce=nonce, num_tokens=TOKENS)
        self.offered.append(Offered(request, made))
        self._prepare(self.offered[-1])
        return self.offered[-1]

    def preempt(self, pick: int) -> None:
        """A prompt without a ticket loses its blocks and is computed again."""
        if self._hidden():
            self._prepare(one(self._hidden(), pick))

    def publish(self, pick: int) -> None:
        """A prompt is computed: its blocks are pinned and its ticket leaves."""
        if self._hidden():
            offered = one(self._hidden(), pick)
            offered.out = True
            self.announced.append(events.Offer(Nonce(offered.ticket.nonce), offered.request))

    def announce(self) -> None:
        """The step after that one tells the ranks; who has a ticket may have been quicker."""
        for rank in self.prefill:
            rank.commands += self.announced
        self.announced = []

    def withdraw(self, pick: int) -> None:
        """A prompt ends without a ticket."""
        if self._hidden():
            offered = one(self._hidden(), pick)
            self.offered.remove(offered)
            for rank in self.prefill:
                rank.commands.append(events.Withdraw(Nonce(offered.ticket.nonce)))
                rank.free(offered.request)

    def restart(self) -> None:
        """The prefill engine dies, and comes up again at the same addresses."""
        for rank in self.prefill:
            rank.dead = True
        self.prefill = [
            PrefillRank(Rank(number), self.num_slots) for number in range(self.num_sources)
        ]
        self.offered = [offered for offered in self.offered if offered.out]
        self.announced = []

    def _hidden(self) -> list[Offered]:
        return [offered for offered in self.offered if not offered.out]

    def _prepare(self, offered: Offered) -> None:
        nonce = Nonce(offered.ticket.nonce)
        for rank in self.prefill:
            tables = (rank.allocate(offered.request, nonce),)
            rank.commands.append(events.Prepare(nonce, offered.request, CONTEXT, TOKENS, tables))

    # --- what vLLM does on decode

    def want(self, pick: int) -> None:
        """A request arrives somewhere with a ticket of late, which may have been used."""
        out = [offered for offered in self.offered if offered.out][-3:]
        if out:
            self.fetch(pick % len(self.engines), one(out, pick // len(self.engines)).ticket)

    def want_new(self, pick: int) -> None:
        """A request arrives with a ticket that nobody has used."""
        used = {wanted.ticket.nonce for of_engine in self.wanted for wanted in of_engine}
        fresh = [o.ticket for o in self.offered if o.out and o.ticket.nonce not in used]
        if fresh:
            self.fetch(pick % len(self.engines), fresh[0])

    def fetch(self, engine: int, used: Ticket) -> Wanted:
        wanted = self.wanted[engine]
        wanted.append(Wanted(RequestId(f"d{len(wanted)}"), used, new_claim()))
        self._command(engine, events.Fetch(wanted[-1].request, used, wanted[-1].claim))
        return wanted[-1]

    def allocate(self, pick: int) -> None:
        """A request gets blocks."""
        waiting = [
            (engine, wanted)
            for engine, of_engine in enumerate(self.wanted)
            for wanted in of_engine
            if not wanted.loading and not wanted.dropped
        ]
        if waiting:
            self.load(*one(waiting, pick), verify=pick // 16 % 2 == 1)

    def load(self, engine: int, wanted: Wanted, *, verify: bool = False) -> None:
        wanted.loading, wanted.verify = True, verify
        self._command(engine, events.Load(wanted.request, 0, TOKENS, (bytes(8),), verify))

    def abort(self, pick: int) -> None:
        """A request is over, whatever it was about to do."""
        live = [
            (engine, wanted)
            for engine, of_engine in enumerate(self.wanted)
            for wanted in of_engine
            if not wanted.dropped
        ]
        if live:
            engine, wanted = one(live, pick)
            wanted.dropped = True
            self._command(engine, events.Drop(wanted.request))

    def _command(self, engine: int, command: events.DecodeCommand) -> None:
        for rank in self.engines[engine]:
            rank.commands.append(command)

    # --- what the transfer threads do

    def obey(self, pick: int) -> None:
        """A rank takes the next command of its vLLM."""
        if not self._commanded():
            return
        rank = one(self._commanded(), pick)
        if isinstance(rank, PrefillRank):
            self._serve(rank, rank.commands.pop(0))
        else:
            self._act(rank, rank.receiver.handle(rank.commands.pop(0), self.now))

    def _commanded(self) -> list[DecodeRank | PrefillRank]:
        return [rank for rank in (*self.decode, *self.prefill) if rank.commands]

    def tick(self, pick: int) -> None:
        """A rank looks at its clock."""
        rank = one([*self.decode, *self.prefill], pick)
        if isinstance(rank, PrefillRank):
            self._serve(rank, events.Tick())
        else:
            self._act(rank, rank.receiver.handle(events.Tick(), self.now))

    def wait(self, pick: int) -> None:
        self.now += one((0.01, 0.05, 0.1, 0.3, 0.6, 1.1, 3.5, 8.0), pick)

    # --- what the network does

    def deliver(self, pick: int) -> None:
        """A message arrives, in any order."""
        if self.packets:
            self._arrive(self.packets.pop(pick % len(self.packets)))

    def deliver_in_order(self, pick: int) -> None:
        """A message arrives after all that were sent before it on its connection."""
        if self.packets:
            chosen = one(self.packets, pick)
            on_link = [p for p in self.packets if p.link == chosen.link]
            self.packets.remove(on_link[0])
            self._arrive(on_link[0])

    def lose(self, pick: int) -> None:
        if self.packets:
            self.packets.pop(pick % len(self.packets))

    def repeat(self, pick: int) -> None:
        """A message arrives, and once more later."""
        if self.packets:
            self._arrive(one(self.packets, pick))

    def cut(self, pick: int) -> None:
        """A connection breaks; what was under way on it is lost."""
        rank = one(self.decode, pick)
        endpoint = one((HOME, *(at(rank) for rank in range(self.num_sources))), pick // 4)
        self._disconnect(rank, endpoint)
        lost = events.EndpointLost(endpoint, "cut")
        self._act(rank, rank.receiver.handle(lost, self.now))

    def refuse(self) -> None:
        """The next peer that describes itself does not fit."""
        self.refuses = True

    def _disconnect(self, rank: DecodeRank, endpoint: str) -> None:
        self.packets = [
            packet
            for packet in self.packets
            if packet.decode is not rank or packet.endpoint != endpoint
        ]

    def _arrive(self, packet: Packet) -> None:
        message = decode(packet.payload)
        rank = packet.decode
        if packet.answer:
            self._act(rank, rank.receiver.answered(message, packet.endpoint, self.now))
        elif packet.endpoint == HOME:
            self._answer(packet, self._describe(message))
        else:
            self._asked(packet, message)

    def _asked(self, packet: Packet, message: Message) -> None:
        """Commands go first: who asks has a ticket, which left after the command."""
        (rank,) = (rank for rank in self.prefill if at(rank.rank) == packet.endpoint)
        while rank.commands:
            self._serve(rank, rank.commands.pop(0))
        for answer in self._serve(rank, message, packet):
            self._answer(packet, answer)

    def _answer(self, packet: Packet, message: Message) -> None:
        self.packets.append(Packet(packet.decode, packet.endpoint, encode(message), answer=True))

    def _describe(self, message: Describe) -> Message:
        if message.incarnation != self.life:
            return refusal("another life", message.incarnation)
        told = description(self.num_sources, self.life)
        ranks = tuple(
            messages.RankDescription(mine.life, rank.endpoint, rank.agent, rank.slots, rank.layout)
            for mine, rank in zip(self.prefill, told.ranks, strict=True)
        )
        return messages.Description(
            messages.WIRE_VERSION, told.incarnation, PREFILL, {}, told.shape, ranks
        )

    # --- what prefill's machine decides

    def _serve(
        self,
        rank: PrefillRank,
        event: events.PrefillCommand | events.Tick | proofs.Digested | Message,
        packet: Packet | None = None,
    ) -> list[Message]:
        answers: list[Message] = []
        for action in rank.sender.handle(event, self.now):
            match action:
                case events.WriteSlot():
                    assert rank.slots[action.slot] == CLEAR
                    rank.slots[action.slot] = action.generation
                case events.ClearSlot():
                    assert rank.slots[action.slot] != CLEAR
                    rank.slots[action.slot] = CLEAR
                case events.Reply():
                    self._note_grant(rank, action.message)
                    self._note_proof(rank, action.message)
                    answers.append(action.message)
                case events.Sent():
                    self._free(rank, action.request)
                case proofs.Digest():
                    assert packet is not None
                    self._digest(rank, packet, action)
                case _:
                    assert isinstance(action, events.Denied)
        rank.sender.offers.validate()
        return answers

    def _note_grant(self, rank: PrefillRank, message: Message) -> None:
        """A grant stands, and names the blocks that hold the prompt's KV now."""
        if not isinstance(message, messages.Grant):
            return
        (offered,) = (one for one in self.offered if one.ticket.nonce == message.nonce)
        assert offered.out
        assert rank.slots[message.slot] == message.generation
        assert message.tables == (struct.pack("<2i", *rank.tables[offered.request]),)
        rank.grants[offered.request] = message

    def _digest(self, rank: PrefillRank, packet: Packet, action: proofs.Digest) -> None:
        """One that is asked for again while it is made is made once."""
        blocks = struct.unpack("<2i", action.tables[0])
        if not [d for d in self.digestions if d.rank is rank and d.prove == action.prove]:
            self.digestions.append(Digestion(rank, packet, action.prove, blocks))

    def _note_proof(self, rank: PrefillRank, message: Message) -> None:
        """Its blocks are held, and it has seen nothing else in them."""
        if not isinstance(message, messages.Proof):
            return
        (offered,) = (one for one in self.offered if one.ticket.nonce == message.nonce)
        granted = rank.grants[offered.request]
        assert rank.slots[granted.slot] == granted.generation
        assert message.rows == _sums([offered.ticket.nonce] * 2)

    def _free(self, rank: PrefillRank, request: RequestId) -> None:
        """Clear before free: whoever finds the generation standing later reads no block of it."""
        rank.sent[request] += 1
        assert rank.sent[request] == 1
        if self.gentle:
            assert not [read for _, read in self._reads() if read.of(rank, request)]
        granted = rank.grants.get(request)
        assert granted is None or rank.slots[granted.slot] != granted.generation
        rank.free(request)

    # --- what decode's machine decides

    def _act(self, rank: DecodeRank, actions: list[events.Action]) -> None:
        follow_up = [event for action in actions for event in self._execute(rank, action)]
        rank.receiver.requests.validate()
        for event in follow_up:
            self._act(rank, rank.receiver.handle(event, self.now))

    def _execute(self, rank: DecodeRank, action: events.Action) -> list[events.DataEvent]:
        """Do it; returns what follows at once."""
        match action:
            case events.Send():
                payload = encode(action.message)
                self.packets.append(Packet(rank, action.endpoint, payload, answer=False))
            case events.Disconnect():
                self._disconnect(rank, action.endpoint)
            case events.AddPeer():
                return [self._join(rank, action)]
            case events.DropPeer():
                gone = rank.joined.pop(action.peer).values()
                assert not [read for read in rank.reads if read.source in gone]
            case events.Loaded():
                self._report(rank, action)
            case events.CheckSlot() | events.StartRead():
                return self._begin(rank, action)
            case proofs.Verify():
                rank.comparing.append(action)
            case _:
                rank.abandoned.add((action.request, action.source))
        return []

    def _join(self, rank: DecodeRank, action: events.AddPeer) -> events.DataEvent:
        assert action.peer not in rank.joined
        if self.refuses or action.peer.incarnation != self.life:
            self.refuses = False
            return events.PeerRefused(action.peer, "does not fit")
        rank.joined[action.peer] = {source.rank: source for source in self.prefill}
        readers = range(len(self.engines[0]))
        return events.PeerJoined(
            action.peer, action.description, routes(*range(self.num_sources), readers=readers)
        )

    def _begin(
        self, rank: DecodeRank, action: events.CheckSlot | events.StartRead
    ) -> list[events.DataEvent]:
        """A rank may grant when another one of its engine has gone, and the engine with it."""
        if isinstance(action, events.CheckSlot):
            source = rank.joined[action.peer][action.source]
            rank.reads.append(Read(action.request, source, (), action.slot))
            return []
        request = action.load.request
        assert request not in rank.loaded
        assert (request, action.source) not in rank.bytes_of
        if action.peer not in rank.joined:
            return [events.ReadFailed(request, action.source, "gone")]
        blocks = struct.unpack("<2i", action.grant.tables[0])
        source, verify = rank.joined[action.peer][action.source], action.load.verify
        rank.reads.append(Read(request, source, blocks, verify=verify))
        return [proofs.ReadBegun(request, action.source, EXCERPTS)] if verify else []

    def _report(self, rank: DecodeRank, loaded: events.Loaded) -> None:
        (engine,) = (n for n, of_engine in enumerate(self.engines) if rank in of_engine)
        (wanted,) = (one for one in self.wanted[engine] if one.request == loaded.request)
        assert wanted.loading
        assert loaded.request not in rank.loaded
        assert loaded.num_tokens == TOKENS
        assert not [read for read in rank.reads if read.request == loaded.request]
        rank.loaded[loaded.request] = loaded
        assert loaded.verified == (wanted.verify and loaded.failure is None)
        if loaded.verified:
            sources = range(self.num_sources)
            assert {(loaded.request, Rank(source)) for source in sources} <= rank.equal
        if loaded.failure is None:
            got = [rank.bytes_of[loaded.request, Rank(n)] for n in range(self.num_sources)]
            assert got == [[wanted.ticket.nonce] * 2] * self.num_sources

    # --- what the data plane does

    def land(self, pick: int) -> None:
        """A piece of a read arrives."""
        if self._reads():
            one(self._reads(), pick)[1].land()

    def damage(self, pick: int) -> None:
        """What has landed is not what was sent; only of reads that are verified."""
        landed = [r for _, r in self._reads() if r.verify and r.slot is None and r.landed]
        if landed:
            one(landed, pick).landed[0] = DAMAGED

    def digest(self, pick: int) -> None:
        """Prefill looks at one more block for a proof, or is through with it."""
        if not self.digestions:
            return
        digestion = one(self.digestions, pick)
        if not digestion.complete:
            digestion.look()
            return
        self.digestions.remove(digestion)
        if digestion.rank.dead:
            return
        sums = _sums(digestion.seen)
        for answer in self._serve(digestion.rank, proofs.Digested(digestion.prove, sums, sums)):
            self._answer(digestion.packet, answer)

    def compare(self, pick: int) -> None:
        """Decode has compared what landed with a proof."""
        comparing = [(rank, verify) for rank in self.decode for verify in rank.comparing]
        if not comparing:
            return
        rank, verify = one(comparing, pick)
        rank.comparing.remove(verify)
        key = verify.request, verify.source
        equal = _sums(rank.bytes_of[key]) == verify.proof.rows
        if equal:
            rank.equal.add(key)
        difference = None if equal else "a block"
        event = proofs.Verified(*key, Claim(verify.proof.claim), difference)
        self._act(rank, rank.receiver.handle(event, self.now))

    def finish(self, pick: int) -> None:
        """A rank learns that a read has ended."""
        complete = [(rank, read) for rank, read in self._reads() if read.complete]
        if complete:
            self._end(*one(complete, pick))

    def break_off(self, pick: int) -> None:
        """A read ends in an error."""
        if self._reads():
            self._fail(*one(self._reads(), pick), "broken")

    def stop(self, pick: int) -> None:
        """A read that was abandoned is stopped."""
        reads = self._reads()
        stuck = [(d, r) for d, r in reads if (r.request, r.source.rank) in d.abandoned]
        if stuck:
            self._fail(*one(stuck, pick), "stopped")

    def _fail(self, rank: DecodeRank, read: Read, reason: str) -> None:
        rank.reads.remove(read)
        failed = events.ReadFailed(read.request, read.source.rank, reason)
        self._act(rank, rank.receiver.handle(failed, self.now))

    def _reads(self) -> list[tuple[DecodeRank, Read]]:
        return [(rank, read) for rank in self.decode for read in rank.reads]

    def _end(self, rank: DecodeRank, read: Read) -> None:
        rank.reads.remove(read)
        request, source = read.request, read.source.rank
        if read.slot is None:
            rank.bytes_of[request, source] = read.landed
            event: events.DataEvent = events.ReadDone(request, source)
        else:
            event = events.SlotRead(request, source, read.landed[0])
        self._act(rank, rank.receiver.handle(event, self.now))

    # --- quiet

    def calm(self, seconds: float = 0.1) -> None:
        """All that is to be done is done, in order, and then time passes."""
        self.announce()
        while self._commanded() or self.packets or self._reads() or self._digests():
            while self._commanded():
                self.obey(0)
            while self.packets:
                self.deliver(0)
            for rank, read in self._reads():
                self._complete(rank, read)
            while self._digests():
                self.digest(0)
                self.compare(0)
        self.now += seconds
        for pick in range(len(self.decode) + len(self.prefill)):
            self.tick(pick)

    def _digests(self) -> bool:
        """Whether one is under way, on either side."""
        return bool(self.digestions or [rank for rank in self.decode if rank.comparing])

    def _complete(self, rank: DecodeRank, read: Read) -> None:
        if read.source.dead:
            self.break_off(self._reads().index((rank, read)))
            return
        while not read.complete:
            read.land()
        self._end(rank, read)

    def end(self) -> None:
        """Everybody leaves, time passes, and nothing may be left."""
        while self._hidden():
            self.publish(0)
        for engine, of_engine in enumerate(self.wanted):
            for wanted in of_engine:
                if not wanted.loading and not wanted.dropped:
                    wanted.dropped = True
                    self._command(engine, events.Drop(wanted.request))
        for _ in range(40):
            self.calm(0.5)
        assert self.packets == []
        self._check_prefill()
        self._check_decode()

    def _check_prefill(self) -> None:
        for rank in self.prefill:
            assert repr(rank.sender.offers) == "<Offers: none>"
            assert rank.slots == [CLEAR] * rank.num_slots
            assert rank.tables == {}
            mine = [o.request for o in self.offered if o.ticket.incarnation == self.life]
            assert rank.sent == Counter(mine)

    def _check_decode(self) -> None:
        for engine, of_engine in enumerate(self.engines):
            loads = {wanted.request for wanted in self.wanted[engine] if wanted.loading}
            for rank in of_engine:
                assert len(rank.receiver.requests) == 0
                assert not rank.receiver.busy
                assert rank.loaded.keys() == loads

    def outcomes(self, *, dropped: bool = True) -> list[str | None]:
        """The reasons of all loads, None for the good ones."""
        return [
            reason(rank.loaded[wanted.request])
            for engine, of_engine in enumerate(self.engines)
            for rank in of_engine
            for wanted in self.wanted[engine]
            if wanted.request in rank.loaded and (dropped or not wanted.dropped)
        ]


def _sums(contents: Sequence[str | Generation]) -> bytes:
    """In place of a digest: the contents themselves."""
    return repr(contents).encode()


def reason(loaded: events.Loaded) -> str | None:
    return None if loaded.failure is None else str(loaded.failure)


def one(items: Sequence[object], pick: int) -> object:
    return items[pick % len(items)]


Step = Callable[[World, int], None]

COMMON: tuple[Step, ...] = (
    *[lambda world, _: world.compute()] * 3,
    *[World.publish] * 5,
    *[lambda world, _: world.announce()] * 2,
    World.preempt,
    World.withdraw,
    *[World.allocate] * 3,
    *[World.obey] * 10,
    *[World.land] * 5,
    *[World.finish] * 4,
    *[World.digest] * 3,
    *[World.compare] * 2,
    *[World.tick] * 3,
    World.stop,
)
"""What happens every day, the frequent more often."""

GOOD_DAY: tuple[Step, ...] = (*COMMON, *[World.want_new] * 3, *[World.deliver_in_order] * 10)

BUSY_DAY: tuple[Step, ...] = (*GOOD_DAY, *[World.abort] * 3)
"""Requests end before they are loaded, and while they are."""

LATE_DAY: tuple[Step, ...] = (*GOOD_DAY, *[World.wait] * 4, *[World.lose] * 2)
"""Leases run out while data is read."""

RARELY = 32

BAD_DAY: tuple[Step, ...] = (
    *COMMON,
    *[World.want] * 3,
    *[World.deliver] * 10,
    *[World.wait] * 2,
    *[World.abort] * 2,
    World.lose,
    *[World.repeat] * 2,
    World.break_off,
    World.damage,
    lambda world, pick: pick < RARELY and world.cut(pick),
    lambda world, pick: pick < RARELY and world.refuse(),
    lambda world, pick: pick < RARELY and world.restart(),
)
"""Everything, in any order."""
