"""The NIXL agent through which peers read this rank, and a new one if it can no longer be reached.

UCX closes a listening socket for good when accept() finds no free file descriptor. From then on no
peer can connect to the agent, although its process, its port and its grants look healthy. So this
rank checks that the agent's listening sockets still exist. If one is gone, a new agent takes over.

When UCX (1.23 does not) goes on listening after EMFILE, delete the checks and the second agent.
`stay_awake` and `progress` remain: a READ over TCP needs the progress of the memory's owner.
"""

import contextlib
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Final, TypeAlias

from nixl_kv.errors import LimitedLog, TransportError, get_logger
from nixl_kv.transport.base import LINGER_S, Transport
from nixl_kv.transport.ucx import descriptors

logger = get_logger(__name__)

# A prefill rank that peers may read checks again whether UCX still listens.
AWAKE_CHECK_S: Final = 1.0
# An idle prefill rank checks again whether UCX still listens.
IDLE_CHECK_S: Final = 60.0
# A prefill rank no longer progresses NIXL after a check. By then it has noticed the readers that
# have left.
SERVE_ON_S: Final = 0.1

# A transport, and its listening sockets: their inodes by descriptor.
_Opened: TypeAlias = tuple[Transport, dict[int, int]]


class Serving:
    """The transfer thread owns it, and calls `progress` while peers may read this rank.

    `make_transport` makes an agent, and `register` gives it this rank's memory, on any thread.
    `background` is a thread for this object alone, which `close` ends. `measure` receives the gauge
    `unreadable`.
    """

    def __init__(
        self,
        make_transport: Callable[[], Transport],
        register: Callable[[Transport], None],
        *,
        background: Executor,
        measure: Callable[[str, float], None],
        clock: Callable[[], float],
    ) -> None:
        self._make_transport = make_transport
        self._register = register
        self._background = background
        self._measure = measure
        self._clock = clock
        self._log = LimitedLog(logger, clock, interval_s=IDLE_CHECK_S)
        self._agents: list[Transport] = []  # not closed yet
        self._starting: Future[_Opened] | None = None  # another agent
        self._checked_at = clock()
        self._awake_until = 0.0
        self.transport, self._listening = self._open()

    def __repr__(self) -> str:
        return f"<Serving {self.transport}>"

    @property
    def is_awake(self) -> bool:
        """Whether this rank may be read or gets another agent: poll it often."""
        return self._starting is not None or self._clock() < self._awake_until

    @property
    def next_due(self) -> float | None:
        """When `poll` has something to do, in monotonic seconds; None: never."""
        has_due = self._listening and not self.is_awake
        return self._checked_at + IDLE_CHECK_S if has_due else None

    @property
    def has_lost_listener(self) -> bool:
        """Whether UCX has closed a listening socket, so that peers cannot connect."""
        return bool(self._listening) and not descriptors.are_open(self._listening)

    def stay_awake(self, seconds: float = LINGER_S) -> None:
        self._awake_until = max(self._awake_until, self._clock() + seconds)

    def metadata(self) -> bytes:
        return self.transport.metadata()

    def progress(self) -> None:
        self.transport.progress()

    def poll(self) -> bool:
        """Go on with checks. True if a new agent took over, which peers do not know yet."""
        if self._starting is not None:
            return self._starting.done() and self._take_over(self._starting)
        pause_s = AWAKE_CHECK_S if self.is_awake else IDLE_CHECK_S
        if self._listening and self._clock() >= self._checked_at + pause_s:
            self._checked_at = self._clock()
            self.stay_awake(SERVE_ON_S)
            if self.has_lost_listener:
                self._measure("unreadable", 1)
                self._log.warning(
                    "peers can no longer connect to this rank's memory, because UCX has closed a "
                    "listening socket: this rank begins a new incarnation with another NIXL agent; "
                    "if file descriptors ran out, raise `ulimit -n`"
                )
                self._starting = self._background.submit(self._open)
        return False

    def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        self._background.shutdown()
        with contextlib.ExitStack() as stack:  # an agent that does not end must not keep the others
            for agent in self._agents:
                stack.callback(agent.close)

    def _open(self) -> _Opened:
        """Make a new agent, and find the sockets that it listens on. Runs on any thread."""
        try:
            before, agent = descriptors.listening_sockets(), self._make_transport()
            try:
                self._register(agent)
                agent.metadata()  # peers need it, so an error must show here
                now = descriptors.listening_sockets()
            except (OSError, TransportError):
                agent.close()
                raise
        except OSError as error:
            raise TransportError(f"cannot list its listening sockets: {error}") from error
        self._agents.append(agent)
        return agent, {number: now[number] for number in now if before.get(number) != now[number]}

    def _take_over(self, started: Future[_Opened]) -> bool:
        self._starting = None
        try:
            agent, listening = started.result()
        except TransportError as error:
            self._log.warning("cannot make another NIXL agent: %s; trying again", error)
            return False
        self._background.submit(self._retire, self.transport)
        self.transport, self._listening = agent, listening
        self._measure("unreadable", 0)
        return True

    def _retire(self, agent: Transport) -> None:
        agent.close()  # if it fails, `close` tries again
        self._agents.remove(agent)
