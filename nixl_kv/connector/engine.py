"""The transfer thread's work: feeds events to the machines, and carries out their actions.

One thread per worker owns the NIXL agents, the sockets and all protocol state, so there is no lock.
It waits for its sockets; it polls NIXL only while a read is under way or a peer may be reading from
here, and uses no CPU otherwise.
"""

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from nixl_kv.connector.dataplane import DataPlane
from nixl_kv.connector.digests import Order
from nixl_kv.connector.ledger import Ledger
from nixl_kv.connector.results import Counts, LoadResult, Result
from nixl_kv.connector.seldom import Seldom
from nixl_kv.errors import RemoteProtocolError, TransportError
from nixl_kv.ids import shown
from nixl_kv.protocol import events, proofs, proving
from nixl_kv.protocol.messages import decode_answer, decode_to_rank, encode
from nixl_kv.protocol.receiver import Receiver
from nixl_kv.protocol.sender import Sender
from nixl_kv.transport.base import Transport
from nixl_kv.transport.control import Control, FromEndpoint, FromPeer, Lost, Received
from nixl_kv.transport.slots import SlotPage

logger = logging.getLogger(__name__)

READING_NAP_S: Final = 0.0001
SERVING_POLL_S: Final = 0.001
TICK_S: Final = 0.025
LINGER_S: Final = 2.0
"""How long after a reader's last word this side still serves reads: one may be going on although
its lease ran out, and renews are sent each second at least."""


@dataclass(frozen=True)
class Machinery:
    """What the thread owns. Made on the thread itself, by the factory that it is given."""

    control: Control
    data: DataPlane
    serving: Transport | None  # lets peers read this rank; None if it only decodes
    slots: SlotPage
    sender: Sender
    receiver: Receiver
    description: bytes  # of this rank, encoded, for the scheduler to publish

    def close(self) -> None:
        """Release everything, whatever fails of it. Only when the thread has ended."""
        with contextlib.ExitStack() as stack:
            if self.serving is not None:
                stack.callback(self.serving.close)
            stack.callback(self.data.agents.close)
            stack.callback(self.data.digests.close)
            stack.callback(self.control.close)


