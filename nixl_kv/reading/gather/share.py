"""Descriptors of memory, from one process to another of the same host, also between containers.

A file descriptor passes a UNIX socket wherever both processes see the socket's file: PID, IPC and
network namespaces do not matter. The owner of the memory listens in the directory `share_dir`. A
UNIX socket has no CURVE, so a reader proves a token that it got over CURVE. Each token is good for
one connection, which begins with the token for the next one.

    reader                                owner
    token                           ->
                                    <-    the next token; nothing, and the end: it is refused
    number of the first piece       ->
                                    <-    how many pieces follow, with a descriptor for each;
                                          none, and why not
    ...

Both then keep the connection open. Its end says that the owner has gone, or takes its memory back.
"""

import collections
import contextlib
import enum
import os
import re
import secrets
import select
import socket
import stat
import struct
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import ClassVar, Final

from nixl_kv.errors import LimitedLog, TransportError, get_logger, printable
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import MAX_ALLOCATIONS, SHARE_TOKEN_BYTES, Share

logger = get_logger(__name__)

# Pieces per answer. Linux passes up to 253 descriptors in a message, and counts those under way
# against the sender's limit. To export a piece takes some tens of microseconds.
BATCH: Final = 32
# A connection to the socket in `share_dir` ends, because it has not proved a token, or because its
# owner does not answer.
PROVING_S: Final = 2.0
# A connection ends, because it has not fetched all pieces. A reader then uses another path.
FETCHING_S: Final = 30.0
# Prefill accepts further connections to the socket in `share_dir`. Without a pause, a flood of them
# or a lack of descriptors would keep its thread busy.
ACCEPTING_S: Final = 0.01
# Ranks that map the memory at a time, and connections that have proved nothing yet. A host has up
# to 16 GPUs, and a rank that replaces its NIXL agent maps twice. The first is also the length of
# the listener's queue: Linux refuses a connection beyond it at once.
MAX_CONNECTIONS: Final = 256
MAX_UNPROVEN: Final = 16
# Tokens that are out: the oldest becomes invalid.
MAX_TOKENS: Final = 4096
# Owners of which a reader remembers the next token.
MAX_OWNERS: Final = 1024
# A socket in `share_dir` that nothing listens on is removed: its process died before it listened.
BINDING_S: Final = 60.0

NUMBER: Final = struct.Struct("<I")
MAX_REASON: Final = 200
PACKET_BYTES: Final = 1024
NAME: Final = re.compile(r"\.?[0-9a-f]{16}")


