"""The transfer engine of one rank: its interface, and the one place that wires its parts.

engine = TransferEngine(RankSpec(...))
description = engine.start()      # for the engine's directory, see `engine.directory`
engine.submit([...])              # commands, see `protocol.events`
engine.pop_results()              # ended loads and offers, and counts
engine.stop()
"""

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from nixl_kv.config import Config
from nixl_kv.conversations.part import build as build_conversations
from nixl_kv.early.part import build as build_early
from nixl_kv.engine.admission import Admission
from nixl_kv.engine.clock import LoopClock
from nixl_kv.engine.event_log import EventLog
from nixl_kv.engine.huge_pages import use_huge_pages
from nixl_kv.engine.loop import STOPPED, Loop, Parts
from nixl_kv.engine.peer_links import PeerLinks
from nixl_kv.engine.probe import CheckTicket, Prober
from nixl_kv.engine.status import build_status
from nixl_kv.errors import LocalProtocolError, TransportError, get_logger, run_guarded
from nixl_kv.feature import BuildFeature, Feature, RankSetup, StepPart
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.ids import EngineId, Rank, endpoint_at, new_incarnation
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.decode import DecodeMachine
from nixl_kv.protocol.prefill import PrefillMachine
from nixl_kv.reading.agent import register
from nixl_kv.reading.agents import Agents
from nixl_kv.reading.gather import build as build_gather
from nixl_kv.reading.paths import PathFeature
from nixl_kv.reading.peers import RemotePeers
from nixl_kv.reading.staged import build as build_staged
from nixl_kv.reading.turnover import PREPARING_THREADS
from nixl_kv.transport.base import ControlPlane, NoPorts, Ports, SlotPage, Transport
from nixl_kv.transport.ucx.serving import Serving
from nixl_kv.verify import build as build_verify

logger = get_logger(__name__)

MIN_SLOTS: Final = 1024
MAX_SLOTS: Final = 1 << 20
# A stopping rank reports that a read may still write. Posting a read of 2 million runs takes 8 s,
# destroying an agent 1 s.
STOP_TIMEOUT_S: Final = 30.0
# A stopped rank tries again to close its NIXL agents. These are the first and the longest pause;
# each is twice as long as the last. An attempt may run a full garbage collection, which keeps the
# GIL from all other threads.
CLOSING_PAUSES_S: Final = (0.01, 1.0)


def _background_threads(count: int) -> Executor:
    return ThreadPoolExecutor(count, "nixl-kv-agents")


# A prefill rank recalls claimed blocks whose reader has not begun to read. Heartbeats renew a lease
# for ever, so without this bound a decode engine without free blocks would keep prefill's.
HOLD_S: Final = 60.0
# A load fails, because prefill has not begun to compute a request that was answered early. The
# wait holds no blocks on either side, so it only has to outlast the longest queue that a client
# waits in.
WAIT_FOR_PREFILL_S: Final = 3600.0

# An agent asks the paths among them in this order.
FEATURES: Final[tuple[BuildFeature, ...]] = (
    build_gather,
    build_staged,
    build_verify,
    build_early,
    build_conversations,
)


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """One rank of an engine, and how to make the parts of its transfer engine."""

    # Unique among all engines. `SetEngine` unites ranks that started with different ids.
    engine: EngineId
    rank: Rank
    layout: CacheLayout  # of this rank's cache
    # Facts on which two engines must agree, because they give the bytes their meaning.
    model: Mapping[str, str]
    config: Config
    host: str  # the IP literal on which this rank listens
    port: int = 0  # 0 takes any free one
    is_prefill: bool
    is_decode: bool
    make_transport: Callable[[], Transport]
    make_control: Callable[[], ControlPlane]
    check_ticket: CheckTicket | None = None  # of tools that ask for a probe; None: it makes none
    # Of all transports of the rank. They admit this machine only, until peers name others.
    ports: Ports = field(default_factory=NoPorts)
    # Facts about other KV in the cache. A prefill engine must have the same, and may have more.
    extras: Mapping[str, str] = field(default_factory=dict)

    # Simulations replace these:
    num_slots: int | None = None
    hold_s: float = HOLD_S
    wait_for_prefill_s: float = WAIT_FOR_PREFILL_S
    features: tuple[BuildFeature, ...] = FEATURES
    make_slots: Callable[[int], SlotPage] = SlotPage
    make_background: Callable[[int], Executor] = _background_threads
    make_clock: Callable[[], LoopClock] = LoopClock

    @property
    def roles(self) -> str:
        roles = ("prefill", self.is_prefill), ("decode", self.is_decode)
        return " and ".join(name for name, is_one in roles if is_one)


