"""The transfer thread: feeds events to the machines, and carries out their actions.

One thread per worker owns the NIXL agent, the sockets and all protocol state, so there is no lock.
vLLM's step thread talks to it through two deques only: commands in, results out. The thread waits
for its sockets; it polls NIXL only while a read is under way or a peer may be reading from here,
and uses no CPU otherwise.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeAlias

from nixl_kv.connector.dataplane import DataPlane, Transferred
from nixl_kv.errors import RemoteProtocolError, TransportError
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import (
    Abort,
    Ask,
    Deny,
    Description,
    Done,
    Grant,
    Message,
    Refusal,
    Renew,
    Renewed,
    decode,
    encode,
)
from nixl_kv.protocol.receiver import Receiver
from nixl_kv.protocol.sender import Sender
from nixl_kv.transport.base import Transport
from nixl_kv.transport.control import Control, FromEndpoint, FromPeer, Lost, Received
from nixl_kv.transport.slots import SlotPage

logger = logging.getLogger(__name__)

READING_NAP_S: Final = 0.0001
SERVING_POLL_S: Final = 0.001
TICK_S: Final = 0.025
MAX_RESULTS: Final = 10_000
STOP_TIMEOUT_S: Final = 5.0
LINGER_S: Final = 1.0
"""How long after the last grant this side still serves reads that nobody told it of."""


@dataclass(frozen=True)
class LoadResult:
    """A load is over; `transferred` are the figures of its reads, one per prefill rank."""

    loaded: events.Loaded
    transferred: list[Transferred]


Result: TypeAlias = LoadResult | events.Sent | events.Denied


@dataclass(frozen=True)
class Machinery:
    """What the thread owns. Made on the thread itself, by the factory that it is given."""

    transport: Transport
    control: Control
    data: DataPlane
    slots: SlotPage
    sender: Sender
    receiver: Receiver
    description: bytes  # of this rank, encoded, for the scheduler to publish


class TransferThread:
    """See the module's head. `submit`, `take` and `stop` are for the step thread."""

    def __init__(self, factory: Callable[[], Machinery]) -> None:
        """Prepare; `start` begins. The factory runs on the new thread, and may raise."""
        self._factory = factory
        self._commands: deque[events.Command] = deque()
        self._results: deque[Result] = deque()
        self._started: Future[Machinery] = Future()
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="nixl-kv-transfer", daemon=True)

    def start(self) -> Machinery:
        """Start, and wait until the machinery stands.

        Raises:
            NixlKVError: what the factory raised.
        """
        self._thread.start()
        return self._started.result()

    def submit(self, commands: Iterable[events.Command]) -> None:
        """Hand over commands, in order."""
        before = len(self._commands)
        self._commands.extend(commands)
        if len(self._commands) > before:
            self._started.result().control.wake()

    def take(self) -> list[Result]:
        """Fetch the results that are there, in order."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def stop(self) -> None:
        """End the thread, and then close what it owned: while it runs, nobody else may."""
        if not self._thread.is_alive():
            return
        machinery = self._started.result()
        self._stopping = True
        machinery.control.wake()
        self._thread.join(timeout=STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            machinery.control.close()
            machinery.transport.close()

    def _main(self) -> None:
        """The thread's top."""
        _leave_pinned_core()
        try:
            machinery = self._factory()
        except BaseException as error:  # noqa: BLE001 - raised again where the start is waited for
            self._started.set_exception(error)
            return
        loop = _Loop(machinery, self._commands, self._results)
        self._started.set_result(machinery)
        while not self._stopping:
            _safely(loop.turn)


