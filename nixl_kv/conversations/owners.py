"""The reader's questions to other engines' directories, on its own directory's thread.

An owner is an engine that may have cached KV. The reader has to know how it hashes its blocks, so
it first asks for the owner's description, once per incarnation. If an owner does not answer in
time, the reader pauses before it asks again, and the pause doubles as in `protocol/peers.py`. A
late answer ends the pause.

Making the hashes of a question may take most of its time. So each turn sends at most one question,
and the time that this engine takes itself never counts against an owner.

A state machine without IO. Each question gets one `Answer`, unless the thread itself fails.
"""

import enum
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from nixl_kv.errors import LimitedLog, LocalProtocolError, RemoteProtocolError
from nixl_kv.ids import ANY_INCARNATION, Endpoint, EngineId, Incarnation, Nonce, RequestId
from nixl_kv.protocol import messages
from nixl_kv.protocol.machine import MachineState
from nixl_kv.protocol.peers import CONNECT_TIMEOUT_S, INCOMPATIBLE_S, pause_after
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.transport.base import FromEndpoint, Lost

# Owners that are remembered. Without a key, a client may have invented them.
MAX_OWNERS: Final = 1 << 10

Outcome: TypeAlias = Literal["found", "none", "late", "refused"]
"""`refused`: the owner's cache is of no use to this engine, or it could not be asked."""

Sends: TypeAlias = list[tuple[Endpoint, messages.Message]]

ANY_ENGINE: Final = EngineId("any")  # a description is asked for by address
NO_CONTENT: Final = "its setting conversations is 'off'"


@dataclass(frozen=True)
class Question:
    """Which blocks of a request's prompt an owner has."""

    request: RequestId
    owner: Endpoint
    nonce: Nonce
    begin: int  # the tokens before it are in this engine's cache
    weights: str  # the label of this engine's weights
    #: The hashes of the prompt's full blocks as the owner makes them; a text says why it cannot.
    make_hashes: Callable[[messages.ContentFacts], Sequence[bytes] | str] = field(repr=False)
    ends_at: float  # in monotonic seconds
    num_asked: int = 0  # blocks, once it has been sent


@dataclass(frozen=True)
class Answer:
    """The end of a question.

    The ticket is for the tokens up to the end of the run that the owner has found.
    """

    request: RequestId
    nonce: Nonce
    outcome: Outcome
    #: With `found`.
    ticket: Ticket | None = None
    run: bytes = b""  # `messages.Found.run`
    begin: int = 0  # the run's first token, at or before `Question.begin`


class OwnerState(MachineState):
    ASKED = enum.auto()  # its description was asked for; one question waits for it
    KNOWN = enum.auto()  # described, and the last question was answered in time
    UNUSABLE = enum.auto()  # it did not answer, or its cache is of no use: a pause


class OwnerEvent(MachineState):
    WANTED = enum.auto()  # a request wants it, after its pause if it has one
    DESCRIBED = enum.auto()
    ANSWERED = enum.auto()  # a question, perhaps too late
    OUTDATED = enum.auto()  # it has another incarnation than its description
    FAILED = enum.auto()


OWNER_TRANSITIONS: Final[Mapping[OwnerState, Mapping[OwnerEvent, OwnerState]]] = {
    OwnerState.ASKED: {
        OwnerEvent.WANTED: OwnerState.ASKED,
        OwnerEvent.DESCRIBED: OwnerState.KNOWN,
        OwnerEvent.ANSWERED: OwnerState.ASKED,  # a question of before
        OwnerEvent.OUTDATED: OwnerState.ASKED,
        OwnerEvent.FAILED: OwnerState.UNUSABLE,
    },
    OwnerState.KNOWN: {
        OwnerEvent.WANTED: OwnerState.KNOWN,
        OwnerEvent.DESCRIBED: OwnerState.KNOWN,
        OwnerEvent.ANSWERED: OwnerState.KNOWN,
        OwnerEvent.OUTDATED: OwnerState.ASKED,
        OwnerEvent.FAILED: OwnerState.UNUSABLE,
    },
    OwnerState.UNUSABLE: {
        OwnerEvent.WANTED: OwnerState.ASKED,
        OwnerEvent.DESCRIBED: OwnerState.KNOWN,
        OwnerEvent.ANSWERED: OwnerState.KNOWN,
        OwnerEvent.OUTDATED: OwnerState.UNUSABLE,
        OwnerEvent.FAILED: OwnerState.UNUSABLE,
    },
}


