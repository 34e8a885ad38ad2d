"""One turn of the transfer thread: feeds events to the machines, and carries out their actions.

One thread per rank owns the NIXL agents, the sockets and all protocol state, so there is no lock.
It waits for its sockets; it polls NIXL only while a read is under way or a peer may be reading from
this rank, and uses no CPU otherwise.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from nixl_kv.engine.event_log import EventLog
from nixl_kv.engine.outstanding import Outstanding
from nixl_kv.engine.serving import Serving
from nixl_kv.errors import ForeignVersion, RemoteProtocolError, TransportError
from nixl_kv.ids import Endpoint, RequestId, new_incarnation, short
from nixl_kv.log_limit import LimitedLog, get_logger
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.decode.machine import DecodeMachine
from nixl_kv.protocol.prefill.machine import PrefillMachine
from nixl_kv.reading.agent import READING_PAUSE_S
from nixl_kv.reading.paths.base import Feature, Packer
from nixl_kv.reading.replace import Agents
from nixl_kv.transport.base import (
    ControlPlane,
    FromEndpoint,
    FromPeer,
    Lost,
    Received,
)
from nixl_kv.transport.slots import SlotPage
from nixl_kv.verify.queue import DigestQueue

logger = get_logger(__name__)

SERVING_PAUSE_S: Final = 0.001
RECEIVING_S: Final = 0.05
"""Of one turn, at most, for what was received: the description of a large engine takes 4 ms to
read, and renewals must not wait for those of hundreds."""
LINGER_S: Final = 2.0
"""How long after a reader's last word this side still serves reads: one may be going on although
its lease ran out, and renews are sent each second at least."""

LINK_KEPT_S: Final = 5.0
"""How long a link stays over which nothing is held: to open it again costs a round trip or two."""

STOPPED: Final = events.Failure(events.FailureKind.DROPPED, "this rank has stopped")

STORY_LINES: Final = 10
"""Of a failed load, below the line that says so."""
STORIES_PER_S: Final = 20
"""Of loads that fail at once; of the others the log has one line each."""
MAX_QUESTIONS: Final = 8
"""Status questions that wait, over all connections."""


@dataclass
class Parts:
    """What one rank consists of. Made on the transfer thread, by `engine.build_parts`.

    Only the description changes, if the rank begins a new life.
    """

    control: ControlPlane
    prefill: PrefillMachine
    decode: DecodeMachine
    agents: Agents
    digests: DigestQueue
    packs: Packer | None  # if this rank packs
    serving: Serving | None  # lets peers read this rank; None if it only decodes
    features: tuple[Feature, ...]
    slots: SlotPage
    event_log: EventLog
    counts: defaultdict[str, float]  # since they were last published, by counter
    description: messages.RankDescription


class _Closes(Protocol):
    """A part that ends with the loop; `close` may be called again after an error."""

    def close(self) -> None: ...


class Loop:
    """One turn after the other. An error leaves a turn, and only `restart` may follow it."""

    def __init__(
        self,
        parts: Parts,
        commands: deque[events.Command],
        results: deque[events.Result],
        *,
        clock: Callable[[], float],
        report_status: Callable[[messages.StatusRequest], messages.Status],
        on_load_ended: Callable[[], None],
    ) -> None:
        """Start with nothing under way.

        Args:
            parts: what it drives.
            commands: of the caller, in order.
            results: for the caller, in order.
            clock: monotonic seconds.
            report_status: the answer to a tool.
            on_load_ended: called when there is the result of a load.
        """
        self.parts = parts
        self.outstanding = Outstanding()
        self._commands = commands
        self._results = results
        self._clock = clock
        self._report_status = report_status
        self._on_load_ended = on_load_ended
        self._follow_up: deque[events.DecodeEvent | events.PrefillEvent] = deque()
        self._received: deque[Received] = deque()
        self._questions: deque[tuple[bytes, messages.StatusRequest]] = deque()
        self._stories_at: deque[float] = deque(maxlen=STORIES_PER_S)
        self._serve_until = 0.0
        self._look_at_links_at: float | None = None  # while there are links
        self._doubted: set[Endpoint] = set()  # whose link broke, and that have said nothing since
        self._to_close: list[_Closes] | None = None  # what is left of it, once `close` has begun
        self._log = LimitedLog(logger, clock)

    def wake(self) -> None:
        """End a wait; may be called from any thread."""
        self.parts.control.wake()

    def close(self) -> None:
        """Release everything, and report every load into which nothing can write any longer.

        Only after the last turn. Before anything else, all grants become invalid, so that a reader
        of this rank finds out. May be called again after an error: what has been closed stays so.

        Raises:
            TransportError: if an agent is not proven to be gone; its loads stay owed.
            Exception: what else closing a part has raised.
        """
        parts = self.parts
        parts.slots.clear_all()
        if self._to_close is None:
            own = (parts.packs, parts.digests, parts.agents, parts.serving)
            self._to_close = [parts.control, *(part for part in own if part is not None)]
            self._to_close += parts.features
        errors: list[Exception] = []
        for part in list(self._to_close):
            try:
                part.close()
                self._to_close.remove(part)
            except Exception as error:  # noqa: BLE001, PERF203 - raised when the others are closed
                errors.append(error)
        while self._commands:
            _, report = self.outstanding.admit(self._commands.popleft())
            if report is not None:
                self._results.append(report)
        self._results.extend(self.outstanding.lose_machines())
        for load in self.outstanding.drained(parts.agents.is_read, STOPPED):
            self._report(load)
        if errors:
            raise errors[0]

    def turn(self) -> None:
        """Wait for something, then handle all that came."""
        if not self._received:  # what more there is waits at its senders
            self._received.extend(self.parts.control.poll(self._wait_s()))
        # Commands first: who asks for an offer has its ticket, which left after the command.
        while self._commands:
            self._on_command(self._commands.popleft())
        until = self._clock() + RECEIVING_S
        while self._received:
            self._on_received(self._received.popleft())
            if self._clock() >= until:
                break
        for event in self.parts.agents.poll():
            self._handle(event)
        for digest_event in self.parts.digests.poll(self._is_wanted):
            self._handle(digest_event)
        for packed in self.parts.packs.poll() if self.parts.packs else ():
            self._handle(packed)
        for orphan in self.outstanding.drained(self.parts.agents.is_read):
            self._report(orphan)
        self._tick()
        self._serve()
        self._answer_question()
        self._publish_counts()

    def restart(self) -> None:
        """The machines are in doubt: start again with empty ones, and fail all that they held.

        First of all no grant is valid any more. Loads are reported when their reads have ended, or
        have been stopped; offers at once.
        """
        self._count("thread_restarts")
        self.parts.slots.clear_all()
        self._follow_up.clear()
        self._received.clear()
        self._questions.clear()
        self.parts.decode.clear()
        self.parts.prefill.clear(self._slots_in_use)
        self.parts.digests.clear()
        self.parts.agents.forget_peers()
        for link in self.parts.control.links():
            self.parts.control.disconnect(link.endpoint)
        self._look_at_links_at = None
        self._doubted.clear()
        ended = self.outstanding.lose_machines()
        for request in self.outstanding.orphans:
            self.parts.agents.abandon(request)
        self._results.extend(ended)

    @property
    def _slots_in_use(self) -> list[int]:
        """The slots of the ring into which copies are in progress."""
        return [] if self.parts.packs is None else self.parts.packs.writing

    # --- waiting and time

    def _wait_s(self) -> float | None:
        """How long this turn may wait, in seconds; None for ever."""
        if self._commands or self._questions:
            return 0
        digests_wait_s = self.parts.digests.wait_s
        if digests_wait_s == 0:
            return 0
        if self.parts.packs or digests_wait_s is not None:
            return READING_PAUSE_S
        if self.parts.agents.is_busy:
            return self.parts.agents.pause_s
        if self.outstanding.orphans:  # nothing writes for them any more: they are reported now
            return 0
        serving = self.parts.serving
        if serving is not None and (serving.is_busy or self._clock() < self._serve_until):
            return SERVING_PAUSE_S
        due = self._next_due()
        return None if due is None else max(0.0, due - self._clock())

    def _next_due(self) -> float | None:
        """When time changes something by itself, in monotonic seconds; None for never."""
        decode, offers = self.parts.decode, self.parts.prefill.offers
        serving, agents = self.parts.serving, self.parts.agents
        due = [decode.next_due, offers.next_due, agents.next_due, self._look_at_links_at]
        due += [] if serving is None else [serving.next_due]
        return min((when for when in due if when is not None), default=None)

    def _tick(self) -> None:
        due, now = self._next_due(), self._clock()
        if due is not None and due <= now:
            self._carry_out(self.parts.decode.handle(events.Tick(), now))
            self._carry_out(self.parts.prefill.handle(events.Tick(), now))
            self._close_idle_links(now)

    def _close_idle_links(self, now: float) -> None:
        """Links cost sockets and heartbeats at both ends; what is known of a peer stays."""
        if self._look_at_links_at is None or now < self._look_at_links_at:
            return
        control, num_kept = self.parts.control, 0
        for link in control.links():
            if link.idle_s < LINK_KEPT_S or self.parts.decode.is_using(link.endpoint):
                num_kept += 1
            else:
                control.disconnect(link.endpoint)
        self._look_at_links_at = now + LINK_KEPT_S / 2 if num_kept else None

    def _serve(self) -> None:
        """Some paths of NIXL need the owner of the memory to take part in being read."""
        now, serving = self._clock(), self.parts.serving
        if self.parts.prefill.offers.any_granted:
            self._serve_until = max(self._serve_until, now + LINGER_S)
        if serving is None:
            return
        if serving.poll():
            self._begin_life(serving)
        if serving.is_busy or now < self._serve_until:
            try:
                serving.progress()
            except TransportError as error:  # its readers time out; those of other ranks go on
                self._log.warning("serving readers of this rank failed: %s", error)

    def _begin_life(self, serving: Serving) -> None:
        """Peers know another agent, to which nobody can connect: all offers of that life end."""
        parts, self._serve_until = self.parts, 0.0
        incarnation, metadata = new_incarnation(), serving.metadata()
        parts.slots.clear_all()
        parts.prefill.begin_life(incarnation, self._slots_in_use)
        self._results.extend(self.outstanding.lose_offers())
        self._count("serving_restarts")
        parts.description = msgspec.structs.replace(
            parts.description, incarnation=incarnation, agent=metadata
        )
        self._results.append(events.NewLife(parts.description))

    # --- what comes in

    def _on_command(self, command: events.Command) -> None:
        if isinstance(command, events.SetEngine):
            self.parts.agents.peers.engine_layouts = command.layouts
            self.parts.decode.loads.set_engine(command.engine)
            self.parts.decode.peers.warm_up()
            return
        is_admitted, report = self.outstanding.admit(command)
        if report is not None:
            self._results.append(report)
        if is_admitted:
            self._handle(command)

    def _on_received(self, item: Received) -> None:
        """One message or loss. What a stranger sends is logged, and changes nothing."""
        try:
            match item:
                case FromPeer():
                    self._on_request(item)
                case FromEndpoint():
                    self._doubted.discard(item.endpoint)
                    self._handle(
                        events.Answered(item.endpoint, messages.decode_answer(item.payload))
                    )
                case Lost():
                    self._on_lost(item)
        except RemoteProtocolError as error:
            self._count("messages_dropped")
            self._log.warning("control message dropped: %s", error)

    def _on_lost(self, lost: Lost) -> None:
        """Links also break where a side gets no processor for a while: so look a second time.

        A process that is gone refuses that at once.
        """
        endpoint, is_using = lost.endpoint, self.parts.decode.is_using
        is_used = is_using(endpoint)
        if is_used and endpoint not in self._doubted:
            self._doubted = {each for each in self._doubted if is_using(each)} | {endpoint}
            logger.info("the link to %s broke: %s; trying again", endpoint, lost.reason)
            self._handle(events.LinkBroken(endpoint))
            return
        self._doubted.discard(endpoint)
        if is_used:
            self._count("peers_lost")
            self._log.warning("lost %s: %s", endpoint, lost.reason)
        self._handle(events.EndpointLost(endpoint, lost.reason))

    def _on_request(self, item: FromPeer) -> None:
        try:
            message = messages.decode_to_rank(item.payload)
        except ForeignVersion:
            self.parts.control.reply(item.route, messages.encode(messages.VersionRefusal()))
            raise
        if isinstance(message, messages.StatusRequest):
            if len(self._questions) == MAX_QUESTIONS:
                self._log.warning("a status question is dropped: %d are waiting", MAX_QUESTIONS)
            else:
                self._questions.append((item.route, message))
            return
        self._serve_until = self._clock() + LINGER_S
        self._handle(events.Asked(item.route, message))

    def _answer_question(self) -> None:
        """One in a turn, after all else; a tool's question costs no load, whatever goes wrong."""
        if not self._questions:
            return
        route, question = self._questions.popleft()
        try:
            self.parts.control.reply(route, messages.encode(self._report_status(question)))
        except Exception as error:  # noqa: BLE001 - reporting only reads: nothing is in doubt
            self._log.warning("a status question is not answered: %s", repr(error))

    def _handle(self, event: events.DecodeEvent | events.PrefillEvent) -> None:
        """Let a machine decide; do that, and what follows from it, until nothing does."""
        self._carry_out(self._decide(event))

    def _decide(self, event: events.DecodeEvent | events.PrefillEvent) -> list[events.Action]:
        """Each side has its own events, but for ticks, which both have."""
        if isinstance(event, events.PrefillEvent):
            return self.parts.prefill.handle(event, self._clock())
        return self.parts.decode.handle(event, self._clock())

    def _is_wanted(self, action: events.DigestAction) -> bool:
        if isinstance(action, events.MakeDigest):
            return self.parts.prefill.is_digest_wanted(action.digest_request)
        return self.parts.decode.is_digest_wanted(action)

    # --- what goes out

    def _carry_out(self, actions: list[events.Action]) -> None:
        for action in actions:
            self._execute(action)
        while self._follow_up:
            for action in self._decide(self._follow_up.popleft()):
                self._execute(action)

    def _execute(self, action: events.Action) -> None:
        if isinstance(action, events.Notice):
            self._warn(action)
            return
        match action:
            case events.Send():
                self._send(action)
            case events.Reply():
                self.parts.control.reply(action.route, messages.encode(action.message))
            case events.Disconnect():
                self.parts.control.disconnect(action.endpoint)
            case events.WriteSlot():
                self.parts.slots.write(action.slot, action.generation)
            case events.ClearSlot():
                self.parts.slots.clear(action.slot)
            case events.LoadEnded() | events.OfferEnded():
                self._report(action)
            case events.PackChunk():
                packed = None if self.parts.packs is None else self.parts.packs.add(action)
                self._follow_up.extend([] if packed is None else [packed])
            case events.MakeDigest() | events.DigestLanded() | events.CompareDigest():
                event = self.parts.digests.add(action)
                self._follow_up.extend([] if event is None else [event])
            case _:
                self._follow_up.extend(self.parts.agents.execute(action))

    def _warn(self, action: events.Notice) -> None:
        match action:
            case events.NotWarm():
                message = "warm: %s: %s; it is asked again"
                self._log.warning(message, action.endpoint, action.reason)
            case events.PeerUnreadable():
                self._count("peers_unreadable")
                message = (
                    "%s answers, but its memory cannot be read: %s; loads from it fail at once, "
                    "and it is tried again after 1, 2, 4, ... up to 64 s"
                )
                logger.warning(message, action.peer, action.reason)
            case events.PeerReadable():
                logger.warning("%s can be read again", action.peer)
            case events.AskDenied():
                self._count("asks_denied")
                message = "denied an ask for offer %s: %s"
                self._log.warning(message, short(action.nonce), action.reason)

    def _send(self, action: events.Send) -> None:
        try:
            self.parts.control.send(action.endpoint, messages.encode(action.message))
            if self._look_at_links_at is None:
                self._look_at_links_at = self._clock() + LINK_KEPT_S
        except TransportError as error:
            self._follow_up.append(events.EndpointLost(action.endpoint, str(error)))

    def _report(self, end: events.LoadEnded | events.OfferEnded) -> None:
        report = self.outstanding.settle(end)
        if report is None:
            return
        self._results.append(report)
        if isinstance(report, events.LoadEnded):
            self._on_load_ended()
            if report.failure is not None:
                self._log_failure(report, report.failure)

    def _log_failure(self, report: events.LoadEnded, failure: events.Failure) -> None:
        """Say why, and what happened before; a load that nobody wants any more is no failure."""
        if failure.kind is events.FailureKind.DROPPED:
            logger.info("request %s: its load was cancelled", report.request)
            return
        logger.warning(
            "request %s: KV not loaded: %s (%s%s)",
            report.request,
            failure.detail,
            failure.kind.value,
            f"; {report.peer}" if report.peer else "",
        )
        for line in self._story(report.request):
            logger.warning("  %s", line)

    def _story(self, request: RequestId) -> list[str]:
        """Its lines, but of so many loads a second only: thousands may fail at once."""
        now, earlier = self._clock(), self._stories_at
        if len(earlier) == STORIES_PER_S and now < earlier[0] + 1.0:
            return ["(many loads fail: nixl-kv status --request tells what happened to this one)"]
        earlier.append(now)
        return self.parts.event_log.story_lines(request, STORY_LINES)

    def _publish_counts(self) -> None:
        """One record at a time: strangers may ask as much as they like while nobody takes it."""
        if self._results:
            return
        counts = self.parts.counts
        if counts:
            self._results.append(events.Counts(dict(counts)))
            counts.clear()

    def _count(self, name: str) -> None:
        self.parts.counts[name] += 1