def boot_id() -> str:
    """Name this boot of the kernel, which all containers of a host share."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


# --- the owner of the memory


class State(enum.Enum):
    """States of a connection, and the packet that the owner awaits in each."""

    UNPROVEN = "a token"
    FETCHING = "the number of a piece"
    HOLDING = "nothing: all pieces are sent"


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    due: float  # when it ends unless it goes on, in monotonic seconds
    state: State = State.UNPROVEN


class ShareServer:
    """A rank's socket in `share_dir`. All of it runs on the transfer thread, and nothing waits.

    It is a `feature.Worker` that carries out no actions: connections are its work. `count` pieces
    are numbered from 0 on, and `export` makes a descriptor of one, which this closes again.
    """

    name: ClassVar[str] = "mapping_ranks"
    actions: ClassVar[frozenset[type]] = frozenset()

    def __init__(
        self,
        directory: str,
        count: int,
        export: Callable[[int], int],
        *,
        watch: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        """Listen, and remove the sockets of processes that were killed.

        Raises:
            TransportError: if the directory cannot be used.
        """
        self._count = count
        self._export = export
        self._clock = clock
        self._log = LimitedLog(logger, clock)
        self._tokens: dict[bytes, None] = {}  # the oldest first
        self._connections: dict[int, _Connection] = {}  # by descriptor
        self._accepts_at: float | None = None  # when it accepts again; None: it does
        self.socket_name = secrets.token_hex(8)
        self._path = Path(directory, self.socket_name)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.settimeout(0)
        try:
            remove_stale(Path(directory))
            # A file of that name always has a listener, unless its process was killed.
            unlistened = self._path.with_name(f".{self.socket_name}")
            self._listener.bind(str(unlistened))
            unlistened.chmod(0o600)
            self._listener.listen(MAX_CONNECTIONS)
            unlistened.rename(self._path)
        except OSError as error:
            self._listener.close()
            raise TransportError(f"listening in share_dir {directory!r}: {error}") from error
        self._ready = select.epoll()
        self._ready.register(self._listener, select.EPOLLIN)
        watch(self._ready.fileno())

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def wait_s(self) -> float | None:
        now = self._clock()
        due = [one.due for one in self._connections.values() if one.state is not State.HOLDING]
        if self._accepts_at is not None:
            due.append(self._accepts_at)
        return max(0.0, min(due) - now) if due else None

    def add(self, action: events.WorkAction) -> None:
        """No action is for it."""

    def poll(self) -> list[events.WorkEvent]:
        if self._ready.closed:
            return []
        now = self._clock()
        if self._accepts_at is not None and self._accepts_at <= now:
            self._accepts_at = None
            self._ready.modify(self._listener, select.EPOLLIN)
        ready = [descriptor for descriptor, _ in self._ready.poll(0)]
        for descriptor in ready:
            if descriptor in self._connections:
                self._receive(self._connections[descriptor])
        # After the tokens that have arrived: new connections end old ones without a token.
        if self._listener.fileno() in ready:
            self._accept()
        for one in [one for one in self._connections.values() if one.state is not State.HOLDING]:
            if one.due <= now:
                self._end(one, f"a process did not send {one.state.value} in time")
        return []

    def clear(self) -> None:
        """The machines have forgotten all, but the memory is the same."""

    def invite(self) -> bytes:
        """Make a token."""
        if len(self._tokens) >= MAX_TOKENS:
            del self._tokens[next(iter(self._tokens))]
        token = secrets.token_bytes(SHARE_TOKEN_BYTES)
        self._tokens[token] = None
        return token

    def begin_life(self) -> None:
        """Let all readers unmap the memory. Readers of the new incarnation get other tokens."""
        self._tokens.clear()
        for one in list(self._connections.values()):
            self._end(one)

    def close(self) -> None:
        """Let all readers unmap the memory, and listen no longer. May be called again."""
        if not self._ready.closed:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self.begin_life()
            self._listener.close()
            self._ready.close()

    def _accept(self) -> None:
        self._ready.modify(self._listener, 0)
        self._accepts_at = self._clock() + ACCEPTING_S
        for _ in range(MAX_UNPROVEN):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # too many open files
                self._log.warning("a process of this host cannot map this rank's memory: %s", error)
                return
            accepted.settimeout(0)
            one = _Connection(accepted, self._clock() + PROVING_S)
            self._connections[accepted.fileno()] = one
            self._ready.register(accepted, select.EPOLLIN)
            unproven = [c for c in self._connections.values() if c.state is State.UNPROVEN]
            if len(unproven) > MAX_UNPROVEN:
                self._end(unproven[0], f"more than {MAX_UNPROVEN} connections without a token")
            if len(self._connections) > MAX_CONNECTIONS:
                self._end(one, f"more than {MAX_CONNECTIONS} ranks map this rank's memory")

    def _receive(self, one: _Connection) -> None:
        try:
            packet = one.socket.recv(PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._end(one)
            return
        try:
            self._answer(one, packet)
        except (OSError, TransportError) as error:
            self._end(one, str(error))

    def _answer(self, one: _Connection, packet: bytes) -> None:
        match one.state:
            case State.UNPROVEN if packet in self._tokens:
                del self._tokens[packet]
                one.socket.send(self.invite())
                self._go_on(one, State.FETCHING)
            case State.UNPROVEN:
                self._end(one, "a process sent a token that is unknown or used")
            case State.FETCHING if len(packet) == NUMBER.size:
                (first,) = NUMBER.unpack(packet)
                end = min(first + BATCH, self._count)
                if first >= end:
                    raise TransportError(f"piece {first} is asked for; allowed: 0 to {end - 1}")
                self._send(one, range(first, end))
                is_last = end == self._count
                self._go_on(one, State.HOLDING if is_last else State.FETCHING)
            case _:
                self._end(one, f"a process sent {len(packet)} bytes; allowed: {one.state.value}")

    def _send(self, one: _Connection, pieces: range) -> None:
        descriptors: list[int] = []
        try:
            for piece in pieces:
                descriptors.append(self._export(piece))  # noqa: PERF401 - close those before an error
            socket.send_fds(one.socket, [NUMBER.pack(len(descriptors))], descriptors)
        except (OSError, TransportError) as error:
            reason = printable(str(error), MAX_REASON).encode()
            one.socket.send(NUMBER.pack(0) + reason)
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _go_on(self, one: _Connection, state: State) -> None:
        if one.state is State.UNPROVEN:
            one.due = self._clock() + FETCHING_S
        one.state = state

    def _end(self, one: _Connection, why: str = "") -> None:
        del self._connections[one.socket.fileno()]
        one.socket.close()  # which also ends its registration
        if why:
            self._log.warning("a connection to the socket of share_dir is closed: %s", why)


def remove_stale(directory: Path) -> None:
    """Remove the sockets in a directory whose process has ended.

    Raises:
        OSError: if the directory cannot be read, or such a socket cannot be removed.
    """
    for path in list(directory.iterdir()):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            is_ours = NAME.fullmatch(path.name) and stat.S_ISSOCK(status.st_mode)
            if not is_ours or not _is_refused(path):
                continue
            if not path.name.startswith(".") or status.st_mtime < time.time() - BINDING_S:
                path.unlink()


def _is_refused(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.settimeout(0)
        try:
            one.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # others wait in its queue, or it is another program's
            pass
    return False


# --- a reader


class Tokens:
    """The next token for each owner's socket. Any thread may use it."""

    def __init__(self) -> None:
        self._next: dict[Share, SimpleQueue[bytes]] = {}

    @contextlib.contextmanager
    def of(self, share: Share) -> Iterator[tuple[bytes, Callable[[bytes], None]]]:
        """A token, and the function that takes the one after it. Other threads wait meanwhile."""
        if len(self._next) >= MAX_OWNERS:
            self._next.pop(next(iter(self._next)), None)
        first: SimpleQueue[bytes] = SimpleQueue()
        first.put(share.token)
        queue = self._next.setdefault(share, first)
        try:
            token = queue.get(timeout=PROVING_S)
        except Empty as error:
            raise TransportError("another thread waits for the owner") from error
        followers = collections.deque[bytes](maxlen=1)
        try:
            yield token, followers.append
        finally:
            if followers:
                queue.put(followers.pop())
            elif self._next.get(share) is queue:
                del self._next[share]


