"""One prefill engine and one or two decode engines, the network between them, and their faults."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from lab.sim.cache import Heads, KnownPrompt, RankCache
from lab.sim.data_plane import Process, SimFabric, SimSlots
from lab.sim.engine import Engine
from lab.sim.rank import Environment, RankLife, Seat
from lab.sim.repeatable import Clock
from lab.sim.schedulers import IssuedTicket, PrefillEngineScheduler
from nixl_kv.config import ANYWHERE, Config
from nixl_kv.ids import Rank, RequestId
from nixl_kv.transport.memory_control import MemoryNetwork

NUM_BLOCKS: Final = 11
FIRST_PORT: Final = 7000
PREFILL: Final = "p"


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
    window: int = 0  # tokens that a layer looks at; 0 for all

    def __str__(self) -> str:
        """Short, for tables."""
        more = [f"{self.engines} engines"] if self.engines > 1 else []
        more += ["copies"] if self.heads < self.prefill else []
        more += ["tcp"] if self.tcp else []
        more += ["window"] if self.window else []
        more += ["verify"] if self.verify else []
        return " ".join([f"{self.prefill}x{self.decode}", *more])

    def config(self) -> Config:
        """Of all engines: short times, and no key."""
        return Config(
            insecure=True,
            peers=ANYWHERE,
            offer_ttl_s=3.0,
            lease_s=1.0,
            request_timeout_s=4.0,
            offer_share=self.share,
            verify=self.verify,
        )


@dataclass
class Router:
    """What the clients and the router know, through all lives of the engines."""

    tickets: list[IssuedTicket] = field(default_factory=list)
    num_prompts: int = 0
    num_requests: int = 0
    num_used: int = 0  # how often a ticket was used


@dataclass
class Damage:
    """Whether the next piece of a load that is verified is damaged, and the loads that were."""

    is_due: bool = False
    requests: set[RequestId] = field(default_factory=set)


class World:
    """See the module's head."""

    def __init__(self, shape: Shape) -> None:
        """Start with all engines alive, and nothing to do."""
        self.shape = shape
        self.clock = Clock()
        self.network = MemoryNetwork(held=True)
        self.fabric = SimFabric(tcp=shape.tcp)
        self.environment = Environment(
            self.clock, self.network, self.fabric, shape.config(), shape.window
        )
        self.router = Router()
        self.damage = Damage()
        self._seats = {PREFILL: self._make_seats(PREFILL, shape.prefill, FIRST_PORT)}
        for number in range(shape.engines):
            name, port = f"d{number}", FIRST_PORT + 100 * (number + 1)
            self._seats[name] = self._make_seats(name, shape.decode, port)
        self.engines: dict[str, Engine | None] = dict.fromkeys(self._seats)
        for name in self._seats:
            self.start(name)

    def start(self, name: str) -> None:
        """An engine starts where it had another life, if it has none."""
        if self.engines[name] is not None:
            return
        seats = self._seats[name]
        self.engines[name] = engine = Engine(seats, self.environment)
        seats[0].process.is_up = True
        if isinstance(engine.scheduler, PrefillEngineScheduler):
            engine.scheduler.tickets = self.router.tickets

    def kill(self, name: str) -> None:
        """An engine dies with all of its ranks."""
        engine, process = self.engines[name], self._seats[name][0].process
        if engine is None:
            return
        self.engines[name] = None
        process.is_up = False
        self.fabric.leave(process)
        engine.leave()

    def alive(self) -> list[Engine]:
        """All engines that live."""
        return [engine for engine in self.engines.values() if engine is not None]

    def ranks(self) -> Iterator[RankLife]:
        """All ranks that live."""
        for engine in self.alive():
            yield from engine.ranks

    def new_prompt(self, length: int) -> KnownPrompt:
        """One that nobody has seen."""
        self.router.num_prompts += 1
        return KnownPrompt(self.router.num_prompts, length, self.shape.heads)

    def new_request_id(self, engine: str) -> RequestId:
        """One that was never used."""
        self.router.num_requests += 1
        return RequestId(f"{engine}-{self.router.num_requests}")

    def _make_seats(self, name: str, num_ranks: int, port: int) -> list[Seat]:
        process, shape = Process(name), self.shape
        each = max(1, shape.heads // num_ranks)
        return [
            Seat(
                process=process,
                number=Rank(number),
                cache=RankCache(NUM_BLOCKS, Heads(number * each % shape.heads, each)),
                slots=SimSlots(shape.slots),
                port=port + number,
                is_prefill=name == PREFILL,
            )
            for number in range(num_ranks)
        ]
