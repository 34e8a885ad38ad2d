"""One prefill engine and one or two decode engines, the network between them, and their faults."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nixl_kv.connector.prefill import Address
from nixl_kv.connector.publisher import Publisher
from nixl_kv.geometry.ranks import Shape as Parallel
from nixl_kv.ids import EngineId
from nixl_kv.protocol import messages
from nixl_kv.transport.slots import SlotPage
from sim.book import Book
from sim.decode_side import DecodeSide
from sim.engine import Engine
from sim.fabric import Place, SimFabric
from sim.memory import Heads, Memory, Prompt
from sim.net import Network
from sim.prefill_side import PrefillSide
from sim.rank import MODEL, RankLife, Seat, Surroundings, Times
from sim.seams import Clock
from sim.sides import Side

HOST, PORT = "10.0.0.1", 5600
HOME = f"tcp://{HOST}:{PORT}"
BLOCKS = 11
PREFILL = "p"


@dataclass(frozen=True)
class Shape:
    """How many ranks and engines; `heads` are the model's, which more ranks than heads copy."""

    prefill: int = 1
    decode: int = 1
    engines: int = 1
    heads: int = 2
    slots: int = 3
    share: float = 0.5
    tcp: bool = False
    verify: float = 0.0  # share of the loads whose bytes are compared

    def __str__(self) -> str:
        """Short, for tables."""
        more = [f"{self.engines} engines"] if self.engines > 1 else []
        more += ["copies"] if self.heads < self.prefill else []
        more += ["tcp"] if self.tcp else []
        more += ["verify"] if self.verify else []
        return " ".join([f"{self.prefill}x{self.decode}", *more])


@dataclass
class Router:
    """What the clients and the router know."""

    tickets: list[tuple[dict[str, Any], Prompt]] = field(default_factory=list)
    prompts: int = 0
    requests: int = 0
    asked: int = 0  # how often a ticket was used


@dataclass
class Damage:
    """Whether the next piece of a load that is verified is damaged, and the loads that were."""

    due: bool = False
    requests: set[str] = field(default_factory=set)


class World:
    """See the module's head."""

    def __init__(self, shape: Shape, clock: Clock) -> None:
        """Begin with all engines alive, and nothing to do."""
        self.shape = shape
        fabric = SimFabric(tcp=shape.tcp)
        self.around = Surroundings(clock, Network(), fabric, Times())
        self.router = Router()
        self.seats = {PREFILL: self._seats(PREFILL, shape.prefill)}
        for number in range(shape.engines):
            self.seats[f"d{number}"] = self._seats(f"d{number}", shape.decode)
        self.damage = Damage()
        self.engines: dict[str, Engine | None] = dict.fromkeys(self.seats)
        for name in self.seats:
            self.start(name)

    @property
    def clock(self) -> Clock:
        """Of all."""
        return self.around.clock

    @property
    def network(self) -> Network:
        """Between all."""
        return self.around.network

    @property
    def fabric(self) -> SimFabric:
        """Between all."""
        return self.around.fabric

    def start(self, name: str) -> None:
        """An engine begins a life where it had another, if it has none."""
        if self.engines[name] is not None:
            return
        seats = self.seats[name]
        engine = Engine(seats, self.around, self._make_side)
        self.engines[name] = engine
        seats[0].engine.up = True
        if name == PREFILL:
            self._listen(engine)

    def kill(self, name: str) -> None:
        """An engine dies with all of its ranks."""
        engine = self.engines[name]
        if engine is None:
            return
        self.engines[name] = None
        self.seats[name][0].engine.up = False
        self.fabric.leave(self.seats[name][0].engine)
        endpoints = {seat.endpoint for seat in engine.seats if seat.endpoint}
        if name == PREFILL:
            endpoints.add(HOME)
        self.network.breaks(endpoints)
        for endpoint in endpoints:
            del self.network.listeners[endpoint]
        for rank in engine.ranks:
            self.network.leave(rank.control)

    def alive(self) -> list[Engine]:
        """All engines that live."""
        return [engine for engine in self.engines.values() if engine is not None]

    def ranks(self) -> Iterator[RankLife]:
        """All ranks that live."""
        for engine in self.alive():
            yield from engine.ranks

    def prompt(self, length: int) -> Prompt:
        """One that nobody has seen."""
        self.router.prompts += 1
        return Prompt(self.router.prompts, length, self.shape.heads)

    def request_id(self, engine: str) -> str:
        """One that was never used."""
        self.router.requests += 1
        return f"{engine}-{self.router.requests}"

    def _seats(self, name: str, ranks: int) -> list[Seat]:
        place, shape = Place(name), self.shape
        each = max(1, shape.heads // ranks)
        seats = []
        for rank in range(ranks):
            memory = Memory(BLOCKS, Heads(rank * each % shape.heads, each))
            endpoint = f"tcp://{HOST}:{7000 + rank}" if name == PREFILL else ""
            seats.append(Seat(place, rank, memory, SlotPage(shape.slots), endpoint))
        return seats

    def _make_side(self, book: Book, engine: Engine) -> Side:
        memories = [seat.memory for seat in engine.seats]
        if engine.name != PREFILL:
            return DecodeSide(book, memories, self.clock, verify=self.shape.verify)
        address = Address(engine.name, engine.life, HOST, PORT)
        side = PrefillSide(book, memories, address, share=self.shape.share)
        side.tickets = self.router.tickets
        return side

    def _listen(self, engine: Engine) -> None:
        """The ranks' sockets, and the thread that describes the engine."""
        for rank in engine.ranks:
            self.network.listeners[rank.seat.endpoint] = rank.control
        publisher = Publisher.__new__(Publisher)  # without its socket and its thread
        publisher.publish(
            messages.Description(
                messages.WIRE_VERSION,
                engine.life,
                EngineId(engine.name),
                MODEL,
                Parallel(len(engine.ranks), 1),
                tuple(rank.described for rank in engine.ranks),
            )
        )

        def desk(payload: bytes) -> bytes | None:
            if all(rank.stopped for rank in engine.ranks):
                return None
            asked = messages.decode_to_engine(payload)
            return messages.encode(publisher._decide(asked))  # noqa: SLF001 - all that it does

        self.network.listeners[HOME] = desk
