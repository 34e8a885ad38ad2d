"""One life of one rank: the real transfer engine, and what its worker does with it."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from harness.local.engine import features_with
from harness.local.machines import by_name
from harness.local.memory_control import MemoryNetwork
from nixl_kv.config import Config
from nixl_kv.engine.clock import LoopClock
from nixl_kv.engine.engine import STOP_TIMEOUT_S, RankSpec, TransferEngine, UnwrittenOffers
from nixl_kv.engine.loop import Parts
from nixl_kv.errors import TransportError
from nixl_kv.ids import EngineId, Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.reading.paths import Buffer
from sim.cache import RankCache
from sim.planes import (
    HOST,
    Faults,
    InjectedError,
    Process,
    Read,
    SimControl,
    SimFabric,
    SimSlots,
    SimTransport,
)
from sim.repeatable import Violation
from support.stepped import Background, Clock

FAILED: Final = TransportError("the schedule let it fail")
RING_SLOTS: Final = 4
# Short, so that schedules reach their ends.
HOLD_S: Final = 2.0
WAIT_FOR_PREFILL_S: Final = 30.0
WORK_S: Final = 0.5
"""How long it takes to create or destroy an agent, while a rank stops."""
MODEL: Final = {"served_model_name": "tiny", "num_hidden_layers": "1"}


class _Results(deque[events.Result]):
    def __init__(self, on_result: Callable[[events.Result], None]) -> None:
        super().__init__()
        self._on_result = on_result

    def append(self, result: events.Result, /) -> None:
        super().append(result)
        self._on_result(result)


@dataclass
class Environment:
    clock: Clock
    network: MemoryNetwork
    fabric: SimFabric
    config: Config
    window: int = 0
    num_pair_slots: int = 0
    num_content_slots: int = 0  # of offers of cached blocks; 0: engines read none
    takes_hints: bool = False  # decode's schedulers hear of loads between their steps
    writes_late: bool = False  # prefill's steps may still write after their output, on a stream
    has_pack_failed: bool = False  # decode then reads directly what prefill would have packed
    observer: Any = field(init=False)  # `Invariants`


@dataclass(frozen=True)
class Seat:
    process: Process
    number: Rank
    cache: RankCache
    slots: SimSlots
    staging: Buffer
    port: int
    is_prefill: bool
    is_decode: bool

    @property
    def name(self) -> str:
        return f"{self.process.name}.{self.number}"


class Stream:
    """A GPU's stream: it does the writes of steps in their order, some time later."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self._num_ended = 0

    def __len__(self) -> int:
        return len(self._work)

    def add(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def end(self, *, keep: int = 0) -> None:
        """End the work on the stream, except the last `keep` items."""
        while len(self._work) > max(0, keep):
            self._work.popleft()()
            self._num_ended += 1

    def record_event(self) -> Callable[[], bool] | None:
        """Whether the work that is on the stream now has ended; None if the stream is empty."""
        last = self._num_ended + len(self._work)
        return (lambda: self._num_ended >= last) if self._work else None


class RankLife:
    def __init__(self, seat: Seat, environment: Environment) -> None:
        self.seat = seat
        self._environment = environment
        self.is_stopped = False
        self.has_died = False  # the loop restarts instead of its next turn
        self.has_turned = False  # since its machines were checked
        self.loads: dict[RequestId, events.StartLoad] = {}  # all that were started
        self.ready: set[RequestId] = set()  # early loads that were reported as ready
        self.granted: set[RequestId] = set()  # offers that were reported as claimed
        self.released: set[RequestId] = set()  # pairs whose offers decode needs no longer
        self.stream = Stream()
        self.epoch = 0  # of its prefix cache, as of the step that it has begun
        self._unwritten = UnwrittenOffers(self.stream.record_event)
        self.counts: Counter[str] = Counter()
        self.faults = Faults()
        self.background, self.joining, self.copying = (Background(is_held=True) for _ in range(3))
        self.control = SimControl(seat.name, seat.port, environment.network, self.faults)
        self.control.clock = environment.clock
        self.clock = LoopClock(environment.clock, work=lambda: 0.0)
        self.control.on_reply = lambda payload: environment.observer.on_reply(self, payload)
        self.control.on_send = lambda at, payload: environment.observer.on_send(self, at, payload)
        seat.slots.start_life(self.faults)
        self.engine = TransferEngine(
            RankSpec(
                engine=EngineId(seat.process.name),
                rank=seat.number,
                layout=seat.cache.layout_with(environment.window),
                model=MODEL,
                config=environment.config,
                host=HOST,
                is_prefill=seat.is_prefill or environment.num_content_slots > 0,
                is_decode=seat.is_decode,
                make_transport=partial(SimTransport, environment.fabric, seat.process, self.faults),
                make_control=lambda: self.control,
                make_background=lambda n: self.background if n == 1 else self.joining,
                make_slots=lambda _count: seat.slots,
                num_slots=seat.slots.count - seat.slots.num_of_steps,
                hold_s=HOLD_S,
                wait_for_prefill_s=WAIT_FOR_PREFILL_S,
                features=features_with(
                    make_threads=lambda: self.copying,
                    make_memory=lambda _length: seat.staging,
                    num_slots=RING_SLOTS,
                    num_early_slots=environment.num_pair_slots,
                    num_content_slots=environment.num_content_slots,
                ),
                make_clock=lambda: self.clock,
            )
        )
        self.loop = self.engine.start_stepped(
            results=_Results(lambda result: environment.observer.on_result(self, result))
        )
        self._guard()

    def __repr__(self) -> str:
        return f"<RankLife {self.seat.name}>"

    @property
    def parts(self) -> Parts:
        return self.loop.parts

    @property
    def has_work(self) -> bool:
        """Whether a turn would do something, besides looking at reads and the time."""
        commands = self.engine._commands
        work = any(map(len, self.parts.workers))
        return bool(commands or self.control.inbox or self.has_died or work)

    def turn(self) -> None:
        """One turn of the loop; or its restart, if the last one died."""
        step, self.has_died = (self.loop.restart if self.has_died else self.loop.turn), False
        self.has_turned = True
        try:
            step()
        except InjectedError:
            self.has_died = True
        except Violation:
            raise
        except Exception as error:
            detail = f"{self.seat.name}: {type(error).__name__}: {error}"
            raise Violation("thread died", detail) from error

    @property
    def num_waiting(self) -> int:
        """How much there is to do beside the thread: with agents one thing, and all copies."""
        return bool(self.background) + len(self.copying)

    def work(self, *, fail: bool = False) -> None:
        """Make or destroy an agent, or else copy between the cache and the ring."""
        self._environment.has_pack_failed |= fail and not self.background
        (self.background or self.copying).work(1, FAILED if fail else None)

    def join(self, *, fail: bool = False) -> None:
        """Prepare a peer, or on prefill plan how to pack for one."""
        self._environment.has_pack_failed |= fail and self.seat.is_prefill
        self.joining.work(1, FAILED if fail else None)

    def join_at_once(self) -> None:
        """Peers are prepared as far as they can be, and what warms up has landed."""
        while self.joining:
            self.joining.work(1)
        for agent in self.parts.agents.polled:
            for read in agent.warm_ups:
                handle = getattr(read.op, "_handle", None)
                if isinstance(handle, Read):
                    handle.land_all()

    def stop(self) -> None:
        """`Worker.stop`, which waits. Background work takes time meanwhile."""
        self.faults.dies_after = None
        clock = self._environment.clock
        until = clock.now + STOP_TIMEOUT_S
        while True:
            try:
                self.engine.stop()
                break
            except TransportError as error:
                if clock.now > until:
                    raise Violation("does not stop", f"{self.seat.name}: {error}") from error
            clock.now += WORK_S
            self.clock.keep_up()
            self.background.work(1)
        block_at = self.seat.cache.block_at
        reads = [block_at(read.addresses[0]) for read in self._environment.fabric.reads()]
        blocks = [block for block in reads if block is not None]
        if blocks:
            raise Violation("stopped while a read can write", f"{self.seat.name}: blocks {blocks}")
        owed = self.loop.outstanding.orphans
        if owed:
            raise Violation("load owed after the stop", f"{self.seat.name}: {sorted(owed)}")

    def submit(self, commands: Iterable[events.Command]) -> None:
        self.engine.note_step()
        with self._on_step_thread():
            self.engine.end_step(self.stream.record_event)
            commands = list(commands)
            epochs = [each.epoch for each in commands if isinstance(each, events.BlocksTaken)]
            commands = self.engine.before_step(commands)
        self.epoch = max([self.epoch, *epochs])
        starts = [each for each in commands if isinstance(each, events.StartLoad)]
        self.loads.update({start.request: start for start in starts})
        self.engine.submit([*self._unwritten.pop(), *commands])
        self._unwritten.add(commands)

    def compute(self, write: Callable[[], None]) -> None:
        """The forwards of a step, and then `Worker.wait_for_save`."""
        self.stream.add(write)
        if not self._environment.writes_late or self.seat.is_decode:
            self.stream.end()
        self.engine.end_step(self.stream.record_event)
        self.engine.submit(self._unwritten.pop())

    def pop_ended(self) -> tuple[set[RequestId], set[RequestId]]:
        """`Worker.pop_results` at the end of the step: the requests that ended, and that failed."""
        self.engine.note_step(has_computed=True)
        ended: set[RequestId] = set()
        failed: set[RequestId] = set()
        with self._on_step_thread():
            results = self.engine.pop_results()
        for result in results:
            if isinstance(result, events.NewLife):  # its agent listens nowhere
                raise Violation("unexpected report", f"{self.seat.name}: {result}")
            if isinstance(result, events.Counts):
                self.counts.update(by_name(result))
                continue
            if isinstance(result, events.EarlySlotFree):
                continue
            if isinstance(result, events.LoadReady):
                self.ready.add(result.request)
                continue
            if isinstance(result, events.EarlyReleased):
                self.released.add(result.request)
                continue
            if isinstance(result, events.OfferGranted):
                self.granted.add(result.request)
                continue
            is_offer = isinstance(result, events.OfferEnded)
            if not (self.seat.is_prefill if is_offer else self.seat.is_decode):
                raise Violation("unexpected report", f"{self.seat.name}: {result}")
            ended.add(result.request)
            if isinstance(result, events.LoadEnded) and result.failure is not None:
                failed.add(result.request)
        return ended, failed

    @contextmanager
    def _on_step_thread(self) -> Iterator[None]:
        """The transfer thread alone dies."""
        dies_after, self.faults.dies_after = self.faults.dies_after, None
        yield
        self.faults.dies_after = dies_after

    def _guard(self) -> None:
        """Machines and digests may be what the thread dies of; comparisons are shown."""
        parts = self.loop.parts
        for machine in (parts.prefill, parts.decode):
            self.faults.guard(machine, "handle")
        for queue in parts.workers:
            self.faults.guard(queue, "add")
            self.faults.guard(queue, "poll")
        handle = parts.decode.handle

        def observed(event: events.DecodeEvent, now: float) -> list[events.Action]:
            if isinstance(event, events.DigestCompared):
                self._environment.observer.on_compared(self, event)
            return handle(event, now)

        setattr(parts.decode, "handle", observed)  # noqa: B010 - a method of one object
