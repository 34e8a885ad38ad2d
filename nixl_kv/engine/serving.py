"""The NIXL agent through which peers read this rank, and the check that they still can.

UCX closes a listening socket for good when accept() finds no free file descriptor. From then on no
peer can connect to the agent, although its process, its port and its grants look healthy. So this
rank checks that the agent's listening sockets still exist. Once a minute a second agent of the
process also reads one of this rank's slots, as a peer would. If a socket is gone, or that read
fails twice in a row, a new agent replaces the first one.

The check also lets UCX notice readers that have left.
"""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Final, TypeAlias

from nixl_kv.errors import LimitedLog, PeerLost, TransportError, get_logger
from nixl_kv.geometry.layout import block_ids
from nixl_kv.transport import descriptors
from nixl_kv.transport.base import SlotPage, Transport, slot_rows

logger = get_logger(__name__)

CHECK_S: Final = 60.0  # between two checks; one takes 50 ms of a core on another thread
AGAIN_S: Final = 1.0  # the first pause after a failed check; it doubles up to CHECK_S
READ_S: Final = 10.0  # the timeout of a check's read, for a busy machine
LOOK_S: Final = 1.0  # between two checks of the listening sockets, while this rank is awake
# How long this rank still serves reads after a reader's last message. A read may go on although its
# lease expired; readers send a heartbeat at least each second.
LINGER_S: Final = 2.0
# How long the agent makes progress after a check, to notice that the checker left.
SERVE_ON_S: Final = 0.1
POLL_S: Final = 0.001
UNREADABLE: Final = "unreadable"  # the gauge

# A transport, and its listening sockets: their inodes by descriptor.
_Opened: TypeAlias = tuple[Transport, dict[int, int]]


