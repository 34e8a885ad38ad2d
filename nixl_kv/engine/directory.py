"""Serves the engine's description: a thread in the scheduler's process that answers Describe.

The thread sleeps until a decode engine or a tool asks. Tools also drain the engine and label its
weights; the scheduler reads both in its next step. The engine's own ranks send hints about loads,
which the scheduler takes before each step; it believes those that have a load's key. The status
that it answers to tools is an open record, like a rank's (`engine/status.py`). Draining takes an
engine out of service, so only a sender that has proved the key may order it, or, without a key, a
process on the same machine.

No error ends the thread: without its directory, no decode engine could meet this engine.
"""

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

import nixl_kv
from nixl_kv.addresses import is_local
from nixl_kv.engine.probe import probe_ticket
from nixl_kv.engine.status import process_facts
from nixl_kv.errors import (
    ForeignVersion,
    LimitedLog,
    RemoteProtocolError,
    TransportError,
    get_logger,
    run_guarded,
)
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.ids import (
    ANY_INCARNATION,
    Endpoint,
    EngineId,
    Incarnation,
    endpoint_at,
    engine_incarnation,
    short,
)
from nixl_kv.protocol import messages
from nixl_kv.protocol.ticket import FIELD, Ticket
from nixl_kv.transport.base import (
    LINK_KEPT_S,
    NEEDS_ENGINE_KEY,
    Bounds,
    ControlPlane,
    FromEndpoint,
    FromPeer,
    Lost,
    Proved,
)

logger = get_logger(__name__)

# The end of an engine's process no longer waits for the transfer thread or the directory.
SHUTDOWN_S: Final = 5.0

NO_KEY: Final = (
    "this engine has no key, so any process could set the label of its weights; give it key_file, "
    "or set weights in its configuration and restart it"
)

DRAIN_HERE: Final = "an engine without a key can be drained only from its host"
# What the tools' key allows.
QUESTIONS: Final = (messages.Describe, messages.StatusRequest)

FAILED: Final = "the directory failed at a question; it goes on"

# A question is short, and its sender takes the long answer before it asks again.
BOUNDS: Final = Bounds(message_bytes=4096, answers=8)
# Where the directory answers `Find`: each hash takes 2 bytes more than its own.
FINDS: Final = Bounds(
    message_bytes=BOUNDS.message_bytes + messages.MAX_HASHES * (messages.HASH_BYTES + 2),
    answers=64,
)

# Hints that wait for the scheduler. Without the oldest ones, loads end with a step's output.
MAX_HINTS: Final = 4096


def describe_engine(
    engine: EngineId,
    model: Mapping[str, str],
    shape: ParallelShape,
    ranks: Sequence[messages.RankDescription],
    extras: Mapping[str, str] | None = None,
    content: messages.ContentFacts | None = None,
) -> messages.Description:
    """`ranks` are in rank order. `content`: how the engine hashes blocks, if it answers `Find`."""
    return messages.Description(
        incarnation=engine_incarnation(rank.incarnation for rank in ranks),
        engine=engine,
        model=dict(model),
        shape=shape,
        ranks=tuple(ranks),
        extras=dict(extras or {}),
        content=content,
    )


class Correspondent(Protocol):
    """A feature that asks other engines' directories, on this one's thread."""

    @property
    def next_due(self) -> float:
        """When `turn` has something to do, in monotonic seconds; infinity for never."""

    def receive(self, item: FromEndpoint | Lost, now: float) -> None:
        """Take an answer, or the end of a connection."""

    def turn(self, now: float) -> Sequence[tuple[Endpoint, bytes]]:
        """The messages to send now."""