class SharedPieces:
    """A connection to an owner of memory, which ends when the memory must be unmapped."""

    def __init__(self, directory: str, share: Share, tokens: Tokens) -> None:
        """Connect, and prove a token.

        Raises:
            TransportError: if nothing listens there, or the owner refuses the token.
        """
        self._until = time.monotonic() + FETCHING_S
        with contextlib.ExitStack() as undo:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(self.socket.close)
            try:
                self.socket.settimeout(PROVING_S)
                self.socket.connect(str(Path(directory, share.socket)))
                with tokens.of(share) as (token, keep):
                    self.socket.send(token)
                    follower = self.socket.recv(PACKET_BYTES)
                    if len(follower) != SHARE_TOKEN_BYTES:
                        raise TransportError("its owner has ended, or refuses the token as used")
                    keep(follower)
            except OSError as error:
                raise TransportError(
                    f"connecting to its owner in share_dir {directory!r}: {error}"
                ) from error
            undo.pop_all()

    def close(self) -> None:
        self.socket.close()

    def descriptors(self, count: int) -> Generator[int]:
        """The descriptors of pieces 0 to `count`, in order. The caller closes each.

        Raises:
            TransportError: if the owner is gone, takes too long, or cannot export a piece.
        """
        if count > MAX_ALLOCATIONS:
            raise TransportError(f"{count} pieces; allowed: {MAX_ALLOCATIONS}")
        number = 0
        while number < count:
            batch = self._fetch(number, min(BATCH, count - number))
            number += len(batch)
            try:
                while batch:
                    yield batch.pop(0)
            finally:
                for descriptor in batch:
                    os.close(descriptor)

    def _fetch(self, number: int, most: int) -> list[int]:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TransportError(f"its owner has not sent all pieces within {FETCHING_S:g} s")
        try:
            # Other peers wait until this rank is planned. An owner answers in its next turn.
            self.socket.settimeout(min(left_s, PROVING_S))
            self.socket.send(NUMBER.pack(number))
            answer, batch, flags, _ = socket.recv_fds(
                self.socket, PACKET_BYTES, BATCH, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise TransportError(f"fetching piece {number} from its owner: {error}") from error
        is_whole = not flags & socket.MSG_CTRUNC  # else this process has too many open files
        if is_whole and 0 < len(batch) <= most and answer == NUMBER.pack(len(batch)):
            return batch
        for descriptor in batch:
            os.close(descriptor)
        if not is_whole:
            raise TransportError("this process cannot open more files: raise its limit (ulimit -n)")
        reason = printable(answer[NUMBER.size :].decode(errors="replace"), MAX_REASON)
        raise TransportError(f"its owner cannot export it: {reason or 'the connection is closed'}")