class Serving:
    """The transfer thread owns it, and calls `progress` while peers may read this rank.

    `open_transport` makes an agent with this rank's memory. `make_checker` makes the agent that
    reads one of the `slots` in a check; None: no checks. Both run on any thread. `background` is a
    thread for this object alone, which `close` ends. `counts` receives the gauge.
    """

    def __init__(
        self,
        open_transport: Callable[[], Transport],
        slots: SlotPage,
        *,
        make_checker: Callable[[], Transport] | None,
        background: Executor,
        counts: defaultdict[str, float],
        clock: Callable[[], float],
    ) -> None:
        self._open_transport = open_transport
        self._slots = slots
        self._make_checker = make_checker
        self._background = background
        self._counts = counts
        self._clock = clock
        self._log = LimitedLog(logger, clock, interval_s=CHECK_S)
        self._stop = threading.Event()
        self._job: Future[Any] | None = None  # a check, or the start of another agent
        self._agents: list[Transport] = []  # not closed yet
        self._is_replacing = False
        self._was_read = False  # by a check
        self._has_failed = False  # the last check
        self._again_s = AGAIN_S
        self._check_at = clock() + CHECK_S
        self._look_at = clock() + LOOK_S
        self._awake_until = 0.0
        self.transport, self._listening = self._open()

    def __repr__(self) -> str:
        return f"<Serving {self.transport}>"

    @property
    def is_awake(self) -> bool:
        """Whether this rank may be read, is checked or gets another agent: poll it often."""
        return self._job is not None or self._clock() < self._awake_until

    @property
    def next_due(self) -> float | None:
        """When `poll` has something to do, in monotonic seconds; None: never."""
        return None if self._make_checker is None or self.is_awake else self._check_at

    def stay_awake(self, seconds: float = LINGER_S) -> None:
        """Peers may read this rank."""
        self._awake_until = max(self._awake_until, self._clock() + seconds)

    def metadata(self) -> bytes:
        return self.transport.metadata()

    def progress(self) -> None:
        self.transport.progress()

    def poll(self) -> bool:
        """Go on with checks. True if a new agent took over, which peers do not know yet."""
        if self._make_checker is None:
            return False
        if self._job is not None:
            return self._job.done() and self._end(self._job)
        now = self._clock()
        if now >= self._look_at and not self._is_replacing:
            self._look_at = now + LOOK_S
            if not descriptors.are_open(self._listening):
                self._replace("UCX has closed a listening socket")
        if self._job is None and now >= self._check_at:
            self._job = (
                self._background.submit(self._open)
                if self._is_replacing
                else self._background.submit(
                    read_slot, self._make_checker, self.metadata(), self._slots, self._stop
                )
            )
        return False

    def close(self) -> None:
        """Stop a running check, and close the agents, or raise TransportError."""
        self._stop.set()
        if self._job is not None:
            self._job.cancel()
        self._background.shutdown()
        with contextlib.ExitStack() as stack:  # an agent that does not end must not keep the others
            for agent in self._agents:
                stack.callback(agent.close)

    def _end(self, job: Future[Any]) -> bool:
        self._job = None
        if not self._is_replacing:
            self.stay_awake(SERVE_ON_S)  # the checker's connection ends here, too
        try:
            result = job.result()
        except TransportError as error:
            message = "cannot check whether peers can read this rank: %s; trying again"
            if self._is_replacing:
                message = "cannot make another NIXL agent: %s; trying again"
                # The present agent may work again, unless UCX closed its socket: check it first.
                self._is_replacing = not descriptors.are_open(self._listening)
            self._log.warning(message, error)
            self._try_again()
            return False
        if self._is_replacing:
            self._take_over(*result)
        else:
            self._on_checked(result)
        return isinstance(result, tuple)

    def _on_checked(self, failure: str | None) -> None:
        if failure is None:
            if self._counts.get(UNREADABLE) or self._has_failed:
                logger.info("peers can read this rank again")
            self._was_read, self._has_failed, self._again_s = True, False, AGAIN_S
            self._counts[UNREADABLE] = 0
            self._check_at = self._clock() + CHECK_S
        elif not self._has_failed:
            self._has_failed, self._check_at = True, self._clock()
        elif self._was_read:
            self._replace(failure)
        else:  # it never worked: a new agent would not either
            self._counts[UNREADABLE] = 1
            self._log.warning(
                "this rank cannot read its own memory as peers do: %s; loads from it may fail",
                failure,
            )
            self._try_again()

    def _replace(self, reason: str) -> None:
        self._is_replacing, self._counts[UNREADABLE] = True, 1
        logger.error(
            "peers can no longer connect to this rank's memory (%s): it begins a new incarnation "
            "with another NIXL agent; if file descriptors ran out, raise `ulimit -n`",
            reason,
        )
        self._job = self._background.submit(self._open)

    def _open(self) -> _Opened:
        """Make a new agent, and find the sockets that it listens on. Runs on any thread."""
        look = descriptors.listening_sockets if self._make_checker else dict[int, int]
        try:
            before, agent = look(), self._open_transport()
            try:
                agent.metadata()  # peers need it, so an error must show here
                now = look()
            except (OSError, TransportError):
                agent.close()
                raise
        except OSError as error:
            raise TransportError(f"cannot list its listening sockets: {error}") from error
        self._agents.append(agent)
        return agent, {number: now[number] for number in now if before.get(number) != now[number]}

    def _try_again(self) -> None:
        self._check_at = self._clock() + self._again_s
        self._again_s = min(self._again_s * 2, CHECK_S)

    def _take_over(self, agent: Transport, listening: dict[int, int]) -> None:
        self._background.submit(self._retire, self.transport)
        self.transport, self._listening = agent, listening
        self._is_replacing = self._was_read = self._has_failed = False
        self._check_at, self._awake_until = self._clock(), 0.0

    def _retire(self, agent: Transport) -> None:
        agent.close()  # if it fails, `close` tries again
        self._agents.remove(agent)


def read_slot(
    make_checker: Callable[[], Transport], metadata: bytes, slots: SlotPage, stop: threading.Event
) -> str | None:
    """Read a slot as a peer does, over a new connection. Returns why that failed, or None.

    Runs on a background thread; the transfer thread must make progress meanwhile. Raises
    TransportError if the check itself fails, for example if this process cannot make an agent.
    """
    checker, own = make_checker(), SlotPage(1)
    until = time.monotonic() + READ_S
    try:
        checker.register(own.span, "DRAM", 0)
        peer = checker.add_peer(metadata)
        lists = (
            checker.prepare(own.rows(), "DRAM", None),
            checker.prepare(slot_rows(slots.address, slots.count), "DRAM", peer),
        )
        read = checker.read(*lists, (block_ids([0]), block_ids([0])))
        while not checker.poll(read):
            if stop.is_set():
                return None
            if time.monotonic() > until:
                return f"a read of one slot takes {READ_S:g} s"
            time.sleep(POLL_S)
    except PeerLost as error:
        return str(error)
    finally:
        checker.close()
    return None