@dataclass
class Owner:
    endpoint: Endpoint  # of its directory
    state: OwnerState = OwnerState.ASKED
    #: Always in KNOWN. In UNUSABLE, if it was described before.
    description: messages.Description | None = None
    failures: int = 0  # since its last answer
    pause_ends_at: float = -math.inf  # of UNUSABLE
    asked_at: float = -math.inf  # of ASKED
    waiting: Question | None = None  # in ASKED, for the description

    def move(self, event: OwnerEvent) -> None:
        self.state = OWNER_TRANSITIONS[self.state][event]


class Owners:
    """All owners of one engine, by the address of their directory. `now` is monotonic, in seconds.

    The scheduler's thread adds to `questions` and takes `answers` and `met`; the directory's thread
    does all else. `why_unfit` says why the cache of a described engine is of no use here, or ''.
    """

    def __init__(
        self,
        why_unfit: Callable[[messages.Description], str],
        log: LimitedLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.questions: deque[Question] = deque()
        self.answers: deque[Answer] = deque()
        #: Owners that have answered, each with its epoch, or have described themselves (None). If
        #: the scheduler does not take them, the oldest go.
        self.met: deque[tuple[Incarnation, int | None]] = deque(maxlen=4 * MAX_OWNERS)
        self._sends: list[tuple[Endpoint, bytes]] = []
        self._why_unfit = why_unfit
        self._log = log
        self._clock = clock
        self._known: OrderedDict[Endpoint, Owner] = OrderedDict()  # the least recently asked first
        self._open: dict[Nonce, Question] = {}

    @property
    def next_due(self) -> float:
        """When `turn` has something to do, in monotonic seconds; infinity for never."""
        if self.questions:
            return -math.inf
        asked = (o.asked_at for o in self._known.values() if o.state is OwnerState.ASKED)
        described = min(asked, default=math.inf) + CONNECT_TIMEOUT_S
        return min(described, min((q.ends_at for q in self._open.values()), default=math.inf))

    def state_of(self, endpoint: Endpoint) -> OwnerState | None:
        owner = self._known.get(endpoint)
        return None if owner is None else owner.state

    def turn(self, now: float) -> list[tuple[Endpoint, bytes]]:
        """The messages to send now."""
        self.on_tick(now)
        if self.questions and not self._sends:
            self._send(self.ask(self.questions.popleft(), self._clock()))
        sends, self._sends = self._sends, []
        return sends

    def receive(self, item: FromEndpoint | Lost, now: float) -> None:
        """Take an answer, or the end of a connection."""
        if isinstance(item, Lost):
            self.on_lost(item.endpoint, item.reason, now)
            return
        try:
            message = messages.decode_to_finder(item.payload)
        except RemoteProtocolError as error:
            self.on_lost(item.endpoint, str(error), now)
        else:
            self._send(self.on_message(item.endpoint, message, now))

    def _send(self, sends: Sends) -> None:
        self._sends += [(endpoint, messages.encode(message)) for endpoint, message in sends]

    # --- the machine

    def ask(self, question: Question, now: float) -> Sends:
        if question.ends_at <= now:
            self._end(question, "late")
            return []
        owner = self._known.get(question.owner)
        is_new = owner is None
        if owner is None:
            owner = self._known[question.owner] = Owner(question.owner)
            self._forget_oldest()
        self._known.move_to_end(owner.endpoint)
        self._open[question.nonce] = question
        match owner.state:
            case OwnerState.KNOWN:
                return self._find(owner, question)
            case OwnerState.ASKED if not is_new:
                return self._refuse(question)  # one request finds out whether it answers
            case OwnerState.UNUSABLE if now < owner.pause_ends_at:
                return self._refuse(question)
        owner.move(OwnerEvent.WANTED)
        return self._describe(owner, question, now)

    def on_message(self, endpoint: Endpoint, message: messages.ToFinder, now: float) -> Sends:
        owner = self._known.get(endpoint)
        if owner is None:
            return []
        match message:
            case messages.Description():
                self._on_description(owner, message, now)
            case messages.Found():
                self._on_found(owner, message)
            case messages.Refusal() if message.incarnation != ANY_INCARNATION:
                return self._on_outdated(owner, message, now)
            case messages.Refusal() | messages.KeyRefusal():
                self._fail(owner, message.reason, now)
            case messages.VersionRefusal():
                self._fail(owner, str(message), now)
        return []

    def _on_outdated(self, owner: Owner, refusal: messages.Refusal, now: float) -> Sends:
        """It has restarted or slept since; one of the questions waits for its description."""
        known = owner.description
        if owner.state is not OwnerState.KNOWN or known is None:
            return []
        if known.incarnation != refusal.incarnation:  # an answer to a question of before
            return []
        questions = self._questions(owner.endpoint)
        owner.move(OwnerEvent.OUTDATED)
        for question in questions[1:]:
            self._refuse(question)
        return self._describe(owner, next(iter(questions), None), now)

    def on_lost(self, endpoint: Endpoint, reason: str, now: float) -> None:
        """The connection broke. An idle one may break without harm."""
        owner = self._known.get(endpoint)
        if owner is not None and (owner.state is OwnerState.ASKED or self._questions(endpoint)):
            self._fail(owner, reason, now)

    def on_tick(self, now: float) -> None:
        late = [one for one in self._open.values() if one.ends_at <= now]
        for question in late:
            self._end(question, "late")
            owner = self._known.get(question.owner)
            # A new connection and a description may take longer than a request can wait.
            if owner is not None and owner.state is OwnerState.KNOWN:
                self._pause(owner, now)
        for owner in list(self._known.values()):
            is_due = owner.asked_at + CONNECT_TIMEOUT_S <= now
            if owner.state is OwnerState.ASKED and is_due:
                self._fail(owner, f"no description in {CONNECT_TIMEOUT_S:g} s", now)

    # --- one owner

    def _describe(self, owner: Owner, question: Question | None, now: float) -> Sends:
        owner.waiting, owner.asked_at = question, now
        describe = messages.Describe(incarnation=ANY_INCARNATION, engine=ANY_ENGINE)
        return [(owner.endpoint, describe)]

    def _on_description(self, owner: Owner, message: messages.Description, now: float) -> None:
        if why := NO_CONTENT if message.content is None else self._why_unfit(message):
            owner.description = None
            self._fail(owner, why, now, at_least_s=INCOMPATIBLE_S)
            return
        self.met.append((Incarnation(message.incarnation), None))
        owner.description, owner.failures = message, 0
        owner.move(OwnerEvent.DESCRIBED)
        waiting, owner.waiting = owner.waiting, None
        if waiting is not None:
            del self._open[waiting.nonce]
            self.questions.appendleft(waiting)

    def _find(self, owner: Owner, question: Question) -> Sends:
        description = owner.description
        facts = None if description is None else description.content
        if description is None or facts is None:
            raise LocalProtocolError(f"owner {owner.endpoint} is {owner.state.name} without facts")
        hashes = question.make_hashes(facts)
        if isinstance(hashes, str):
            self._log.warning("%s is not asked for cached KV: %s", owner.endpoint, hashes)
            return self._refuse(question)
        first = question.begin // facts.block_size
        wanted = tuple(hashes[first : first + messages.MAX_HASHES])
        if not wanted:
            self._end(question, "none")
            return []
        if question.ends_at <= self._clock():  # the owner would answer too late
            self._end(question, "late")
            return []
        self._open[question.nonce] = replace(question, num_asked=len(wanted))
        find = messages.Find(
            incarnation=description.incarnation,
            engine=description.engine,
            nonce=question.nonce,
            weights=question.weights,
            hashes=wanted,
            first_block=first,
        )
        return [(owner.endpoint, find)]

    def _on_found(self, owner: Owner, found: messages.Found) -> None:
        owner.failures = 0
        self.met.append((Incarnation(found.incarnation), found.epoch))
        if owner.description is not None:
            owner.move(OwnerEvent.ANSWERED)
        question, description = self._open.get(Nonce(found.nonce)), owner.description
        if question is None or question.owner != owner.endpoint:
            return
        facts = None if description is None else description.content
        is_current = description is not None and found.incarnation == description.incarnation
        is_sound = found.num_blocks <= question.num_asked and bool(found.run) == bool(
            found.num_blocks
        )
        if not is_sound:
            text = "%s sent a useless answer: %d blocks and %d bytes for a question of %d blocks"
            counts = found.num_blocks, len(found.run), question.num_asked
            self._log.warning(text, owner.endpoint, *counts)
            self._end(question, "refused")
            return
        if description is None or facts is None or not is_current or not found.num_blocks:
            self._end(question, "none")
            return
        try:
            ticket = _ticket(owner.endpoint, description, found, question, facts.block_size)
        except ValueError as error:
            self._log.warning("%s sent a useless answer: %s", owner.endpoint, error)
            self._end(question, "refused")
            return
        begin = question.begin // facts.block_size * facts.block_size
        self._end(question, "found", ticket, found.run, begin)

    def _fail(self, owner: Owner, reason: str, now: float, *, at_least_s: float = 0.0) -> None:
        text = "%s is not asked for cached KV, for %g s: %s"
        pause_s = self._pause(owner, now, at_least_s=at_least_s)
        self._log.warning(text, owner.endpoint, pause_s, reason)
        for question in self._questions(owner.endpoint):
            self._refuse(question)

    def _pause(self, owner: Owner, now: float, *, at_least_s: float = 0.0) -> float:
        owner.move(OwnerEvent.FAILED)
        owner.waiting = None
        pause_s = max(pause_after(owner.failures), at_least_s)
        owner.failures += 1
        owner.pause_ends_at = now + pause_s
        return pause_s

    # --- questions

    def _questions(self, endpoint: Endpoint) -> list[Question]:
        return [one for one in self._open.values() if one.owner == endpoint]

    def _refuse(self, question: Question) -> Sends:
        self._end(question, "refused")
        return []

    def _end(
        self,
        question: Question,
        outcome: Outcome,
        ticket: Ticket | None = None,
        run: bytes = b"",
        begin: int = 0,
    ) -> None:
        self._open.pop(question.nonce, None)
        owner = self._known.get(question.owner)
        if owner is not None and owner.waiting is question:
            owner.waiting = None
        self.answers.append(Answer(question.request, question.nonce, outcome, ticket, run, begin))

    def _forget_oldest(self) -> None:
        if len(self._known) > MAX_OWNERS:
            endpoint = next(iter(self._known))
            for question in self._questions(endpoint):
                self._refuse(question)
            del self._known[endpoint]

    def check(self) -> None:
        """Check what the states promise, between two events.

        Raises:
            LocalProtocolError: says what does not hold.
        """
        for owner in self._known.values():
            state = owner.state
            rules = {
                "no facts": state is OwnerState.KNOWN
                and (owner.description is None or owner.description.content is None),
                "a question waits": owner.waiting is not None and state is not OwnerState.ASKED,
                "a question was not sent": state is OwnerState.KNOWN
                and not all(one.num_asked for one in self._questions(owner.endpoint)),
                "no pause": state is OwnerState.UNUSABLE and owner.pause_ends_at == -math.inf,
            }
            for rule, is_broken in rules.items():
                if is_broken:
                    raise LocalProtocolError(f"owner {owner.endpoint} is {state.name}: {rule}")


def _ticket(
    endpoint: Endpoint,
    owner: messages.Description,
    found: messages.Found,
    question: Question,
    block_size: int,
) -> Ticket:
    """The ticket of an answer; a ValueError if the owner's names cannot stand in one."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    num_blocks = question.begin // block_size + found.num_blocks
    return Ticket(
        host=host.strip("[]"),
        port=int(port),
        nonce=Nonce(found.offer),
        engine=EngineId(owner.engine),
        incarnation=Incarnation(owner.incarnation),
        num_tokens=num_blocks * block_size,
        context=found.offer,  # the owner compares no prompt: it has sealed the run
        epoch=found.epoch,
        weights=found.weights,
    )