class _Loop:
    """One turn after the other, on the transfer thread."""

    def __init__(
        self,
        machinery: Machinery,
        commands: deque[events.Command],
        results: deque[Result],
    ) -> None:
        """Begin with nothing under way."""
        self._m = machinery
        self._commands = commands
        self._results = results
        self._follow_up: deque[events.DataEvent | events.EndpointLost] = deque()
        self._next_tick = 0.0
        self._serve_until = 0.0

    def turn(self) -> None:
        """Wait for something, then handle all that came."""
        received = self._m.control.poll(self._patience())
        # Commands first: who asks for an offer has its ticket, which left after the command.
        while self._commands:
            _safely(self._command, self._commands.popleft())
        for item in received:
            _safely(self._receive, item)
        for event in self._m.data.poll():
            _safely(self._ended, event)
        _safely(self._tick)
        _safely(self._serve)

    def _patience(self) -> float | None:
        """How long this turn may wait, in seconds; None for ever."""
        if self._commands:
            return 0
        if self._m.data.busy:
            time.sleep(READING_NAP_S)
            return 0
        if time.monotonic() < self._serve_until:
            return SERVING_POLL_S
        return TICK_S if self._m.receiver.busy or self._m.sender.offers.timed else None

    def _ended(self, event: events.DataEvent) -> None:
        self._carry_out(self._m.receiver.handle(event, time.monotonic()))

    def _tick(self) -> None:
        now = time.monotonic()
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_S
        self._carry_out(self._m.receiver.handle(events.Tick(), now))
        self._carry_out(self._m.sender.handle(events.Tick(), now))

    def _serve(self) -> None:
        """Some paths of NIXL need the owner of the memory to take part in being read."""
        now = time.monotonic()
        if self._m.sender.offers.granted:
            self._serve_until = now + LINGER_S
        if now < self._serve_until:
            self._m.transport.progress()

    def _command(self, command: events.Command) -> None:
        now = time.monotonic()
        if isinstance(command, events.Siblings):
            self._m.data.sources.meet(command.layouts)
        elif isinstance(command, events.Fetch | events.Load | events.Drop):
            self._carry_out(self._m.receiver.handle(command, now))
        else:
            self._carry_out(self._m.sender.handle(command, now))

    def _receive(self, item: Received) -> None:
        """One message or loss. What a stranger sends is logged, and changes nothing."""
        now = time.monotonic()
        try:
            match item:
                case FromPeer():
                    self._asked(decode(item.payload), item.route, now)
                case FromEndpoint():
                    self._answered(decode(item.payload), item.endpoint, now)
                case Lost():
                    lost = events.EndpointLost(item.endpoint, item.reason)
                    self._carry_out(self._m.receiver.handle(lost, now))
        except RemoteProtocolError as error:
            logger.warning("control message dropped: %s", error)

    def _asked(self, message: Message, route: bytes, now: float) -> None:
        if not isinstance(message, Ask | Renew | Done | Abort):
            raise RemoteProtocolError(f"{type(message).__name__} is not for a worker")
        self._carry_out(self._m.sender.handle(message, now), route)

    def _answered(self, message: Message, endpoint: str, now: float) -> None:
        if not isinstance(message, Description | Refusal | Grant | Deny | Renewed):
            raise RemoteProtocolError(f"{type(message).__name__} is no answer")
        self._carry_out(self._m.receiver.answered(message, endpoint, now))

    def _carry_out(self, actions: list[events.Action], route: bytes = b"") -> None:
        """Do what the machines decided, and then what follows from it, until nothing does."""
        for action in actions:
            self._execute(action, route)
        while self._follow_up:
            event = self._follow_up.popleft()
            for action in self._m.receiver.handle(event, time.monotonic()):
                self._execute(action, route)

    def _execute(self, action: events.Action, route: bytes) -> None:
        match action:
            case events.Send():
                self._send(action)
            case events.Reply():
                self._m.control.reply(route, encode(action.message))
            case events.Disconnect():
                self._m.control.disconnect(action.endpoint)
            case events.WriteSlot():
                self._m.slots.write(action.slot, action.generation)
            case events.ClearSlot():
                self._m.slots.clear(action.slot)
            case events.Loaded() | events.Sent() | events.Denied():
                self._report(action)
            case _:
                self._move_data(action)

    def _move_data(
        self, action: events.AddPeer | events.DropPeer | events.StartRead | events.CheckSlot
    ) -> None:
        event: events.DataEvent | None = None
        match action:
            case events.AddPeer():
                event = self._m.data.sources.add(action)
            case events.DropPeer():
                self._m.data.sources.drop(action.peer)
            case events.StartRead():
                event = self._m.data.start(action)
            case events.CheckSlot():
                event = self._m.data.check(action)
        if event is not None:
            self._follow_up.append(event)

    def _send(self, action: events.Send) -> None:
        try:
            self._m.control.send(action.endpoint, encode(action.message))
        except TransportError as error:
            self._follow_up.append(events.EndpointLost(action.endpoint, str(error)))

    def _report(self, action: events.Loaded | events.Sent | events.Denied) -> None:
        if isinstance(action, events.Denied) and len(self._results) >= MAX_RESULTS:
            return  # strangers may ask as much as they like while vLLM makes no step
        if not isinstance(action, events.Loaded):
            self._results.append(action)
            return
        transferred = self._m.data.finished(action.request)
        self._results.append(LoadResult(action, transferred))


def _safely(step: Callable[..., None], *args: object) -> None:
    """What goes wrong in one step is a bug of ours; it ends that step and none of the others."""
    try:
        step(*args)
    except Exception:
        logger.exception("transfer thread: a step failed; going on")
        time.sleep(TICK_S)


def _leave_pinned_core() -> None:
    """Run on the cores of the parent process.

    vLLM may have bound this process's main thread to one core, which threads inherit, and NIXL's
    threads from this one; there they would wait behind the model's computation. Only this thread
    is moved.
    """
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    except OSError as error:
        logger.debug("the transfer thread stays on its cores: %s", error)
