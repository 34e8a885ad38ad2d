"""The transfer thread of a rank: its life, and one turn of its loop.

One thread per rank owns the NIXL agents, the sockets and all protocol state, without locks. The
caller's thread uses two queues: commands in, results out. Each turn waits for the sockets, feeds
events to the state machines, and carries out their actions. The thread polls NIXL only while a read
is in flight or a peer may read this rank, and otherwise uses no CPU.
"""

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import msgspec

from nixl_kv.engine.event_log import EventLog
from nixl_kv.engine.serving import Serving
from nixl_kv.errors import (
    ForeignVersion,
    LimitedLog,
    RemoteProtocolError,
    TransportError,
    get_logger,
    run_guarded,
)
from nixl_kv.ids import Endpoint, Nonce, RequestId, new_incarnation, short
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.decode import DecodeMachine, NameSlices
from nixl_kv.protocol.prefill import PrefillMachine
from nixl_kv.reading.agent import READING_PAUSE_S
from nixl_kv.reading.paths import Feature, Packer
from nixl_kv.reading.replace import Agents
from nixl_kv.transport.base import (
    ControlPlane,
    FromEndpoint,
    FromPeer,
    Lost,
    Received,
    SlotPage,
)

logger = get_logger(__name__)

SERVING_PAUSE_S: Final = 0.001
# The time that one turn spends at most on received messages. Heartbeats must not wait for the
# messages of hundreds of peers.
RECEIVING_S: Final = 0.05
# A longer description is decoded on another thread. 550 kB, of 16 ranks and 126 layers, take 18 ms
# to decode and check; this thread then only compares summaries, in 5 to 10 ms.
BACKGROUND_BYTES: Final = 32 << 10
# Descriptions that wait for that thread. Decoding further ones here slows down their senders.
MAX_DECODING: Final = 8
# How long this rank still serves reads after a reader's last message. A read may go on although its
# lease expired; readers send a heartbeat at least each second.
LINGER_S: Final = 2.0
# How long an idle link stays open. Opening it again costs one or two round trips.
LINK_KEPT_S: Final = 5.0
# How long `stop` waits. Posting a read of 2 million runs takes 8 s, destroying an agent 1 s.
STOP_TIMEOUT_S: Final = 30.0
# The first and the longest pause between two attempts to close; each is twice as long as the last.
# An attempt may run a full garbage collection, which keeps the GIL from all other threads.
CLOSING_PAUSES_S: Final = (0.01, 1.0)
# Transitions that the log shows below the line about a failed load, for this number of failed loads
# per second. Others get one line each.
STORY_LINES: Final = 10
STORIES_PER_S: Final = 20
# Status requests that wait for an answer, over all connections.
MAX_QUESTIONS: Final = 8

STOPPED: Final = events.Failure(events.FailureKind.DROPPED, "this rank has stopped")
_THREAD_DIED: Final = events.Failure(events.FailureKind.INTERNAL, "the transfer thread died")


class Digests(Protocol):
    """Computes the digests that prove what loads have read; see `verify`."""

    @property
    def name_slices(self) -> NameSlices: ...

    @property
    def wait_s(self) -> float | None: ...  # seconds until the next poll; None while idle

    def __len__(self) -> int: ...

    def add(self, action: events.DigestAction) -> events.DigestEvent | None: ...

    def poll(
        self, is_wanted: Callable[[events.DigestAction], bool]
    ) -> Sequence[events.DigestEvent]: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


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
    digests: Digests | None  # of loads that are verified
    packs: Packer | None  # if this rank packs
    serving: Serving | None  # lets peers read this rank; None if it only decodes
    features: tuple[Feature, ...]
    slots: SlotPage
    event_log: EventLog
    counts: defaultdict[str, float]  # since they were last published, by counter
    description: messages.RankDescription


@dataclass
class _Offer:
    request: RequestId
    is_published: bool = False
    end: events.OfferEnd | None = None  # it ended before it was published