class Loop:
    """One turn after the other. An error leaves a turn, and only `restart` may follow it."""

    def __init__(
        self,
        machinery: Machinery,
        commands: deque[events.Command],
        results: deque[Result],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with nothing under way. `clock` is in monotonic seconds."""
        self._m = machinery
        self._commands = commands
        self._results = results
        self._clock = clock
        self._follow_up: deque[events.DataEvent | events.EndpointLost | proofs.Digested] = deque()
        self._next_tick = 0.0
        self._serve_until = 0.0
        self._ledger = Ledger()
        self._counts: Counter[str] = Counter()
        self._seldom = Seldom(logger, clock)

    def turn(self) -> None:
        """Wait for something, then handle all that came."""
        received = self._m.control.poll(self._patience())
        # Commands first: who asks for an offer has its ticket, which left after the command.
        while self._commands:
            self._command(self._commands.popleft())
        for item in received:
            self._receive(item)
        for event in self._m.data.agents.poll():
            self._carry_out(self._m.receiver.handle(event, self._clock()))
        for ended, route in self._m.data.digests.poll(self._is_awaited):
            self._carry_out(self._handle(ended), route)
        for loaded in self._ledger.drained(self._m.data.agents.reading):
            self._report(loaded)
        self._tick()
        self._serve()
        self._publish_counts()

    def restart(self) -> None:
        """The machines are in doubt: begin anew with them, and fail all that they held.

        First of all no grant stands any more. Loads are reported when their reads have ended, or
        have been stopped; offers at once.
        """
        self._counts["thread_restarts"] += 1
        self._m.slots.clear_all()
        self._follow_up.clear()
        self._m.receiver.requests.clear()
        self._m.receiver.directory.clear()
        self._m.sender.offers.clear()
        self._m.data.digests.clear()
        orphans, sent = self._ledger.lose()
        for request in orphans:
            self._m.data.abandon(request)
        for lost in sent:
            self._report(lost)

    def _patience(self) -> float | None:
        """How long this turn may wait, in seconds; None for ever."""
        if self._commands:
            return 0
        if self._m.data.digests.patience == 0:
            return 0
        if self._m.data.agents.busy or self._m.data.digests.patience is not None:
            return READING_NAP_S
        if self._clock() < self._serve_until:
            return SERVING_POLL_S
        return TICK_S if self._m.receiver.busy or self._m.sender.offers.timed else None

    def _tick(self) -> None:
        now = self._clock()
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_S
        self._carry_out(self._m.receiver.handle(events.Tick(), now))
        self._carry_out(self._m.sender.handle(events.Tick(), now))

    def _serve(self) -> None:
        """Some paths of NIXL need the owner of the memory to take part in being read."""
        now = self._clock()
        if self._m.sender.offers.granted:
            self._serve_until = max(self._serve_until, now + LINGER_S)
        if self._m.serving is not None and now < self._serve_until:
            self._m.serving.progress()

    def _command(self, command: events.Command) -> None:
        now = self._clock()
        if isinstance(command, events.Siblings):
            self._m.data.meet(command.layouts)
        elif isinstance(command, events.Fetch | events.Load | events.Drop):
            if isinstance(command, events.Load):
                self._ledger.owe(command)
            self._carry_out(self._m.receiver.handle(command, now))
        else:
            lost = self._ledger.offer(command)
            if lost is not None:
                self._report(lost)
            if not self._ledger.is_void(command):
                self._carry_out(self._m.sender.handle(command, now))

    def _receive(self, item: Received) -> None:
        """One message or loss. What a stranger sends is logged, and changes nothing."""
        now = self._clock()
        try:
            match item:
                case FromPeer():
                    message = decode_to_rank(item.payload)
                    self._serve_until = now + LINGER_S
                    self._carry_out(self._m.sender.handle(message, now), item.route)
                case FromEndpoint():
                    answer = decode_answer(item.payload)
                    self._carry_out(self._m.receiver.answered(answer, item.endpoint, now))
                case Lost():
                    self._counts["peers_lost"] += 1
                    self._seldom.warning("lost %s: %s", item.endpoint, item.reason)
                    lost = events.EndpointLost(item.endpoint, item.reason)
                    self._carry_out(self._m.receiver.handle(lost, now))
        except RemoteProtocolError as error:
            self._counts["messages_dropped"] += 1
            self._seldom.warning("control message dropped: %s", error)

    def _carry_out(self, actions: list[events.Action], route: bytes = b"") -> None:
        """Do what the machines decided, and then what follows from it, until nothing does."""
        for action in actions:
            self._execute(action, route)
        while self._follow_up:
            event = self._follow_up.popleft()
            for action in self._handle(event):
                self._execute(action, route)

    def _is_awaited(self, order: Order) -> bool:
        if isinstance(order, proofs.Digest):
            return self._m.sender.awaits(order.prove)
        return proving.is_awaited(self._m.receiver.requests.get(order.request), order)

    def _handle(
        self, event: events.DataEvent | events.EndpointLost | proofs.Digested
    ) -> list[events.Action]:
        """Each side has the events that its own actions led to."""
        if isinstance(event, proofs.Digested):
            return self._m.sender.handle(event, self._clock())
        return self._m.receiver.handle(event, self._clock())

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
                event = self._m.data.carry_out(action, route)
                if event is not None:
                    self._follow_up.append(event)

    def _send(self, action: events.Send) -> None:
        try:
            self._m.control.send(action.endpoint, encode(action.message))
        except TransportError as error:
            self._follow_up.append(events.EndpointLost(action.endpoint, str(error)))

    def _report(self, action: events.Loaded | events.Sent | events.Denied) -> None:
        match action:
            case events.Denied():
                self._counts["asks_denied"] += 1
                told = "denied an ask for offer %s: %s"
                self._seldom.warning(told, shown(action.nonce), action.reason)
            case events.Sent():
                self._ledger.sent(action.request)
                self._results.append(action)
            case events.Loaded():
                self._ledger.paid(action.request)
                transferred = self._m.data.finished(action.request)
                self._results.append(LoadResult(action, transferred))

    def _publish_counts(self) -> None:
        """One record at a time: strangers may ask as much as they like while vLLM makes no step."""
        if self._results:
            return
        counts = self._m.data.take_counts() | self._counts
        if counts:
            self._results.append(Counts(counts))
            self._counts = Counter()