class DirectoryServer:
    """Listens on an IP literal and a port; 0 takes any free one. It closes `control`.

    `count_awaited` counts the requests that will be offered but are not yet; it runs on the
    server's thread. `weights` is the label of the engine's weights. Tools may set it only if
    `has_key`: then only holders of the key reach this server. `seal` makes the tickets with which
    tools ask decode engines to read some bytes from this engine (`engine/probe.py`). `find` looks a
    prompt's blocks up in the engine's prefix cache, on the server's thread; None: it has no answer.
    `asks` asks other engines.
    """

    def __init__(  # noqa: PLR0913 - what the engine is
        self,
        control: ControlPlane,
        host: str,
        port: int,
        *,
        count_awaited: Callable[[], int] = lambda: 0,
        weights: str = "",
        has_key: bool = False,
        seal: Callable[[Ticket], Mapping[str, Any]] | None = None,
        find: Callable[[messages.Find], messages.Found] | None = None,
        asks: Correspondent | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control = control
        self.host = host
        self.port = control.listen(host, port, BOUNDS if find is None else FINDS)
        self._published: tuple[messages.Description, bytes] | None = None
        self._shown = b""  # the same for tools
        self.is_draining = False  # then the scheduler offers no further requests
        self.count_awaited = count_awaited
        self.weights = weights
        self._hints: deque[messages.Hint] = deque(maxlen=MAX_HINTS)
        self._clock = clock
        self._to_tell: deque[bool] = deque()
        self._numbers = itertools.count(1)  # of `Paused`
        self._tell_again_at: float | None = None  # while the engine is paused
        self._has_key = has_key
        self._seal = seal
        self._look_up = find
        self._asks = asks
        self._started_at = self._drained_at = time.monotonic()
        self._is_stopping = False
        self._is_closed = False
        self._log = LimitedLog(logger, time.monotonic)
        self._thread = threading.Thread(target=self._main, name="nixl-kv-directory", daemon=True)

    @property
    def endpoint(self) -> Endpoint:
        return endpoint_at(self.host, self.port)

    def start(self) -> None:
        self._thread.start()

    def publish(self, description: messages.Description) -> None:
        """Serve this description from now on. It is encoded once, not per question."""
        self._shown = messages.encode(messages.without_memory(description))
        self._published = description, messages.encode(description)

    def tell_ranks(self, *, is_paused: bool) -> None:
        """Tell this engine's ranks whether it begins requests. Any thread may call this."""
        self._to_tell.append(is_paused)
        self._control.wake()

    def wake(self) -> None:
        """Let the thread look for new questions. Any thread may call this."""
        self._control.wake()

    def pop_hints(self) -> list[messages.Hint]:
        """The hints since the last call. The scheduler's thread calls this."""
        return [self._hints.popleft() for _ in range(len(self._hints))]

    def stop(self) -> None:
        """End the thread and close the socket. May be called again."""
        self._is_stopping = True
        if self._thread.is_alive():
            self._control.wake()
            self._thread.join(timeout=SHUTDOWN_S)
        if not self._thread.is_alive() and not self._is_closed:
            self._is_closed = True
            self._control.close()

    def turn(self, timeout_s: float | None) -> None:
        """Wait for questions, and answer them. A bug of ours costs one question."""
        for item in self._control.poll(timeout_s):
            if isinstance(item, FromPeer):
                run_guarded(partial(self._serve, item), FAILED)
            elif self._asks is not None:
                run_guarded(partial(self._asks.receive, item, self._clock()), FAILED)
        if self._asks is not None:
            run_guarded(partial(self._ask, self._asks), FAILED)
        while self._to_tell:
            self._tell(is_paused=self._to_tell.popleft())
        if self._tell_again_at is not None and self._clock() >= self._tell_again_at:
            self._tell(is_paused=True)  # the last one may be lost
        for link in self._control.links():
            if link.idle_s >= LINK_KEPT_S:
                self._control.disconnect(link.endpoint)

    def _ask(self, asks: Correspondent) -> None:
        for endpoint, payload in asks.turn(self._clock()):
            try:
                self._control.send(endpoint, payload)
            except TransportError as error:  # noqa: PERF203 - the others may be sent
                asks.receive(Lost(endpoint, str(error)), self._clock())

    def _tell(self, *, is_paused: bool) -> None:
        number = next(self._numbers)
        self._tell_again_at = self._clock() + messages.PAUSED_S / 4 if is_paused else None
        ranks = () if self._published is None else self._published[0].ranks
        for rank in ranks:
            paused = messages.Paused(
                incarnation=rank.incarnation, number=number, is_paused=is_paused
            )
            with suppress(TransportError):  # without it, a pause looks like a hung engine
                self._control.send(rank.endpoint, messages.encode(paused))

    def _main(self) -> None:
        while not self._is_stopping:
            is_busy = self._control.links() or self._tell_again_at is not None
            wait_s = messages.PAUSED_S / 4 if is_busy else math.inf
            if self._asks is not None:
                wait_s = min(wait_s, max(0.0, self._asks.next_due - self._clock()))
            run_guarded(partial(self.turn, None if wait_s == math.inf else wait_s), FAILED)

    def _serve(self, item: FromPeer) -> None:
        try:
            answer = self._answer(item)
            if answer is not None:
                self._control.reply(item.route, answer)
        except (RemoteProtocolError, TransportError) as error:
            self._log.warning("request for a description dropped: %s", error)

    def _answer(self, item: FromPeer) -> bytes | None:
        try:
            message = messages.decode_to_engine(item.payload)
        except ForeignVersion as error:
            self._log.warning("request for a description refused: %s", error)
            return messages.encode(messages.VersionRefusal())
        if item.proved is Proved.TOOLS_KEY and not isinstance(message, QUESTIONS):
            reason = f"{type(message).__name__} {NEEDS_ENGINE_KEY}"
            self._log.warning("a tool's message is refused: %s", reason)
            return messages.encode(messages.KeyRefusal(incarnation=self._life, reason=reason))
        match message:
            case messages.Drain():
                return messages.encode(self._drain(message, item))
            case messages.SetWeights():
                return messages.encode(self._set_weights(message))
            case messages.StatusRequest():
                return messages.encode(self._status())
            case messages.Describe():
                return self._describe(message, item.proved)
            case messages.Find():
                return self._find(message)
            case hint:
                self._hints.append(hint)
                return None

    @property
    def _life(self) -> Incarnation:
        """For tools, which may ask before the engine is described."""
        return ANY_INCARNATION if self._published is None else self._published[0].incarnation

    def _drain(self, message: messages.Drain, sender: FromPeer) -> messages.Draining:
        refusal = ""
        if sender.proved is Proved.NO_KEY and not is_local(sender.address):
            refusal = DRAIN_HERE
            self._log.warning(
                "draining is refused: %s is another machine, without a key", sender.address
            )
        elif self.is_draining and message.undo:
            logger.warning("this engine no longer drains: it offers requests again")
        elif not self.is_draining and not message.undo:
            self._drained_at = time.monotonic()
            logger.warning(
                "this engine drains: requests that arrive from now on are not offered "
                "(nixl-kv drain --undo ends this)"
            )
        if not refusal:
            self.is_draining = not message.undo
        return messages.Draining(
            incarnation=self._life, num_awaited=self.count_awaited(), refusal=refusal
        )

    def _status(self) -> messages.Status:
        now, own = time.monotonic(), self._published
        return messages.Status(
            incarnation=self._life,
            facts={
                "engine": None if own is None else own[0].engine,  # None while it starts
                "version": nixl_kv.__version__,
                "uptime_s": now - self._started_at,
                "draining_s": now - self._drained_at if self.is_draining else None,
                "num_awaited": self.count_awaited(),  # requests that will be offered
                "weights": self.weights,
                **process_facts(),
                "probe_ticket": self._probe_ticket(),
            },
            totals={"ranks": 0 if own is None else len(own[0].ranks)},
            lists={},
        )

    def _probe_ticket(self) -> str | None:
        if self._published is None or self._seal is None:
            return None
        own, _ = self._published
        ticket = probe_ticket(own.engine, own.incarnation, self.host, self.port)
        return str(self._seal(ticket)[FIELD])

    def _set_weights(self, message: messages.SetWeights) -> messages.WeightsSet:
        # The scheduler compares the label in each hook, so it is valid from this answer on.
        answer = messages.WeightsSet(
            incarnation=self._life, former=self.weights, refusal="" if self._has_key else NO_KEY
        )
        if self._has_key:
            self.weights = message.weights
            logger.warning("a tool set the label of this engine's weights to %r", self.weights)
        return answer

    def _find(self, question: messages.Find) -> bytes | None:
        """A question for another engine is refused; None: this engine answers none."""
        if self._look_up is None or self._published is None:
            return None
        own, _ = self._published
        is_meant = question.incarnation in (ANY_INCARNATION, own.incarnation)
        if question.engine == own.engine and is_meant:
            return messages.encode(self._look_up(question))
        reason = f"engine {own.engine!r} of incarnation {short(own.incarnation)} answers here"
        return messages.encode(
            messages.Refusal(
                incarnation=question.incarnation, engine=question.engine, reason=reason
            )
        )

    def _describe(self, message: messages.Describe, proved: Proved) -> bytes:
        if self._published is None:
            reason = "this engine is still starting"
        else:
            own, encoded = self._published
            if proved is Proved.TOOLS_KEY:
                encoded = self._shown
            if message.incarnation == ANY_INCARNATION:
                return encoded
            if message.engine != own.engine:
                reason = (
                    f"engine {own.engine!r} answers here instead of {message.engine!r}: prefill "
                    "restarted, or another engine took its port"
                )
            elif message.incarnation != own.incarnation:
                reason = (
                    f"engine {own.engine!r} has restarted, slept or reset its cache since: "
                    f"incarnation {short(own.incarnation)} instead of {short(message.incarnation)}"
                )
            else:
                return encoded
        return messages.encode(
            messages.Refusal(incarnation=message.incarnation, engine=message.engine, reason=reason)
        )