class TransferEngine:
    """Moves the KV of one rank. One caller's thread uses it; `start`, `stop`, `wait_load` block.

    No fault ends the transfer thread. An error that reaches its top is a bug and leaves the
    machines in doubt. The thread logs it, fails all that it holds, and goes on with empty machines.

    The thread closes the loop itself, and ends only when nothing can write into the cache any
    longer. So the end of the thread is the proof.
    """

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        self.loop: Loop | None = None
        self._steps: list[StepPart] = []  # once it is started; for the caller's thread
        self._commands: deque[events.Command] = deque()
        self._results: deque[events.Result] = deque()
        self._load_ended = threading.Event()  # since results were last popped
        self._thread = threading.Thread(target=self._main, name="nixl-kv-transfer", daemon=True)
        self._started: Future[Loop] = Future()
        self._is_stopped = False  # no command comes any longer
        self._may_close = threading.Event()  # no other thread wakes the loop any longer
        self._unproven = "the thread has not ended its turn"

    def start(self) -> messages.RankDescription:
        """Start the transfer thread, and wait until peers can read the rank. Call it once.

        Raises:
            NixlKVError: if a transport or a socket fails, or if `verify` is on and the cache cannot
                be digested.
        """
        self._thread.start()
        return self._take(self._started.result()).parts.description

    def start_stepped(self, results: deque[events.Result] | None = None) -> Loop:
        """Start without a thread: a simulation runs the turns of the loop."""
        if results is not None:
            self._results = results
        return self._take(self._build_loop())

    def _take(self, loop: Loop) -> Loop:
        self.loop = loop
        self._steps = _step_parts(loop.parts.features)
        return loop

    def before_step(self, commands: Iterable[events.Command]) -> list[events.Command]:
        """Clear the fence slots of blocks that the next step may reuse; call it before that step.

        Returns the commands of the step to `submit`.
        """
        commands = list(commands)
        for each in self._steps:
            commands = each.before_step(commands)
        return commands

    def end_step(self, record_event: Callable[[], Callable[[], bool] | None]) -> None:
        """All work of the step is on the GPU's stream; may be called twice per step.

        `record_event` tells whether that work has ended. It returns None if it has already.
        """
        waiting = [each for each in self._steps if each.is_in_step]
        if waiting:
            has_ended = record_event()
            for each in waiting:
                each.end_step(has_ended)

    def submit(self, commands: Iterable[events.Command]) -> None:
        """Hand over commands, in order. The thread executes them even if no result is popped."""
        if self._is_stopped:
            raise LocalProtocolError("the transfer engine is stopped")
        commands = tuple(commands)
        self._commands.extend(commands)
        if self.loop is not None and commands:
            self.loop.wake()

    def note_step(self, *, has_computed: bool = False) -> None:
        """A step of the caller begins or has ended: its engine does not hang.

        The steps before the first one that `has_computed` do not count: that one may compile.
        """
        if self.loop is not None and (has_computed or self.loop.num_steps):
            self.loop.num_steps += 1

    def pop_results(self) -> list[events.Result]:
        """The results since the last call: one per started load and published offer, and counts."""
        self._load_ended.clear()
        results = [self._results.popleft() for _ in range(len(self._results))]
        for each in self._steps:
            for result in results:
                each.on_result(result)
        return results

    def wait_load(self, timeout_s: float) -> None:
        self._load_ended.wait(timeout_s)

    def stop(self, timeout_s: float | None = None) -> None:
        """End the thread, which releases everything. May be called again.

        When it returns, nothing writes into the cache any longer, and each load and offer has its
        result. Loads whose results were not popped have failed: the caller may discard the cache.

        Raises:
            TransportError: if a read may still write into the cache after `timeout_s`, by default
                STOP_TIMEOUT_S. Do not reuse its memory. The thread goes on closing.
        """
        is_first, self._is_stopped = not self._is_stopped, True
        if self.loop is not None and self._thread.ident is None:
            self.loop.close()
        elif self.loop is not None and self._thread.is_alive():
            if is_first:
                self.loop.wake()
                self._may_close.set()
            timeout_s = STOP_TIMEOUT_S if timeout_s is None else timeout_s
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self.loop.parts.slots.clear_all()
                raise TransportError(
                    f"the transfer thread has not stopped within {timeout_s:g} s: {self._unproven}"
                )
        for place, result in enumerate(self._results):
            if isinstance(result, events.LoadEnded) and result.failure is None:
                self._results[place] = msgspec.structs.replace(
                    result, failure=STOPPED, verified=False, reads=()
                )

    # --- on the transfer thread, which owns everything that it builds

    def _build_loop(self) -> Loop:
        spec = self.spec
        _use_own_gpu(spec.layout)
        with contextlib.ExitStack() as undo:
            clock = spec.make_clock()
            parts = build_parts(spec, clock, undo)
            undo.pop_all()
        return Loop(
            parts,
            self._commands,
            self._results,
            clock=clock,
            report_status=partial(build_status, parts, spec.rank, spec.roles, clock, clock()),
            on_load_ended=self._load_ended.set,
        )

    def _main(self) -> None:
        _leave_pinned_core()
        try:
            loop = self._build_loop()
        except BaseException as error:  # noqa: BLE001 - raised again where the start is waited for
            self._started.set_exception(error)
            return
        self._started.set_result(loop)
        step: Callable[[], None] = loop.turn
        while not self._is_stopped:
            lived = run_guarded(
                step, "the transfer thread failed; it fails its loads and offers and starts again"
            )
            step = loop.turn if lived else loop.restart
        self._may_close.wait()
        self._close(loop)

    def _close(self, loop: Loop) -> None:
        pause_s, longest_s = CLOSING_PAUSES_S
        while True:
            try:
                return loop.close()
            except Exception as error:
                is_bug = not isinstance(error, TransportError)  # else a read may still be writing
                if is_bug and str(error) != self._unproven:
                    logger.critical("closing the transfer thread failed; retrying", exc_info=True)
                self._unproven = str(error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)