class Outstanding:
    """The results that the rank owes to the caller, so that none is lost with the machines.

    A load is owed a report from `StartLoad` on, an offer from `PublishOffer` on: only then its
    blocks are pinned. A reader may end an offer before that command; the end then waits for it.
    Each report is given once, because vLLM's engine may end for a second one.
    """

    def __init__(self) -> None:
        self.orphans: set[RequestId] = set()
        """Loads whose machine is gone."""
        self._loads: dict[RequestId, int] = {}  # number of tokens
        self._offers: dict[Nonce, _Offer] = {}

    def __repr__(self) -> str:
        return (
            f"<Outstanding: {len(self._loads)} loads ({len(self.orphans)} orphans), "
            f"{len(self._offers)} offers>"
        )

    def __len__(self) -> int:
        return len(self._loads) + len(self._offers)

    def admit(self, command: events.Command) -> tuple[bool, events.OfferEnded | None]:
        """Record a command; return whether the machines may have it, and a report that is due.

        The blocks of an offer that has ended may belong to another request by now.
        """
        match command:
            case events.StartLoad():
                self._loads[command.request] = command.num_tokens
            case events.PrepareOffer():
                self._offers[command.nonce] = _Offer(command.request)
            case events.PublishOffer():
                return self._publish(command)
            case events.WithdrawOffer():
                offer = self._offers.pop(command.nonce, _Offer(RequestId("")))
                return offer.end is None, None
            case events.RevokeOffer():
                return command.nonce in self._offers, None
        return True, None

    def settle(
        self, report: events.LoadEnded | events.OfferEnded
    ) -> events.LoadEnded | events.OfferEnded | None:
        """Return the report if the caller is owed it."""
        if isinstance(report, events.LoadEnded):
            self.orphans.discard(report.request)
            return None if self._loads.pop(report.request, None) is None else report
        offer = self._offers.get(report.nonce)
        if offer is None or not offer.is_published:
            if offer is not None:
                offer.end = report.end
            return None
        del self._offers[report.nonce]
        return report

    def lose_machines(self) -> list[events.OfferEnded]:
        """All machines are gone: report the offers. `drained` reports the loads."""
        self.orphans.update(self._loads)
        return self.lose_offers()

    def lose_offers(self) -> list[events.OfferEnded]:
        ended: list[events.OfferEnded] = []
        for nonce, offer in list(self._offers.items()):
            if offer.is_published:
                del self._offers[nonce]
                ended.append(events.OfferEnded(nonce, offer.request, events.OfferEnd.LOST))
            elif offer.end is None:
                offer.end = events.OfferEnd.LOST
        return ended

    def drained(
        self, is_read: Callable[[RequestId], bool], why: events.Failure = _THREAD_DIED
    ) -> list[events.LoadEnded]:
        """The reports of orphans into whose blocks no read can write any longer."""
        return [
            events.LoadEnded(request, self._loads[request], why)
            for request in self.orphans
            if not is_read(request)
        ]

    def _publish(self, command: events.PublishOffer) -> tuple[bool, events.OfferEnded | None]:
        lost = _Offer(command.request, end=events.OfferEnd.LOST)
        offer = self._offers.get(command.nonce, lost)
        if offer.end is None:
            offer.is_published = True
            return True, None
        self._offers.pop(command.nonce, None)
        return False, events.OfferEnded(command.nonce, command.request, offer.end)


