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
from concurrent.futures import Executor, Future, wait
from typing import Final, TypeAlias

from nixl_kv.errors import LimitedLog, PeerLost, TransportError, get_logger
from nixl_kv.geometry.layout import block_ids
from nixl_kv.transport import descriptors
from nixl_kv.transport.base import SlotPage, Transport, slot_rows

logger = get_logger(__name__)

CHECK_S: Final = 60.0  # between two checks; one takes 50 ms of a core on another thread
AGAIN_S: Final = 1.0  # the first pause after a failed check; it doubles up to CHECK_S
READ_S: Final = 10.0  # the timeout of a check's read, for a busy machine
LOOK_S: Final = 1.0  # between two checks of the listening sockets, while this rank is awake
# How long the agent makes progress after a check, to notice that the checker left.
SERVE_ON_S: Final = 0.1
FAILURES: Final = 2  # failed checks in a row that make this rank replace its agent
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
        self._open = open_transport
        self._slots = slots
        self._make_checker = make_checker
        self._background = background
        self._counts = counts
        self._clock = clock
        self._log = LimitedLog(logger, clock, interval_s=CHECK_S)
        self._stop = threading.Event()
        self._check: Future[str | None] | None = None
        self._opening: Future[_Opened] | None = None
        self._closing: list[tuple[Transport, Future[None]]] = []
        self._has_lost_socket = False
        self._was_read = False  # by a check
        self._failures = 0
        self._again_s = AGAIN_S
        self._check_at = clock() + CHECK_S
        self._look_at = clock() + LOOK_S
        self._serve_until = 0.0
        self.transport, self._listening = self._open_and_look()

    def __repr__(self) -> str:
        return f"<Serving {self.transport}>"

    @property
    def is_busy(self) -> bool:
        """Whether a check or a replacement is running, so that the caller must poll it."""
        return bool(self._check or self._opening) or self._clock() < self._serve_until

    @property
    def next_due(self) -> float | None:
        """When `poll` has something to do, in monotonic seconds; None: never."""
        return None if self._make_checker is None or self.is_busy else self._check_at

    def metadata(self) -> bytes:
        return self.transport.metadata()

    def progress(self) -> None:
        self.transport.progress()

    def poll(self) -> bool:
        """Go on with checks. True if a new agent took over, which peers do not know yet."""
        if self._make_checker is None:
            return False
        if self._opening is not None:
            return self._opening.done() and self._take_over(self._opening)
        now = self._clock()
        if self._check is not None:
            if self._check.done():
                check, self._check = self._check, None
                self._serve_until = now + SERVE_ON_S
                self._end_check(check)
            return False
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            if not self._has_lost_socket and not descriptors.are_open(self._listening):
                self._has_lost_socket = True
                self._replace("UCX has closed a listening socket")
                return False
        if now < self._check_at:
            return False
        if self._has_lost_socket:
            self._opening = self._background.submit(self._open_and_look)
        else:
            self._check = self._background.submit(
                read_slot, self._make_checker, self.metadata(), self._slots, self._stop
            )
        return False

    def close(self) -> None:
        """Stop a running check, and close the agents, or raise TransportError."""
        self._stop.set()
        futures = [future for future in (self._check, self._opening) if future is not None]
        wait([future for future in futures if not future.cancel()])  # type: ignore[misc]
        self._background.shutdown()
        opened = self._opening
        agents = [
            agent for agent, closed in self._closing if closed.cancelled() or closed.exception()
        ]
        if opened is not None and not opened.cancelled() and opened.exception() is None:
            agents.append(opened.result()[0])
        with contextlib.ExitStack() as stack:  # an agent that does not end must not keep the others
            for agent in (self.transport, *agents):
                stack.callback(agent.close)
        self._opening, self._check, self._closing = None, None, []

    def _end_check(self, check: Future[str | None]) -> None:
        try:
            reason = check.result()
        except TransportError as error:
            self._log.warning(
                "cannot check whether peers can read this rank: %s; trying again", error
            )
            self._try_again()
            return
        if reason is None:
            if self._counts.get(UNREADABLE) or self._failures:
                logger.info("peers can read this rank again")
            self._was_read, self._failures, self._again_s = True, 0, AGAIN_S
            self._counts[UNREADABLE] = 0
            self._check_at = self._clock() + CHECK_S
            return
        self._failures += 1
        if self._failures < FAILURES:
            self._check_at = self._clock()
            return
        if self._was_read:
            self._replace(reason)
        else:  # it never worked: a new agent would not either
            self._counts[UNREADABLE] = 1
            self._log.warning(
                "this rank cannot read its own memory as peers do: %s; loads from it may fail",
                reason,
            )
            self._try_again()

    def _replace(self, reason: str) -> None:
        self._counts[UNREADABLE] = 1
        logger.error(
            "peers can no longer connect to this rank's memory (%s): it begins a new incarnation "
            "with another NIXL agent; if file descriptors ran out, raise `ulimit -n`",
            reason,
        )
        self._opening = self._background.submit(self._open_and_look)

    def _open_and_look(self) -> _Opened:
        """Make a new agent, and find the sockets that it listens on. Runs on any thread."""
        if self._make_checker is None:
            return self._open(), {}
        try:
            before = descriptors.listening_sockets()
            agent = self._open()
            try:
                agent.metadata()  # peers need it, so an error must show here
                now = descriptors.listening_sockets()
            except (OSError, TransportError):
                agent.close()
                raise
        except OSError as error:
            raise TransportError(f"cannot list its listening sockets: {error}") from error
        return agent, {number: now[number] for number in now if before.get(number) != now[number]}

    def _try_again(self) -> None:
        self._check_at = self._clock() + self._again_s
        self._again_s = min(self._again_s * 2, CHECK_S)

    def _take_over(self, opening: Future[_Opened]) -> bool:
        self._opening = None
        try:
            agent, self._listening = opening.result()
        except TransportError as error:
            self._log.warning("cannot make another NIXL agent: %s; trying again", error)
            self._try_again()
            return False
        former, self.transport = self.transport, agent
        self._closing.append((former, self._background.submit(former.close)))
        self._was_read = self._has_lost_socket = False
        self._failures, self._check_at = 0, self._clock()
        return True


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
