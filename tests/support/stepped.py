"""Transfer engines without threads and without time: a test makes their turns, one after the other.

All planes are in memory. `turn` of a `Stepped` never waits; it adds each time that it would wait to
`waits`.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeAlias

from harness.local.caches import Cache, Sizes
from harness.local.engine import MODEL, features_with
from harness.local.memory import Fabric, MemoryTransport
from harness.local.memory_control import MemoryControl, MemoryNetwork
from nixl_kv.config import Config
from nixl_kv.engine.clock import LoopClock
from nixl_kv.engine.directory import DirectoryServer, describe_engine
from nixl_kv.engine.engine import HOLD_S, RankSpec, TransferEngine
from nixl_kv.engine.loop import Loop
from nixl_kv.engine.trust import Trust
from nixl_kv.feature import BuildFeature, RankSetup
from nixl_kv.geometry.layout import Table
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.ids import EngineId, Nonce, Rank, RequestId, new_claim
from nixl_kv.keys import parse_key
from nixl_kv.protocol import events
from nixl_kv.protocol.load import Load
from nixl_kv.protocol.messages import Description
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.reading.paths import allocate
from nixl_kv.transport.base import Received
from support.records import CONTEXT, hex32

HOST = "127.0.0.1"
RING_SLOTS = 4
STAGING_BYTES = 2 * RING_SLOTS * 1024
"""For a rank that both packs and reads packed KV: slots of 1 KiB."""


class Clock:
    """Monotonic seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Background(Executor):
    """Runs its tasks when a test says so: at once, by default."""

    def __init__(self, *, is_held: bool = False) -> None:
        self.is_held = is_held
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.append((future, lambda: fn(*args, **kwargs)))
        if not self.is_held:
            self.work()
        return future

    def work(self, count: int | None = None, failure: Exception | None = None) -> None:
        """Do all of it, or only the first jobs; or let them fail."""
        while self._jobs and count != 0:
            count = None if count is None else count - 1
            future, job = self._jobs.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            if failure is not None:
                future.set_exception(failure)
                continue
            try:
                future.set_result(job())
            except Exception as error:  # noqa: BLE001 - as any executor
                future.set_exception(error)


def rank_setup(config: Config, **changed: Any) -> RankSetup:
    """The setup of a path: a rank of both roles over a cache in host memory."""
    fields: dict[str, Any] = {"layout": Cache(Sizes()).layout()}
    fields |= {"is_prefill": True, "is_decode": True, **changed}
    return RankSetup(
        config=config,
        wake=lambda: None,
        watch=lambda _descriptor: None,
        background=Background(),
        counts=events.Counts(),
        clock=lambda: 0.0,
        **fields,
    )