def _leave_pinned_core() -> None:
    """Run this thread on the cores of the parent process.

    vLLM on CPU binds the main thread to one core. Other threads inherit that, and NIXL's threads
    inherit it from this one. On that core they would wait for the model's computation.
    """
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    except OSError as error:
        logger.debug("the transfer thread stays on its cores: %s", error)


def _use_own_gpu(layout: CacheLayout) -> None:
    if layout.memory == "VRAM":
        with contextlib.suppress(ImportError):  # without Triton, NIXL alone reads
            from nixl_kv.gpu import make_current  # noqa: PLC0415 - only GPU machines have Triton

            make_current(layout.device)


def build_parts(spec: RankSpec, clock: LoopClock, undo: contextlib.ExitStack) -> Parts:
    """Make the agents, sockets and machines of one rank; `undo` closes them if a step fails."""
    config, layout = spec.config, spec.layout
    if layout.memory == "DRAM":
        use_huge_pages(layout.spans)
    event_log, counts = EventLog(), events.Counts()
    incarnation = new_incarnation()
    control = spec.make_control()
    undo.callback(control.close)
    background = spec.make_background(1)
    undo.callback(background.shutdown)
    admission = Admission(spec.ports, config.allowed_hosts, clock)
    setup = RankSetup(
        layout=layout,
        config=config,
        is_prefill=spec.is_prefill,
        is_decode=spec.is_decode,
        wake=control.wake,
        watch=control.watch,
        background=spec.make_background(PREPARING_THREADS),
        counts=counts,
        clock=clock,
    )
    features: list[Feature] = []
    for build in spec.features:
        features.append(feature := build(setup))
        undo.callback(feature.close)
        if feature.worker is not None:
            undo.callback(feature.worker.close)
    paths = [each for each in features if isinstance(each, PathFeature)]
    served = tuple(each for path in paths for each in path.served)
    peers = RemotePeers(
        layout,
        spec.rank,
        spec.model,
        config.allowed_hosts,
        extras=spec.extras,
        paths=[each.path for each in paths if each.path is not None],
    )
    agents = Agents(
        spec.make_transport,
        peers,
        counts,
        memory=tuple(each for path in paths for each in path.read_into),
        clock=clock,
        make_background=spec.make_background,
        introduce=lambda rank, remote: admission.introduction(
            rank, remote, maps=any(path.wants_token(remote) for path in peers.paths)
        ),
    )
    undo.callback(agents.close)
    if spec.is_decode:
        agents.open()
    decode = DecodeMachine(
        messages.Reader(engine=spec.engine, incarnation=incarnation, rank=spec.rank),
        event_log.record,
        timeout_s=config.request_timeout_s,
        wait_for_prefill_s=spec.wait_for_prefill_s,
        heartbeat_interval_s=config.heartbeat_interval_s,
        bytes_per_token=layout.bytes_per_token,
        entry_size=math.lcm(*(group.entry_size for group in layout.groups)),
        parts=[each.load for each in features if each.load is not None],
    )
    num_slots = spec.num_slots or slots_for(layout)
    steps = _step_parts(features)
    slots = spec.make_slots(num_slots + sum(each.num_slots for each in steps))
    first = num_slots
    for step in steps:
        step.bind(slots, first)
        first += step.num_slots
    serving = None
    if spec.is_prefill:
        serving = Serving(
            spec.make_transport,
            lambda agent: register(agent, layout, slots, served),
            background=spec.make_background(1),
            measure=counts.measure,
            clock=clock,
        )
        undo.callback(serving.close)
    port = control.listen(spec.host, spec.port)
    described: messages.PathFields = {}
    for path in paths:
        described.update(path.description)
    prefill = PrefillMachine(
        incarnation,
        event_log.record,
        num_slots=num_slots,
        offer_ttl_s=config.offer_ttl_s,
        lease_s=config.lease_s,
        hold_s=spec.hold_s,
        parts=[each.prefill for each in features if each.prefill is not None],
    )
    links = PeerLinks(layout.memory, clock, is_ucx=config.backends[0] == "UCX")
    description = messages.RankDescription(
        incarnation=incarnation,
        endpoint=endpoint_at(spec.host, port),
        agent=b"" if serving is None else serving.metadata(),
        slots=messages.Slots(address=slots.address, count=slots.count),
        listens=spec.ports.listens if serving is not None else (),
        layout=layout,
        **described,
    )
    return Parts(
        control=control,
        background=background,
        prefill=prefill,
        decode=decode,
        agents=agents,
        serving=serving,
        admission=admission,
        features=tuple(features),
        slots=slots,
        event_log=event_log,
        links=links,
        prober=Prober(agents, decode, control, links, spec.check_ticket, clock),
        counts=counts,
        description=description,
    )