# A description from an endpoint, decoded on the background thread.
_Decoded: TypeAlias = tuple[Endpoint, "Future[messages.Answer]"]


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
        clock: Callable[[], float],
        report_status: Callable[[messages.StatusRequest], messages.Status],
        on_load_ended: Callable[[], None],
    ) -> None:
        self.parts = parts
        self.outstanding = Outstanding()
        self._commands = commands
        self._results = results
        self._clock = clock
        self._report_status = report_status
        self._on_load_ended = on_load_ended
        self._follow_up: deque[events.DecodeEvent | events.PrefillEvent] = deque()
        self._received: deque[Received] = deque()
        self._decoding: deque[_Decoded] = deque()
        self._questions: deque[tuple[bytes, messages.StatusRequest]] = deque()
        self._stories_at: deque[float] = deque(maxlen=STORIES_PER_S)
        self._serve_until = 0.0
        self._look_at_links_at: float | None = None  # while there are links
        self._doubted: set[Endpoint] = set()  # their link broke and no message came since
        self._to_close: list[Callable[[], None]] | None = None  # once `close` has begun
        self._log = LimitedLog(logger, clock)

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
        parts = self.parts
        parts.slots.clear_all()  # first of all, so that readers of this rank notice
        if self._to_close is None:
            own = (parts.control, parts.packs, parts.digests, parts.agents, parts.serving)
            self._to_close = [part.close for part in (*own, *parts.features) if part is not None]
        parts.background.shutdown(cancel_futures=True)
        errors: list[Exception] = []
        for close in list(self._to_close):
            try:
                close()
                self._to_close.remove(close)
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
        if not self._received:  # messages beyond those wait at their senders
            self._received.extend(self.parts.control.poll(self._wait_s()))
        # Commands first: a reader that asks for an offer has its ticket, and the ticket left after
        # the command.
        while self._commands:
            self._on_command(self._commands.popleft())
        until = self._clock() + RECEIVING_S
        while self._received:
            self._on_received(self._received.popleft())
            if self._clock() >= until:
                break
        if self._has_decoded:  # one in a turn: to check one takes milliseconds
            self._on_received(self._decoding.popleft())
        self._poll_parts()
        self._tick()
        self._serve()
        self._answer_question()
        self._publish_counts()

    def _poll_parts(self) -> None:
        for event in self.parts.agents.poll():
            self._handle(event)
        if self.parts.digests is not None:
            for digest_event in self.parts.digests.poll(self._is_wanted):
                self._handle(digest_event)
        for packed in self.parts.packs.poll() if self.parts.packs else ():
            self._handle(packed)
        for orphan in self.outstanding.drained(self.parts.agents.is_read):
            self._report(orphan)

    def restart(self) -> None:
        """The machines are in doubt: empty them, and fail all that they held.

        Offers are reported at once, loads when their reads have ended or were stopped.
        """
        self._count("thread_restarts")
        self.parts.slots.clear_all()  # first of all: no grant is valid any longer
        self._follow_up.clear()
        self._received.clear()
        self._decoding.clear()
        self._questions.clear()
        self.parts.decode.clear()
        self.parts.prefill.clear(self._slots_in_use)
        if self.parts.digests is not None:
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
        return [] if self.parts.packs is None else self.parts.packs.writing

    # --- waiting and time

    def _wait_s(self) -> float | None:
        """How long this turn may wait, in seconds; None: without a limit."""
        if self._commands or self._questions or self._has_decoded:
            return 0
        digests = self.parts.digests
        digests_wait_s = None if digests is None else digests.wait_s
        if digests_wait_s == 0:
            return 0
        if self.parts.packs or digests_wait_s is not None:
            return READING_PAUSE_S
        if self.parts.agents.is_busy:
            return self.parts.agents.pause_s
        if self.outstanding.orphans:  # nothing writes into their blocks: report them now
            return 0
        serving = self.parts.serving
        if serving is not None and (serving.is_busy or self._clock() < self._serve_until):
            return SERVING_PAUSE_S
        due = self._next_due()
        return None if due is None else max(0.0, due - self._clock())

    @property
    def _has_decoded(self) -> bool:
        return bool(self._decoding) and self._decoding[0][1].done()

    def _next_due(self) -> float | None:
        """When time alone changes something, in monotonic seconds; None: never."""
        decode, prefill = self.parts.decode, self.parts.prefill
        serving, agents = self.parts.serving, self.parts.agents
        due = [decode.next_due, prefill.next_due, agents.next_due, self._look_at_links_at]
        due += [] if serving is None else [serving.next_due]
        return min((when for when in due if when is not None), default=None)

    def _tick(self) -> None:
        due, now = self._next_due(), self._clock()
        if due is not None and due <= now:
            self._carry_out(self.parts.decode.handle(events.Tick(), now))
            self._carry_out(self.parts.prefill.handle(events.Tick(), now))
            self._close_idle_links(now)

    def _close_idle_links(self, now: float) -> None:
        # Links cost sockets and heartbeats at both ends. Peers stay known without them.
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
        # Over TCP and while peers connect, NIXL needs progress in the process they read from.
        now, serving = self._clock(), self.parts.serving
        if self.parts.prefill.any_granted:
            self._serve_until = max(self._serve_until, now + LINGER_S)
        if serving is None:
            return
        if serving.poll():
            self._begin_life(serving)
        if serving.is_busy or now < self._serve_until:
            try:
                serving.progress()
            except TransportError as error:  # its readers time out; other ranks go on
                self._log.warning("serving readers of this rank failed: %s", error)

    def _begin_life(self, serving: Serving) -> None:
        # The agent was replaced. Peers know the old one, so all offers of this life end.
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

    # --- commands and messages

    def _on_command(self, command: events.Command) -> None:
        if isinstance(command, events.SetEngine):
            self.parts.agents.peers.set_layouts(command.layouts)
            self.parts.decode.set_engine(command.engine)
            return
        is_admitted, report = self.outstanding.admit(command)
        if report is not None:
            self._results.append(report)
        if is_admitted:
            self._handle(command)

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
            self._count("messages_dropped")
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
            self._count("peers_lost")
            self._log.warning("lost %s (%s); loads that need it fail", endpoint, lost.reason)
        self._handle(events.EndpointLost(endpoint, lost.reason))

    def _on_request(self, item: FromPeer) -> None:
        try:
            message = messages.decode_to_rank(item.payload)
        except ForeignVersion:
            self.parts.control.reply(item.route, messages.encode(messages.VersionRefusal()))
            raise
        if isinstance(message, messages.StatusRequest):
            if len(self._questions) == MAX_QUESTIONS:
                self._log.warning("status request dropped: %d others are waiting", MAX_QUESTIONS)
            else:
                self._questions.append((item.route, message))
            return
        self._serve_until = self._clock() + LINGER_S
        self._handle(events.Asked(item.route, message))

    def _answer_question(self) -> None:
        """Answer one status request, after all else. No error here may cost a load."""
        if not self._questions:
            return
        route, question = self._questions.popleft()
        try:
            self.parts.control.reply(route, messages.encode(self._report_status(question)))
        except Exception as error:  # noqa: BLE001 - reporting only reads: nothing is in doubt
            self._log.warning("status request not answered: %s", repr(error))

    def _handle(self, event: events.DecodeEvent | events.PrefillEvent) -> None:
        """Feed an event to its machine, and carry out the actions and all that follows."""
        self._carry_out(self._decide(event))

    def _decide(self, event: events.DecodeEvent | events.PrefillEvent) -> list[events.Action]:
        if isinstance(event, events.PrefillEvent):
            return self.parts.prefill.handle(event, self._clock())
        return self.parts.decode.handle(event, self._clock())

    def _is_wanted(self, action: events.DigestAction) -> bool:
        if isinstance(action, events.MakeDigest):
            return self.parts.prefill.is_digest_wanted(action.digest_request)
        return self.parts.decode.is_digest_wanted(action)

    # --- actions

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
            case events.MakeDigest() | events.CompareDigest():
                self._digest(action)
            case _:
                self._follow_up.extend(self.parts.agents.execute(action))

    def _digest(self, action: events.DigestAction) -> None:
        event: events.DigestEvent | None = None
        if self.parts.digests is not None:
            event = self.parts.digests.add(action)
        elif isinstance(action, events.MakeDigest):  # a reader that verifies may ask any rank
            refusal = "this rank computes no digests"
            event = events.DigestMade(action.route, action.digest_request, refusal=refusal)
        if event is not None:
            self._follow_up.append(event)

    def _warn(self, action: events.Notice) -> None:
        match action:
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
        """The transitions of a load, for at most STORIES_PER_S loads a second."""
        now, earlier = self._clock(), self._stories_at
        if len(earlier) == STORIES_PER_S and now < earlier[0] + 1.0:
            return ["(many loads fail: nixl-kv status --request tells what happened to this one)"]
        earlier.append(now)
        return self.parts.event_log.story_lines(request, STORY_LINES)

    def _publish_counts(self) -> None:
        if self._results:  # one record waits at a time, however long the caller does not pop it
            return
        counts = self.parts.counts
        if counts:
            self._results.append(events.Counts(dict(counts)))
            counts.clear()

    def _count(self, name: str) -> None:
        self.parts.counts[name] += 1


