"""A rank's transfer engine: what it is made of, put together in this one place.

engine = TransferEngine(RankSpec(...))
description = engine.start()      # for the engine's directory, see `directory_server`
engine.submit([...])              # commands, see `protocol.events`
engine.pop_results()              # loads and offers that have ended, and counts
engine.stop()
"""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from nixl_kv.config import Config
from nixl_kv.errors import ConfigError, DigestError, LocalProtocolError
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.ids import EngineId, Rank, endpoint_at, new_incarnation
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.decode.machine import DecodeMachine
from nixl_kv.protocol.prefill.machine import PrefillMachine
from nixl_kv.transfer.agents import Agents
from nixl_kv.transfer.digests import Digester, DigestQueue, HostDigester, NoDigester
from nixl_kv.transfer.event_log import EventLog
from nixl_kv.transfer.loop import Loop, Parts
from nixl_kv.transfer.read_agent import register
from nixl_kv.transfer.remote_peers import RemotePeers
from nixl_kv.transfer.status import StatusReporter
from nixl_kv.transfer.thread import TransferThread
from nixl_kv.transport.base import ControlPlane, Transport
from nixl_kv.transport.slots import SlotPage

logger = logging.getLogger(__name__)

MIN_SLOTS: Final = 1024
MAX_SLOTS: Final = 1 << 20


def _background_thread() -> Executor:
    return ThreadPoolExecutor(1, "nixl-kv-agents")


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """One rank of an engine, and what its transfer engine is made of."""

    engine: EngineId
    """Different from every other engine's. The same for all ranks, or `SetEngine` makes it so."""

    rank: Rank
    layout: CacheLayout
    """Of this rank's cache."""

    model: Mapping[str, str]
    """Facts of the model that two engines must agree on, to mean the same by the same bytes."""

    config: Config
    host: str
    """The IP literal on which this rank listens."""

    is_prefill: bool
    is_decode: bool
    make_transport: Callable[[], Transport]
    make_control: Callable[[], ControlPlane]

    extras: Mapping[str, str] = field(default_factory=dict)
    """Facts of what the cache has besides the model's KV: an engine that is read has to say the
    same of all that this one has, and may have more."""

    # What simulations replace:
    num_slots: int | None = None
    make_slots: Callable[[int], SlotPage] = SlotPage
    make_background: Callable[[], Executor] = _background_thread
    clock: Callable[[], float] = time.monotonic

    @property
    def roles(self) -> str:
        """For people."""
        roles = ("prefill", self.is_prefill), ("decode", self.is_decode)
        return " and ".join(name for name, is_one in roles if is_one)


class TransferEngine:
    """Moves the KV of one rank. For the caller's thread; only `start` and `stop` wait."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        self.loop: Loop | None = None
        self._commands: deque[events.Command] = deque()
        self._results: deque[events.Result] = deque()
        self._thread = TransferThread(self._build_loop)
        self._is_stopped = False

    def start(self) -> messages.RankDescription:
        """Start the transfer thread, and wait until the rank can be read. To be called once.

        Raises:
            NixlKVError: if a transport or a socket fails, or the cache cannot be digested although
                that is asked for.
        """
        self.loop = self._thread.start()
        return self.loop.parts.description

    def start_stepped(self, results: deque[events.Result] | None = None) -> Loop:
        """Start without a thread: the caller runs the turns of the loop. For simulation.

        `results` is where results go, in place of `pop_results`.
        """
        if results is not None:
            self._results = results
        self.loop = self._build_loop()
        return self.loop

    def submit(self, commands: Iterable[events.Command]) -> None:
        """Hand over commands, in order. They are carried out even if no result is ever popped.

        Raises:
            LocalProtocolError: after `stop`.
        """
        if self._is_stopped:
            raise LocalProtocolError("the transfer engine is stopped")
        commands = tuple(commands)
        self._commands.extend(commands)
        if self.loop is not None and commands:
            self.loop.wake()

    def pop_results(self) -> list[events.Result]:
        """The results since the last call, in order.

        One for each load that was started, one for each offer that was published, and counts.
        """
        return [self._results.popleft() for _ in range(len(self._results))]

    def stop(self) -> None:
        """End the thread, which releases everything; one that hangs is left after some seconds."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._thread.was_started:
            self._thread.stop()
        elif self.loop is not None:
            self.loop.close()

    def _build_loop(self) -> Loop:
        """On the transfer thread, which owns all of it."""
        spec = self.spec
        parts = build_parts(spec)
        status = StatusReporter(parts, spec.rank, spec.roles, spec.clock)
        return Loop(
            parts,
            self._commands,
            self._results,
            clock=spec.clock,
            report_status=status.report,
        )


def build_parts(spec: RankSpec) -> Parts:
    """Agents, sockets and machines of one life of a rank.

    Raises:
        NixlKVError: see `TransferEngine.start`.
    """
    config, layout = spec.config, spec.layout
    event_log, counts = EventLog(), defaultdict[str, float](float)
    incarnation = new_incarnation()
    digester = _make_digester(layout, is_needed=spec.is_decode and config.verify > 0)
    peers = RemotePeers(layout, spec.rank, spec.model, config.allowed_hosts, extras=spec.extras)
    agents = Agents(
        spec.make_transport,
        peers,
        counts,
        clock=spec.clock,
        opening=spec.make_background(),
        closing=spec.make_background(),
    )
    if spec.is_decode:
        agents.open()
    num_slots = spec.num_slots or slots_for(layout)
    slots = spec.make_slots(num_slots)
    serving = None
    if spec.is_prefill:
        serving = spec.make_transport()
        register(serving, layout, slots)
    control = spec.make_control()
    port = control.listen(spec.host, 0)
    return Parts(
        control=control,
        prefill=PrefillMachine(
            incarnation,
            event_log.record,
            num_slots=num_slots,
            offer_ttl_s=config.offer_ttl_s,
            lease_s=config.lease_s,
            hold_s=config.hold_s,
        ),
        decode=DecodeMachine(
            messages.Reader(engine=spec.engine, incarnation=incarnation, rank=spec.rank),
            event_log.record,
            timeout_s=config.request_timeout_s,
            renew_interval_s=config.renew_interval_s,
            bytes_per_token=layout.bytes_per_token,
        ),
        agents=agents,
        digests=DigestQueue(layout, digester, counts, spec.clock),
        serving=serving,
        slots=slots,
        event_log=event_log,
        counts=counts,
        description=messages.RankDescription(
            incarnation=incarnation,
            endpoint=endpoint_at(spec.host, port),
            agent=b"" if serving is None else serving.metadata(),
            slots=messages.Slots(address=slots.address, count=slots.count),
            layout=layout,
        ),
    )


def slots_for(layout: CacheLayout) -> int:
    """How many offers may be granted at the same time: each has a block of its own at least."""
    num_blocks = max(group.num_entries for group in layout.groups)
    return min(max(num_blocks, MIN_SLOTS), MAX_SLOTS)


def _make_digester(layout: CacheLayout, *, is_needed: bool) -> Digester:
    """How this rank digests. That it cannot is an error only if it verifies what it reads."""
    if layout.memory == "DRAM":
        return HostDigester()
    try:
        from nixl_kv.transfer.gpu_digests import GpuDigester  # noqa: PLC0415 - Triton: GPUs only

        return GpuDigester(layout)
    except (ImportError, DigestError) as error:
        if is_needed:
            raise ConfigError(
                f"verify is on, but KV cannot be digested here: {error}; allowed: 'off'"
            ) from error
        logger.warning("no load can be verified that is read from here: %s", error)
        return NoDigester(str(error))
