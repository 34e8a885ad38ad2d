"""Prefill and decode engines, the network between them, and their faults.

Engines that prefill are named `p`, `p1`, `p2`, those that only decode `d0`, `d1`.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final

from harness.local.engine import HAS_CONVERSATIONS, HAS_STAGED
from harness.local.memory_control import MemoryNetwork
from nixl_kv.config import ANYWHERE, OFF, ON, Config
from nixl_kv.ids import Nonce, Rank, RequestId
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.reading.paths import allocate
from sim.cache import KnownPrompt, RankCache
from sim.content import FoundRun
from sim.engine import Engine
from sim.liars import MOST_NAMES, Liar
from sim.planes import Process, SimFabric, SimSlots
from sim.rank import Environment, RankLife, Seat
from sim.vllm import IssuedTicket, Request
from support.stepped import Clock

FIRST_PORT: Final = 7000
PREFILL: Final = "p"
"""The first engine that prefills; every world has it."""


@dataclass(frozen=True)
class Shape:
    """How many ranks and engines; `heads` are the model's, which more ranks than heads copy.

    The first numbers are those of a world's ranks and engines, the others of what else differs.
    """

    prefill: int = 1  # ranks of each engine that prefills
    decode: int = 1  # ranks of each that only decodes
    engines: int = 1  # that only decode
    prefills: int = 1  # engines that prefill
    both: bool = False  # these decode too, as vLLM's kv_both
    blocks: int = 11  # of each rank's cache
    heads: int = 2
    slots: int = 3
    pairs: int = 2  # fence slots of offers that are still computed
    content: int = 0  # fence slots of offers of cached blocks; 0: engines read none
    share: float = 0.5
    tcp: bool = False
    verify: float = 0.0  # share of the loads whose bytes are compared
    window: int = 0  # tokens that a layer looks at; 0 for all
    rate: float = 0.0  # bytes a second of each link; 0: the schedule lands them
    apart: bool = False  # peers are prepared when the schedule says so, not at once
    fast: bool = False  # decode's schedulers hear of loads between their steps
    late: bool = False  # prefill's steps may still write after their output
    staged: int = 0  # bytes of each rank's staging memory; 0: reads are direct
    gentle: bool = False  # every load has to be good
    patience: float = 0.0  # seconds that prefill believes a reader; 0: as long as READING_S

    def __str__(self) -> str:
        """The first line of a schedule: what differs from the plainest world."""
        values, plain = asdict(self), asdict(Shape())
        return " ".join(
            ["world", *(f"{n}={float(v):g}" for n, v in values.items() if v != plain[n])]
        )

    @classmethod
    def parse(cls, line: str) -> "Shape":
        """The same, back."""
        word, *pairs = line.split()
        if word != "world":
            raise ValueError(f"a schedule starts with 'world', not with {line!r}")
        kinds = {name: type(value) for name, value in asdict(cls()).items()}
        given = dict(pair.split("=") for pair in pairs)
        return cls(**{name: kinds[name](float(value)) for name, value in given.items()})

    @property
    def prefill_names(self) -> list[str]:
        return [PREFILL, *(f"{PREFILL}{number}" for number in range(1, self.prefills))]

    @property
    def names(self) -> list[str]:
        return self.prefill_names + [f"d{number}" for number in range(self.engines)]

    @property
    def decode_names(self) -> list[str]:
        return self.names[0 if self.both else self.prefills :]

    def config(self) -> Config:
        return Config(
            insecure=True,
            peers=ANYWHERE,
            offer_ttl_s=3.0,
            lease_s=1.0,
            request_timeout_s=4.0,
            offer_share=self.share,
            verify=self.verify,
            path="staged" if self.staged and HAS_STAGED else "direct",
            conversations=ON if self.content else OFF,
        )


class World(Environment):
    def __init__(self, shape: Shape) -> None:
        self.shape, clock = shape, Clock()
        fabric = SimFabric(clock, tcp=shape.tcp, rate=shape.rate)
        network = MemoryNetwork(held=True)
        config, pairs = shape.config(), shape.pairs
        super().__init__(
            *(clock, network, fabric, config),
            window=shape.window,
            num_pair_slots=pairs,
            num_content_slots=shape.content if HAS_CONVERSATIONS else 0,
            takes_hints=shape.fast,
            writes_late=shape.late,
        )
        # What the clients and the router know, through all lives of the engines.
        self.tickets: list[IssuedTicket] = []
        self.arriving: list[tuple[str, Request, Ticket]] = []  # requests with pair tickets
        self.pairs: dict[Nonce, RequestId] = {}  # prefill's requests, by their pair tickets
        self.found: dict[Nonce, FoundRun] = {}  # cached blocks, by the offers of them
        self.num_prompts = self.num_tokens = self.num_requests = 0  # tokens of all prompts
        self.num_used = 0  # how often a ticket was used
        self.is_damage_due = False  # for the next piece of a load that is verified
        self.damaged: set[RequestId] = set()
        self.liars: list[Liar] = []
        self.told: deque[str] = deque(maxlen=MOST_NAMES)  # names that decode has told a peer
        self._seats = {
            name: self._make_seats(name, FIRST_PORT + 100 * number)
            for number, name in enumerate(shape.names)
        }
        self.engines: dict[str, Engine | None] = dict.fromkeys(self._seats)
        for name in self._seats:
            self.start(name)

    def start(self, name: str) -> None:
        """An engine starts where it had another life, if it has none."""
        if self.engines[name] is not None:
            return
        seats = self._seats[name]
        self.engines[name] = engine = Engine(seats, self)
        seats[0].process.is_up = True
        engine.scheduler.prefill.tickets = self.tickets

    def kill(self, name: str) -> None:
        engine, process = self.engines[name], self._seats[name][0].process
        if engine is None:
            return
        self.engines[name] = None
        process.is_up = False
        self.fabric.leave(process)
        engine.leave()

    def prefills(self) -> list[Engine]:
        return [engine for engine in self.alive() if engine.is_prefill]

    def decodes(self) -> list[Engine]:
        return [engine for engine in self.alive() if engine.is_decode]

    def alive(self) -> list[Engine]:
        return [engine for engine in self.engines.values() if engine is not None]

    def advance(self, seconds: float) -> None:
        """Time passes. The loops of ranks that do not hang could run all the while."""
        self.clock.now += seconds
        for engine in self.alive():
            engine.serve_directory()
            for rank in engine.ranks:
                if not rank.is_stopped:
                    rank.clock.keep_up()
                # vLLM steps all the while, even if nothing can be computed.
                if not (engine.is_resting or engine.is_stopped):
                    rank.engine.note_step(has_computed=True)

    def ranks(self) -> Iterator[RankLife]:
        for engine in self.alive():
            yield from engine.ranks

    def join_at_once(self) -> None:
        """All ranks join their peers, unless the schedule says when."""
        for rank in [] if self.shape.apart else self.ranks():
            if not rank.is_stopped:
                rank.join_at_once()

    def new_prompt(self, length: int) -> KnownPrompt:
        self.num_prompts += 1
        self.num_tokens += length
        return KnownPrompt(self.num_prompts, length, self.shape.heads)

    def new_request_id(self, engine: str) -> RequestId:
        self.num_requests += 1
        return RequestId(f"{engine}-{self.num_requests}")

    def _make_slots(self) -> SimSlots:
        others = self.num_pair_slots, self.num_content_slots
        return SimSlots(self.shape.slots + sum(others), *others)

    def _make_seats(self, name: str, port: int) -> list[Seat]:
        process, shape = Process(name), self.shape
        is_prefill = name in shape.prefill_names
        num_ranks = shape.prefill if is_prefill else shape.decode
        each = max(1, shape.heads // num_ranks)
        return [
            Seat(
                process=process,
                number=Rank(number),
                cache=RankCache(
                    shape.blocks, range(first := number * each % shape.heads, first + each)
                ),
                slots=self._make_slots(),
                staging=allocate(max(1, shape.staged)),
                port=port + number,
                is_prefill=is_prefill,
                is_decode=shape.both or not is_prefill,
            )
            for number in range(num_ranks)
        ]