class TransferThread:
    """Runs a `Loop` on its own thread; started once per rank, and no fault ends it.

    An error that reaches the top is a bug and leaves the machines in doubt. The thread logs it,
    fails all that it holds, and goes on with empty machines.

    The thread closes the loop itself, and ends only when nothing can write into the cache any
    longer. So the end of the thread is the proof.
    """

    def __init__(self, build_loop: Callable[[], Loop]) -> None:
        self._build_loop = build_loop
        self._started: Future[Loop] = Future()
        self._is_stopping = False
        self._may_close = threading.Event()  # no other thread wakes the loop any longer
        self._unproven = "the thread has not ended its turn"
        self._thread = threading.Thread(target=self._main, name="nixl-kv-transfer", daemon=True)

    def start(self) -> Loop:
        """Wait until the loop is built, or raise the error of `build_loop`."""
        self._thread.start()
        return self._started.result()

    @property
    def was_started(self) -> bool:
        return self._thread.ident is not None

    def stop(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has closed its loop and ended. May be called again.

        Raises:
            TransportError: if it has not ended after `timeout_s` (STOP_TIMEOUT_S). It goes on
                closing.
        """
        if not self._thread.is_alive() or self._started.exception() is not None:
            return
        loop, timeout_s = self._started.result(), STOP_TIMEOUT_S if timeout_s is None else timeout_s
        if not self._is_stopping:
            self._is_stopping = True
            loop.wake()
            self._may_close.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            loop.parts.slots.clear_all()
            raise TransportError(
                f"the transfer thread has not stopped within {timeout_s:g} s: {self._unproven}"
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
        while not self._is_stopping:
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
                loop.close()
            except TransportError as error:  # a read may still be writing
                self._unproven = str(error)
            except Exception as error:
                if str(error) != self._unproven:
                    logger.critical("closing the transfer thread failed; retrying", exc_info=True)
                self._unproven = str(error)
            else:
                return
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