def _step_parts(features: Iterable[Feature]) -> list[StepPart]:
    return [each.step for each in features if each.step is not None]


def slots_for(layout: CacheLayout) -> int:
    # The slots bound the offers that are granted at a time. Each has a block of its own.
    num_blocks = max(group.num_entries for group in layout.groups)
    return min(max(num_blocks, MIN_SLOTS), MAX_SLOTS)


class UnwrittenOffers:
    """Offers that prefill must not grant before an event on the GPU's stream.

    With speculative decoding, a step's output leaves before the draft model writes the KV of its
    own layers. An offer in parts is granted while prefill still computes it. For the caller's
    thread, which submits what `pop` returns.
    """

    def __init__(self, record_event: Callable[[], Callable[[], bool] | None]) -> None:
        """`record_event` tells whether all writes that are on the stream now have ended.

        It returns None if they have ended already.
        """
        self._record_event = record_event
        self._current: list[events.MarkWritten] = []  # of the current step

    def add(self, commands: Iterable[events.Command]) -> None:
        self._current += [
            events.MarkWritten(command.nonce, command.computed, command.attempt)
            for command in commands
            if isinstance(command, events.PrepareOffer) and not command.is_written
        ]

    def pop(self) -> Sequence[events.Command]:
        """All writes of the step are on the stream. May be called twice per step."""
        marks, self._current = self._current, []
        is_done = self._record_event() if marks else None
        return marks if is_done is None else [events.AwaitWrites(tuple(marks), is_done)]
