"""One turn of a rank's transfer thread.

One thread per rank owns the NIXL agents, the sockets and all protocol state, without locks. The
caller's thread uses two queues: commands in, results out. Each turn waits for the sockets, feeds
events to the state machines, and carries out their actions. The thread polls NIXL only while a read
is in flight or a peer may read this rank, and otherwise uses no CPU.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from nixl_kv.engine.admission import Admission
from nixl_kv.engine.clock import LoopClock
from nixl_kv.engine.event_log import EventLog
from nixl_kv.engine.peer_links import PeerLinks
from nixl_kv.engine.probe import Prober
from nixl_kv.errors import (
    REPEATED_LOG_S,
    REQUEST_LINES,
    ForeignVersion,
    LimitedLog,
    RemoteProtocolError,
    TransportError,
    get_logger,
    shown_id,
)
from nixl_kv.feature import Feature, Worker
from nixl_kv.ids import Endpoint, Incarnation, Nonce, RequestId, new_incarnation, short
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.decode import DecodeMachine
from nixl_kv.protocol.prefill import PrefillMachine
from nixl_kv.reading.agents import Agents
from nixl_kv.transport.base import (
    LINK_KEPT_S,
    NEEDS_ENGINE_KEY,
    ControlPlane,
    FromEndpoint,
    FromPeer,
    Lost,
    Proved,
    Received,
    SlotPage,
)
from nixl_kv.transport.ucx.serving import Serving

logger = get_logger(__name__)

SERVING_PAUSE_S: Final = 0.001
# Between two looks at the GPU's stream, which take 2 us: a chunk of a prompt takes tens of ms.
WRITING_PAUSE_S: Final = 0.0005
# The time that one turn spends at most on received messages. Heartbeats must not wait for the
# messages of hundreds of peers.
RECEIVING_S: Final = 0.05
# A longer description is decoded on another thread. 550 kB, of 16 ranks and 126 layers, take 18 ms
# to decode and check; this thread then only compares summaries, in 5 to 10 ms.
BACKGROUND_BYTES: Final = 32 << 10
# Descriptions that wait for that thread. Decoding further ones here slows down their senders.
MAX_DECODING: Final = 8
STORY_LINES: Final = 16  # transitions that the log shows below the line about a failed load
UNUSABLE: Final = (
    "%s cannot be used: %s; loads from it fail at once, and it is tried again after 1, 2, 4, ... "
    "up to 64 s"
)
OVERDUE: Final = (
    "engine %r has read the KV of request %s for so long that it must hang or lie: its blocks are "
    "taken back, and the engine will find its read void; restart it"
)

# The end of a rank no longer waits until prefill's ranks have its last messages.
FAREWELL_S: Final = 0.2

STOPPED: Final = events.Failure(events.FailureKind.DROPPED, "this rank has stopped")
_THREAD_DIED: Final = events.Failure(events.FailureKind.INTERNAL, "the transfer thread died")


@dataclass
class Parts:
    """Everything that the transfer thread owns. `engine.build_parts` makes it on that thread.

    Only the description changes, when the rank begins a new incarnation.
    """

    control: ControlPlane
    background: Executor  # decodes long descriptions, on one thread
    prefill: PrefillMachine
    decode: DecodeMachine
    agents: Agents
    serving: Serving | None  # lets peers read this rank; None if it only decodes
    admission: Admission
    features: tuple[Feature, ...]
    slots: SlotPage
    event_log: EventLog
    links: PeerLinks
    prober: Prober
    counts: events.Counts  # since they were last published
    description: messages.RankDescription

    @property
    def workers(self) -> list[Worker]:
        return [each.worker for each in self.features if each.worker is not None]


class Outstanding:
    """The results that the rank owes to the caller, so that none is lost with the machines.

    A load is owed a report from `StartLoad` on, an offer from `PublishOffer` on: only then its
    blocks are pinned. A reader may end an offer before that command; the end then waits for it.
    Each report is given once, because vLLM's engine may end for a second one.
    """

    def __init__(self, results: deque[events.Result]) -> None:
        self.orphans: set[RequestId] = set()
        """Loads whose machine is gone."""
        self._results = results
        self._loads: dict[RequestId, int] = {}  # number of tokens
        self._unready: set[RequestId] = set()  # early loads, until `LoadReady`
        self._prepared: dict[Nonce, events.OfferEnd | None] = {}  # None: it has not ended
        self._published: dict[Nonce, RequestId] = {}
        self._granted: set[Nonce] = set()  # of these and of the prepared ones

    def __repr__(self) -> str:
        return (
            f"<Outstanding: {len(self._loads)} loads ({len(self.orphans)} orphans), "
            f"{len(self) - len(self._loads)} offers>"
        )

    def __len__(self) -> int:
        return len(self._loads) + len(self._prepared) + len(self._published)

    def admit(self, command: events.Command) -> bool:  # noqa: C901 - a case per command
        """Record a command, and return whether the machines may have it.

        The blocks of an offer that has ended may belong to another request by now.
        """
        match command:
            case events.PrepareLoad() if command.ticket.is_early:
                self._unready.add(command.request)
            case events.CancelLoad():
                self._unready.discard(command.request)
            case events.StartLoad():
                self._loads[command.request] = command.num_tokens
            case events.PrepareOffer():  # of an early request, one with each step
                return self._prepared.setdefault(command.nonce, None) is None
            case events.PublishOffer() if command.nonce not in self._published:
                end = self._prepared.pop(command.nonce, events.OfferEnd.LOST)
                if end is not None:
                    self._results.append(events.OfferEnded(command.nonce, command.request, end))
                    return False
                self._published[command.nonce] = command.request
                if command.nonce in self._granted:
                    self._results.append(events.OfferGranted(command.request))
            case events.WithdrawOffer() if not command.is_final:
                # The request is computed again. Its readers have ended, and none will ask again.
                if self._prepared.get(command.nonce) is not None:
                    return False
                self._prepared.pop(command.nonce, None)
                self._granted.discard(command.nonce)
            case events.WithdrawOffer():
                self._granted.discard(command.nonce)
                return self._prepared.pop(command.nonce, None) is None
            case events.RevokeOffer():
                return command.nonce in self._published or command.nonce in self._prepared
        return True

    def grant(self, nonce: Nonce) -> None:
        """A rank has granted the offer, or a part of it, to a reader."""
        request = self._published.get(nonce)
        if nonce in self._granted or (request is None and nonce not in self._prepared):
            return
        self._granted.add(nonce)
        if request is not None:
            self._results.append(events.OfferGranted(request))

    def announce(self, ready: events.LoadReady) -> None:
        if ready.request in self._unready:
            self._unready.remove(ready.request)
            self._results.append(ready)

    def settle(self, report: events.LoadEnded | events.OfferEnded) -> bool:
        """Report a result to the caller if it is owed, and return whether it was."""
        if isinstance(report, events.LoadEnded):
            self.orphans.discard(report.request)
            is_owed = self._loads.pop(report.request, None) is not None
        else:
            is_owed = self._published.pop(report.nonce, None) is not None
            self._granted.discard(report.nonce)
            if report.nonce in self._prepared:
                self._prepared[report.nonce] = report.end
        if is_owed:
            self._results.append(report)
        return is_owed

    def lose_machines(self) -> None:
        """All machines are gone: report the offers. `drained` has the reports of the loads."""
        self.orphans.update(self._loads)
        for request in list(self._unready):  # to start them, so that they fail
            self.announce(events.LoadReady(request))
        self.lose_offers()

    def lose_offers(self) -> None:
        lost = events.OfferEnd.LOST
        self._granted.clear()
        self._prepared = {nonce: end or lost for nonce, end in self._prepared.items()}
        for nonce, request in list(self._published.items()):
            self.settle(events.OfferEnded(nonce, request, lost))

    def drained(
        self, is_read: Callable[[RequestId], bool], why: events.Failure = _THREAD_DIED
    ) -> list[events.LoadEnded]:
        """The reports of orphans into whose blocks no read can write any longer."""
        return [
            events.LoadEnded(request, self._loads[request], why)
            for request in self.orphans
            if not is_read(request)
        ]


_Event: TypeAlias = events.DecodeEvent | events.PrefillEvent
# A description from an endpoint, decoded on the background thread.
_Decoded: TypeAlias = tuple[Endpoint, "Future[messages.Answer]"]


class _Admitting(NamedTuple):
    route: bytes
    asked: messages.Admit
    sources: tuple[str, ...]  # the addresses that this rank connects from
    refused: tuple[str, ...]


class Loop:
    """Runs one turn after another. If a turn raises, only `restart` may follow.

    `report_status` makes the answer to a tool. `on_load_ended` is called when a load has a result.
    """

    def __init__(
        self,
        parts: Parts,
        commands: deque[events.Command],
        results: deque[events.Result],
        *,
        clock: LoopClock,
        report_status: Callable[[messages.StatusRequest], messages.Status],
        on_load_ended: Callable[[], None],
    ) -> None:
        self.parts = parts
        self.outstanding = Outstanding(results)
        self._commands = commands
        self._results = results
        self._clock = clock
        # The begins and ends of vLLM's steps, which its thread counts, and those handled here.
        self.num_steps = self._num_steps_seen = 0
        self._report_status = report_status
        self._on_load_ended = on_load_ended
        self._received: deque[Received] = deque()
        self._writes: deque[events.AwaitWrites] = deque()  # on the GPU's stream, in its order
        self._decoding: deque[_Decoded] = deque()
        self._look_at_links_at: float | None = None  # while there are links
        self._doubted: set[Endpoint] = set()  # their link broke and no message came since
        # Answered once this turn has let the readers in.
        self._admitting: list[_Admitting] = []
        self._log = LimitedLog(logger, clock)
        self._request_log = LimitedLog(logger, clock, lines=REQUEST_LINES)
        # Loads from a peer that is known to be unusable may fail many times a second.
        self._known_log = LimitedLog(logger, clock, interval_s=REPEATED_LOG_S)
        self._workers = parts.workers
        self._worker_of = {action: each for each in self._workers for action in each.actions}
        own = (parts.control, *self._workers, parts.agents, parts.serving)
        self._to_close: list[Any] = [part for part in (*own, *parts.features) if part is not None]

    def wake(self) -> None:
        """End a wait. Any thread may call this."""
        self.parts.control.wake()

    def close(self) -> None:
        """Release everything, and report every load into which nothing can write any longer.

        Call it after the last turn, and again after an error: closed parts stay closed.

        Raises:
            TransportError: if an agent is not proven to be gone; its loads stay owed.
            Exception: the first other error of closing a part.
        """
        self.parts.slots.clear_all()  # first of all, so that readers of this rank notice
        self.parts.background.shutdown(cancel_futures=True)
        errors: list[Exception] = []
        for part in list(self._to_close):
            try:
                if part is self.parts.control:
                    self._leave()
                else:
                    part.close()
                self._to_close.remove(part)
            except Exception as error:  # noqa: BLE001, PERF203 - raised when the others are closed
                errors.append(error)
        while self._commands:
            self.outstanding.admit(self._commands.popleft())
        self.outstanding.lose_machines()
        for load in self.outstanding.drained(self.parts.agents.is_read, STOPPED):
            self._report(load)
        if errors:
            raise errors[0]

    def _leave(self) -> None:
        """Close the control plane; first tell the ranks that have let this one in."""
        farewells = [
            farewell
            for peer in self.parts.decode.peers.known.values()
            for farewell in self.parts.decode.peers.leave(peer)
        ]
        for farewell in farewells:
            self._send(farewell)
        self.parts.control.close(FAREWELL_S if farewells else 0.0)

    def restart(self) -> None:
        """The machines are in doubt: empty them, and fail all that they held.

        Offers are reported at once, loads when their reads have ended or were stopped.
        """
        parts = self.parts
        parts.counts.count("thread_restarts")
        parts.slots.clear_all()  # first of all: no grant is valid any longer
        for queue in (self._received, self._writes, self._decoding, self._doubted):
            queue.clear()
        self._admitting.clear()
        parts.admission.drop_peers()
        parts.decode.clear()
        self._execute_all(parts.prefill.clear())
        for worker in self._workers:
            worker.clear()
        parts.agents.forget_peers()
        parts.prober.clear()
        for link in parts.control.links():
            parts.control.disconnect(link.endpoint)
        self._look_at_links_at = None
        self.outstanding.lose_machines()
        for request in self.outstanding.orphans:
            parts.agents.abandon(request)

    def turn(self) -> None:  # noqa: C901 - a line or two per part
        self._receive()
        parts = self.parts
        for written in self._pop_written() if self._writes else ():
            self._handle(written)
        for event in parts.agents.poll():
            self._handle(event)
        for worker in self._workers:
            for ended in worker.poll():
                self._handle(ended)
        if parts.prober.is_busy:
            for wanted in parts.prober.poll():
                self._handle(wanted)
        if self.outstanding.orphans:
            for orphan in self.outstanding.drained(parts.agents.is_read):
                self._report(orphan)
        due, now = self._next_due(), self._clock()
        if due is not None and due <= now:
            self._handle(events.Tick())
            self._close_idle_links(now)
        parts.admission.poll(now)
        if parts.serving is not None:
            self._serve(parts.serving)
        if logger.isEnabledFor(logging.DEBUG):  # it costs as much as there are loads and offers
            parts.prefill.check()
            parts.decode.check()
        if not self._results:  # one record waits at a time, however long the caller does not pop it
            self._publish_counts()

    def _pop_written(self) -> list[events.MarkWritten]:
        marks: list[events.MarkWritten] = []
        while self._writes and self._writes[0].is_done():
            marks += self._writes.popleft().marks
        return marks

    # --- waiting and time

    def _wait_s(self) -> float | None:
        """How long this turn may wait, in seconds; None: without a limit."""
        has_decoded = self._decoding and self._decoding[0][1].done()
        if self._commands or has_decoded:
            return 0
        works = [wait_s for each in self._workers if (wait_s := each.wait_s) is not None]
        rest_s = self._wait_for_rest_s()
        return min(works if rest_s is None else (*works, rest_s), default=None)

    def _wait_for_rest_s(self) -> float | None:
        """The same without the workers."""
        parts = self.parts
        if self._writes:
            return WRITING_PAUSE_S
        if parts.agents.is_busy:
            return parts.agents.pause_s
        if self.outstanding.orphans:  # nothing writes into their blocks: report them now
            return 0
        if parts.serving is not None and parts.serving.is_awake:
            return SERVING_PAUSE_S
        due = self._next_due()
        return None if due is None else max(0.0, due - self._clock())

    def _next_due(self) -> float | None:
        """When time alone changes something, in monotonic seconds; None: never."""
        parts = self.parts
        due = [parts.decode.next_due, parts.agents.next_due, self._look_at_links_at]
        due += [parts.admission.next_due, parts.prober.next_due]
        if parts.serving is not None:  # else this rank offers nothing
            due += [parts.prefill.next_due, parts.serving.next_due]
        return min((when for when in due if when is not None), default=None)

    def _close_idle_links(self, now: float) -> None:
        # Links cost sockets and heartbeats at both ends. Peers stay known without them.
        if self._look_at_links_at is None or now < self._look_at_links_at:
            return
        self._look_at_links_at = None
        for link in self.parts.control.links():
            if link.idle_s < LINK_KEPT_S or self.parts.decode.is_using(link.endpoint):
                self._look_at_links_at = now + LINK_KEPT_S / 2
            else:
                self.parts.control.disconnect(link.endpoint)

    def _serve(self, serving: Serving) -> None:
        if self.parts.prefill.any_granted:
            serving.stay_awake()
        if serving.poll():
            self._begin_life(serving)
        if serving.is_awake:
            try:
                serving.progress()
            except TransportError as error:  # its readers time out; other ranks go on
                self._log.warning("serving readers of this rank failed: %s", error)

    def _begin_life(self, serving: Serving) -> None:
        # The agent was replaced. Peers know the old one, so all offers of this life end.
        parts = self.parts
        incarnation, metadata = new_incarnation(), serving.metadata()
        parts.slots.clear_all()
        self._execute_all(parts.prefill.begin_life(incarnation))
        self.outstanding.lose_offers()
        for feature in parts.features:
            feature.begin_life()
        parts.counts.count("replaced_agents", label="closed_listener")
        parts.description = msgspec.structs.replace(
            parts.description, incarnation=incarnation, agent=metadata
        )
        self._results.append(events.NewLife(parts.description))

    # --- commands and messages

    def _receive(self) -> None:
        if not self._received:  # messages beyond those wait at their senders
            wait_s = self._wait_s()
            self._clock.begin_wait(wait_s)
            self._received.extend(self.parts.control.poll(wait_s))
        self._clock.end_wait()
        if self._num_steps_seen != self.num_steps:
            self._num_steps_seen = self.num_steps
            self._handle(events.Stepped())
        # Commands first: a reader that asks for an offer has its ticket, and the ticket left after
        # the command.
        while self._commands:
            self._on_command(self._commands.popleft())
        until = self._clock() + RECEIVING_S
        while self._received:
            self._on_received(self._received.popleft())
            if self._clock() >= until:
                break
        if self._admitting:
            self._answer_admitted()
        # One in a turn: checks take milliseconds.
        if self._decoding and self._decoding[0][1].done():
            self._on_received(self._decoding.popleft())

    def _on_command(self, command: events.Command) -> None:
        match command:
            case events.SetEngine():
                self.parts.agents.peers.set_layouts(command.layouts)
                self.parts.decode.set_engine(command.engine, command.directory, command.finds_at)
            case events.AwaitWrites():
                self._writes.append(command)
            case _ if self.outstanding.admit(command):
                self._handle(command)
            case events.PrepareOffer():
                self._execute_all(self.parts.prefill.refuse(command))

    def _on_received(self, item: Received | _Decoded) -> None:
        """Handle one message or loss. An invalid message is logged and changes nothing."""
        try:
            match item:
                case FromPeer():
                    self._on_request(item)
                case FromEndpoint():
                    self._doubted.discard(item.endpoint)
                    self._on_answer(item)
                case (endpoint, decoded):
                    self._handle(events.Answered(endpoint, decoded.result()))
                case Lost():
                    self._on_lost(item)
        except RemoteProtocolError as error:
            self.parts.counts.count("dropped_messages")
            self._log.warning("control message dropped: %s", error)

    def _on_answer(self, item: FromEndpoint) -> None:
        is_long = len(item.payload) > BACKGROUND_BYTES and messages.is_description(item.payload)
        if is_long and len(self._decoding) < MAX_DECODING:
            decoding = self.parts.background.submit(messages.decode_answer, item.payload)
            self._decoding.append((item.endpoint, decoding))
            decoding.add_done_callback(lambda _: self.wake())
        else:
            self._handle(events.Answered(item.endpoint, messages.decode_answer(item.payload)))

    def _on_lost(self, lost: Lost) -> None:
        # Try a broken link once more: it also breaks if a side gets no CPU for a while. A process
        # that is gone refuses the second connection at once.
        endpoint, is_using = lost.endpoint, self.parts.decode.is_using
        is_used = is_using(endpoint)
        if is_used and endpoint not in self._doubted:
            self._doubted = {each for each in self._doubted if is_using(each)} | {endpoint}
            logger.info("the link to %s broke (%s); connecting again", endpoint, lost.reason)
            self._handle(events.LinkBroken(endpoint))
            return
        self._doubted.discard(endpoint)
        if is_used:
            self.parts.counts.count("lost_peers")
            self._log.warning("lost %s (%s); loads that need it fail", endpoint, lost.reason)
        self._handle(events.EndpointLost(endpoint, lost.reason))

    def _on_request(self, item: FromPeer) -> None:
        try:
            message = messages.decode_to_rank(item.payload)
        except ForeignVersion:
            self.parts.control.reply(item.route, messages.encode(messages.VersionRefusal()))
            raise
        if isinstance(message, messages.StatusRequest):
            self._answer_question(item.route, message)
            return
        if item.proved is Proved.TOOLS_KEY:
            refusal = messages.KeyRefusal(
                incarnation=self.parts.description.incarnation,
                reason=f"{type(message).__name__} {NEEDS_ENGINE_KEY}",
            )
            self.parts.control.reply(item.route, messages.encode(refusal))
            raise RemoteProtocolError(refusal.reason)
        if isinstance(message, messages.Paused):
            if message.incarnation == self.parts.description.incarnation:
                self._handle(events.Paused(number=message.number, is_paused=message.is_paused))
            return
        reader = Incarnation(message.reader.incarnation)
        if isinstance(message, messages.Leave):
            # One for a former life must not end what the reader has asked for in this one.
            if message.incarnation == self.parts.description.incarnation:
                self.parts.admission.drop(reader)
            return
        if self.parts.serving is not None:
            self.parts.serving.stay_awake()
        if isinstance(message, messages.Admit):
            self._admit(item.route, message)
            return
        self.parts.admission.hear(reader)
        self._handle(events.Asked(item.route, message))

    def _admit(self, route: bytes, message: messages.Admit) -> None:
        refused: tuple[str, ...] = ()
        if message.sources:
            refused = self.parts.admission.admit(
                Incarnation(message.reader.incarnation), message.sources
            )
        sources = self.parts.admission.sources(message.listens)
        self._admitting.append(_Admitting(route, message, sources, refused))

    def _answer_admitted(self) -> None:
        """Let all readers of this turn in at once, and only then tell them."""
        waiting, self._admitting = self._admitting, []
        has_room = self.parts.admission.apply()
        for route, asked, sources, refused in waiting:
            if not has_room:
                self.parts.admission.drop(Incarnation(asked.reader.incarnation))
            answer = messages.Admitted(
                incarnation=self.parts.description.incarnation,
                reader=asked.reader,
                sources=sources,
                refused=refused if has_room else asked.sources,
                token=self._invite() if asked.maps else b"",
            )
            self.parts.control.reply(route, messages.encode(answer))

    def _invite(self) -> bytes:
        tokens = (each.invite() for each in self.parts.features)
        return next((token for token in tokens if token), b"")

    def _answer_question(self, route: bytes, question: messages.StatusRequest) -> None:
        """Answer a status request, or begin its probe. No error in a status may cost a load."""
        if question.probe:
            for wanted in self.parts.prober.begin(route, question.probe):
                self._handle(wanted)
            return
        try:
            self.parts.control.reply(route, messages.encode(self._report_status(question)))
        except Exception as error:  # noqa: BLE001 - reporting only reads: nothing is in doubt
            self._log.warning("status request not answered: %s", repr(error))

    # --- the machines, and their actions

    def _handle(self, event: _Event) -> None:
        parts, follow_up = self.parts, deque((event,))
        while follow_up:
            event, now = follow_up.popleft(), self._clock()
            actions: list[events.Action] = []
            if not isinstance(event, events.PrefillEvent) or isinstance(event, events.Tick):
                actions += parts.decode.handle(event, now)
            if isinstance(event, events.PrefillEvent):
                actions += parts.prefill.handle(event, now)
            for action in actions:
                follow_up.extend(self._execute(action))

    def _execute_all(self, actions: events.Actions) -> None:
        """Carry out actions that no event follows."""
        for action in actions:
            self._execute(action)

    def _execute(self, action: events.Action) -> Sequence[_Event]:  # noqa: C901 - a case per action
        parts = self.parts
        event: _Event | None = None
        match action:
            case events.Send():
                event = self._send(action)
            case events.Reply():
                self._reply(action)
            case events.Disconnect():
                parts.control.disconnect(action.endpoint)
            case events.WriteSlot():
                parts.slots.write(action.slot, action.fence_token)
            case events.ClearSlot():
                parts.slots.clear(action.slot)
            case events.EarlySlotFree() | events.EarlyReleased():
                self._results.append(action)
            case events.LoadReady():
                self.outstanding.announce(action)
            case events.LoadEnded() | events.OfferEnded():
                self._report(action)
            case events.PeerUnusable() | events.PeerUsable() | events.AskDenied():
                self._warn(action)
            case _ if isinstance(action, events.WorkAction):
                worker = self._worker_of.get(type(action))
                event = None if worker is None else worker.add(action)
            case _:
                parts.admission.precede(action)
                return parts.agents.execute(action)
        return () if event is None else (event,)

    def _reply(self, action: events.Reply) -> None:
        self.parts.control.reply(action.route, messages.encode(action.message))
        if isinstance(action.message, messages.Grant):
            self.outstanding.grant(Nonce(action.message.nonce))

    def _warn(self, action: events.Notice) -> None:
        match action:
            case events.PeerUnusable():
                self.parts.counts.count("unusable_peers")
                logger.warning(UNUSABLE, action.peer, action.reason)
            case events.PeerUsable():
                logger.warning("%s can be used again", action.peer)
            case events.AskDenied(is_usual=True):
                logger.debug("denied an ask for cached blocks: %s", action.reason)
            case events.AskDenied():
                self.parts.counts.count("denied_asks")
                message = "denied an ask for offer %s: %s"
                self._log.warning(message, short(action.nonce), action.reason)

    def _send(self, action: events.Send) -> events.EndpointLost | None:
        try:
            self.parts.control.send(action.endpoint, messages.encode(action.message))
        except TransportError as error:
            return events.EndpointLost(action.endpoint, str(error))
        if self._look_at_links_at is None:
            self._look_at_links_at = self._clock() + LINK_KEPT_S
        return None

    def _publish_counts(self) -> None:
        parts = self.parts
        for state in parts.decode.peers.pop_changed():
            parts.counts.measure("peers", parts.decode.peers.num_in[state], state.name.lower())
        if parts.counts:
            self._results.append(parts.counts.pop())

    def _report(self, report: events.LoadEnded | events.OfferEnded) -> None:
        # An idle rank makes no further turn, so the caller gets a load's counts with its end.
        self._publish_counts()
        if not self.outstanding.settle(report):
            return
        if isinstance(report, events.OfferEnded):
            if report.end is events.OfferEnd.OVERDUE:
                self._log.warning(OVERDUE, report.reader or "", report.request)
            return
        self._on_load_ended()
        if report.failure is None and report.peer is not None:
            self.parts.links.add(report.peer, report.reads)
        if report.failure is not None:
            self._log_failure(report, report.failure)

    def _log_failure(self, report: events.LoadEnded, failure: events.Failure) -> None:
        """Log why a load failed, and its transitions, for REQUEST_LINES a second of each kind."""
        request = shown_id(report.request)
        if failure.kind is events.FailureKind.DROPPED:
            self._request_log.info("request %s: its load was cancelled", request)
            return
        if report.is_cached:  # its owner may have reused the blocks
            message = "request %s: cached KV of %s not read: %s"
            self._request_log.info(message, request, report.peer, failure.detail)
            return
        where = f"{failure.kind.value}; {report.peer}" if report.peer else failure.kind.value
        message = "request %s: KV not loaded: %s (%s)"
        if failure.is_known:
            about = str(report.peer)
            self._known_log.warning(message, request, failure.detail, where, about=about)
            return
        about = failure.kind.value
        if not self._request_log.warning(message, request, failure.detail, where, about=about):
            return
        for line in self.parts.event_log.story_lines(report.request, STORY_LINES):
            logger.warning("  %s", line)