class StepControl(MemoryControl):
    """Never waits, and keeps how long it was to wait."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        super().__init__(network, name)
        self.waits: list[float | None] = []

    def poll(self, timeout_s: float | None) -> list[Received]:
        self.waits.append(timeout_s)
        return super().poll(0)


class Stepped:
    """One rank, with its engine's directory."""

    def __init__(
        self, name: str, world: "World", *, roles: str = "prefill and decode", seed: int = 0
    ) -> None:
        self.world = world
        self.cache = Cache(world.sizes).fill(seed)
        self.background, self.copying = Background(), Background()
        self.control = StepControl(world.network, name)
        self.results: deque[events.Result] = deque()
        spec = RankSpec(
            engine=EngineId(name),
            rank=Rank(0),
            layout=self.cache.layout(),
            model=MODEL,
            config=world.config,
            host=HOST,
            is_prefill="prefill" in roles,
            is_decode="decode" in roles,
            make_transport=lambda: MemoryTransport(world.fabric),
            make_control=lambda: self.control,
            check_ticket=world.trust.check,
            num_slots=64,
            hold_s=world.hold_s,
            make_background=lambda _count: self.background,
            features=(
                *features_with(
                    make_threads=lambda: self.copying,
                    make_memory=lambda _length: allocate(STAGING_BYTES),
                    num_slots=RING_SLOTS,
                ),
                *world.features,
            ),
            make_clock=lambda: LoopClock(world.clock, world.max_gap_s, lambda: 0.0),
        )
        self.engine = TransferEngine(spec)
        self.loop: Loop = self.engine.start_stepped(self.results)
        self.parts = self.loop.parts
        control = MemoryControl(world.network, f"{name}'s")
        self.directory = DirectoryServer(control, HOST, 0, seal=world.trust.seal)
        self.directory.publish(self.description)

    @property
    def description(self) -> Description:
        """The description of its engine."""
        rank = self.parts.description
        return describe_engine(self.engine.spec.engine, MODEL, ParallelShape(1, 1), [rank])

    def turn(self) -> float | None:
        """One turn; how long it was to wait."""
        self.loop.turn()
        self.directory.turn(0)
        return self.control.waits[-1]

    def submit(self, *commands: events.Command) -> None:
        """Hand commands over."""
        self.engine.submit(commands)

    def ends(self) -> list[events.LoadEnded | events.OfferEnded]:
        """The ends of loads and offers that were not popped before."""
        results = self.engine.pop_results()
        ends = events.LoadEnded | events.OfferEnded
        return [result for result in results if isinstance(result, ends)]

    def ended_load(self) -> events.LoadEnded:
        """The one end that there is."""
        (end,) = self.ends()
        assert isinstance(end, events.LoadEnded)
        return end

    def failed_load(self) -> events.Failure:
        """Why that load failed."""
        failure = self.ended_load().failure
        assert failure is not None
        return failure

    def ended_offer(self) -> tuple[str, events.OfferEnd]:
        """The one end that there is: of which request, and how."""
        (end,) = self.ends()
        assert isinstance(end, events.OfferEnded)
        return end.request, end.end

    def prepare_offer(self, number: int, table: Sequence[int], num_tokens: int) -> Nonce:
        """The first half of an offer, for request `p<number>`."""
        nonce = Nonce(hex32(number))
        tables = (Table.of(table),)
        request = RequestId(f"p{number}")
        self.submit(events.PrepareOffer(nonce, request, CONTEXT, num_tokens, tables))
        return nonce

    def publish_offer(self, number: int) -> None:
        """The second half."""
        self.submit(events.PublishOffer(Nonce(hex32(number)), RequestId(f"p{number}")))

    def offer(self, number: int, table: Sequence[int], num_tokens: int) -> Ticket:
        """Both halves; its ticket."""
        self.prepare_offer(number, table, num_tokens)
        self.publish_offer(number)
        return self.ticket(number, num_tokens)

    def ticket(self, number: int, num_tokens: int) -> Ticket:
        """The ticket of this offer."""
        return Ticket(
            engine=self.engine.spec.engine,
            host=HOST,
            port=self.directory.port,
            incarnation=self.description.incarnation,
            nonce=Nonce(hex32(number)),
            num_tokens=num_tokens,
            context=CONTEXT,
        )

    def load(self, number: int) -> Load | None:
        """The load of request `d<number>` in its machine."""
        return self.parts.decode._by_request.get(RequestId(f"d{number}"))

    def prepare_load(self, number: int, ticket: Ticket) -> None:
        """Request `d<number>` has arrived."""
        self.submit(events.PrepareLoad(RequestId(f"d{number}"), ticket, new_claim()))

    def start_load(
        self, number: int, table: Sequence[int], num_tokens: int, **verify: bool
    ) -> None:
        """It has blocks."""
        request, tables = RequestId(f"d{number}"), (Table.of(table),)
        self.submit(events.StartLoad(request, 0, num_tokens, tables, **verify))


class World:
    """A prefill and a decode rank."""

    def __init__(
        self,
        sizes: Sizes,
        config: Config,
        roles: tuple[str, str],
        *,
        hold_s: float = HOLD_S,
        max_gap_s: float = math.inf,  # see `LoopClock`: loops run whenever time has passed
        features: tuple[BuildFeature, ...] = (),  # in addition to those of this tree
    ) -> None:
        self.sizes, self.config, self.hold_s = sizes, config, hold_s
        self.max_gap_s, self.features = max_gap_s, features
        self.trust = Trust(parse_key("5e" * 32, "a key"), config.allowed_hosts, 5.0)
        self.clock, self.fabric, self.network = Clock(), Fabric(), MemoryNetwork()
        self.prefill = Stepped("prefill", self, roles=roles[0], seed=1)
        self.decode = Stepped("decode", self, roles=roles[1], seed=2)

    def run(self, turns: int = 12) -> None:
        """Some turns of both, in turn; no time passes."""
        for _ in range(turns):
            self.decode.turn()
            self.prefill.turn()

    def until(self, condition: Callable[[], object], turns: int = 100) -> None:
        """Turns of both until a condition holds."""
        for _ in range(turns):
            if condition():
                return
            self.run(1)
        raise AssertionError(f"not within {turns} turns")

    def close(self) -> None:
        """Release all, and check both machines."""
        for rank in (self.prefill, self.decode):
            rank.parts.decode.check()
            rank.parts.prefill.check()
            rank.loop.close()
            rank.directory.stop()


MakeWorld: TypeAlias = Callable[..., World]
"""The fixture that makes them: of a configuration, and the roles of both ranks."""
