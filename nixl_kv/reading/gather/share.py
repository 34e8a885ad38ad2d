"""Descriptors of memory, from one process to another of the same host, also between containers.

A file descriptor passes a UNIX socket wherever both processes see the socket's file: PID, IPC and
network namespaces do not matter. The owner of the memory listens in the directory `share_dir`. A
UNIX socket has no CURVE, so a reader proves a token that it got over CURVE. Each token is good for
one connection, which begins with the token for the next one.

    reader                                owner
    token                           ->
                                    <-    1, and the next token
    number of the first piece       ->
                                    <-    how many pieces follow, with a descriptor for each
    ...

Both then keep the connection open. Its end says that the owner has gone, or takes its memory back.
An owner that refuses something sends 0 and the reason, and ends the connection.
"""

import collections
import contextlib
import enum
import errno
import os
import re
import resource
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
from typing import ClassVar, Final, NoReturn

from nixl_kv.errors import LimitedLog, TransportError, get_logger, printable
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import MAX_ALLOCATIONS, SHARE_TOKEN_BYTES, Share

logger = get_logger(__name__)

# Pieces per answer. Linux passes up to 253 descriptors in a message, and counts those under way
# against the sender's limit. To export a piece takes some tens of microseconds.
BATCH: Final = 32
# A connection to the socket in `share_dir` ends, because it has not proved a token, or because its
# owner keeps the reader waiting. Plans of other peers wait with that reader.
PROVING_S: Final = 2.0
# Pieces per second that an owner of many may take longer for. It has then sent 16,384 in 18 s.
LEAST_RATE: Final = 1000
# A connection ends, because its reader has not fetched all pieces.
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
                self._end(one, f"it did not send {one.state.value} in time")
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
                self._end(unproven[0], f"allowed: {MAX_UNPROVEN} connections without a token")
            if len(self._connections) > MAX_CONNECTIONS:
                self._end(one, f"allowed: {MAX_CONNECTIONS} ranks that map this rank's memory")

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
                follower = secrets.token_bytes(SHARE_TOKEN_BYTES)
                # If the reader waits no longer, this fails, and its token stays good.
                one.socket.send(NUMBER.pack(1) + follower)
                del self._tokens[packet]
                self._tokens[follower] = None
                self._go_on(one, State.FETCHING)
            case State.UNPROVEN:
                raise TransportError("its token is unknown or used")
            case State.FETCHING if len(packet) == NUMBER.size:
                (first,) = NUMBER.unpack(packet)
                end = min(first + BATCH, self._count)
                if first >= end:
                    raise TransportError(f"it asks for piece {first}; allowed: 0 to {end - 1}")
                self._send(one, range(first, end))
                is_last = end == self._count
                self._go_on(one, State.HOLDING if is_last else State.FETCHING)
            case _:
                raise TransportError(f"it sent {len(packet)} bytes; allowed: {one.state.value}")

    def _send(self, one: _Connection, pieces: range) -> None:
        descriptors: list[int] = []
        try:
            for piece in pieces:
                descriptors.append(self._export(piece))  # noqa: PERF401 - close those before an error
            socket.send_fds(one.socket, [NUMBER.pack(len(descriptors))], descriptors)
        except (OSError, TransportError) as error:
            span = f"{pieces[0]} to {pieces[-1]}"
            raise TransportError(f"pieces {span} cannot be handed out: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _go_on(self, one: _Connection, state: State) -> None:
        if one.state is State.UNPROVEN:
            one.due = self._clock() + FETCHING_S
        one.state = state

    def _end(self, one: _Connection, why: str = "") -> None:
        del self._connections[one.socket.fileno()]
        if why:
            self._log.warning("a connection to the socket of share_dir is closed: %s", why)
            with contextlib.suppress(OSError):  # it is gone, or takes no answers
                one.socket.send(NUMBER.pack(0) + printable(why, MAX_REASON).encode())
        one.socket.close()  # which also ends its registration


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


class SharingError(TransportError):
    """An owner did not hand out its memory. Another attempt may succeed."""


class Tokens:
    """The next token for each owner's socket. Any thread may use it."""

    def __init__(self) -> None:
        self._next: dict[Share, SimpleQueue[bytes]] = {}

    @contextlib.contextmanager
    def of(
        self, share: Share, timeout_s: float = PROVING_S
    ) -> Iterator[tuple[bytes, Callable[[bytes], None]]]:
        """A token, and the function that takes the one after it. Other threads wait meanwhile.

        Raises:
            SharingError: if another thread has the token for longer than `timeout_s`.
        """
        if len(self._next) >= MAX_OWNERS:
            self._next.pop(next(iter(self._next)), None)
        first: SimpleQueue[bytes] = SimpleQueue()
        first.put(share.token)
        queue = self._next.setdefault(share, first)
        try:
            token = queue.get(timeout=timeout_s)
        except Empty as error:
            raise SharingError("another thread of this process waits for its owner") from error
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
            TransportError: if nothing listens there.
            SharingError: if the owner does not answer, or refuses.
        """
        self._left_s = PROVING_S  # that the owner may still keep this thread waiting
        with contextlib.ExitStack() as undo:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(self.socket.close)
            with self._waiting(f"connecting to its owner in share_dir {directory!r}"):
                self.socket.connect(str(Path(directory, share.socket)))
            with (
                self._waiting("proving a token to its owner"),
                tokens.of(share, self._left_s) as (token, keep),
            ):
                answer = self._ask(token)
                number, follower = answer.content[: NUMBER.size], answer.content[NUMBER.size :]
                is_right = answer.is_whole and not answer.descriptors and number == NUMBER.pack(1)
                if not is_right or len(follower) != SHARE_TOKEN_BYTES:
                    answer.refuse()
                keep(follower)
            undo.pop_all()

    def close(self) -> None:
        self.socket.close()

    def descriptors(self, count: int) -> Generator[int]:
        """The descriptors of pieces 0 to `count`, in order. The caller closes each.

        Raises:
            TransportError: if the owner is gone, or there are too many.
            SharingError: if the owner takes too long or refuses, or this process lacks descriptors.
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
        with self._waiting(f"fetching piece {number} from its owner"):
            answer = self._ask(NUMBER.pack(number))
        batch = answer.descriptors
        is_right = answer.is_whole and 0 < len(batch) <= most
        if not is_right or answer.content != NUMBER.pack(len(batch)):
            answer.refuse()
        self._left_s = min(PROVING_S, self._left_s + len(batch) / LEAST_RATE)
        return batch

    @contextlib.contextmanager
    def _waiting(self, doing: str) -> Iterator[None]:
        """Limit the time that the owner keeps this thread waiting."""
        if self._left_s <= 0:
            raise SharingError(f"{doing}: it answers too slowly")
        begun = time.monotonic()
        self.socket.settimeout(self._left_s)
        try:
            yield
        except TimeoutError as error:
            raise SharingError(f"{doing}: {error}") from error
        except BlockingIOError as error:
            raise SharingError(f"{doing}: too many connections wait for it") from error
        except OSError as error:
            raise TransportError(f"{doing}: {error}") from error
        finally:
            self._left_s -= time.monotonic() - begun

    def _ask(self, question: bytes) -> "_Answer":
        # An owner that has refused this reader has left the reason. Linux hands it out after the
        # error that the owner did not read all.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.send(question)
        try:
            return _Answer.receive(self.socket)
        except ConnectionResetError:
            return _Answer.receive(self.socket)


@dataclass
class _Answer:
    """A packet of an owner."""

    content: bytes
    descriptors: list[int]
    is_whole: bool  # all of its descriptors are here

    @classmethod
    def receive(cls, connection: socket.socket) -> "_Answer":
        content, descriptors, flags, _ = socket.recv_fds(
            connection, PACKET_BYTES, BATCH, socket.MSG_CMSG_CLOEXEC
        )
        return cls(content, descriptors, is_whole=not flags & socket.MSG_CTRUNC)

    def refuse(self) -> NoReturn:
        """Close its descriptors.

        Raises:
            SharingError: says why it is not the expected one.
        """
        why = self._why()
        for descriptor in self.descriptors:
            os.close(descriptor)
        raise SharingError(why)

    def _why(self) -> str:
        if not self.content:
            return "its owner closed the connection: it has ended, or takes its memory back"
        if not self.is_whole and len(self.descriptors) < BATCH:
            return _why_not_received()
        if self.content.startswith(NUMBER.pack(0)):
            reason = printable(self.content[NUMBER.size :].decode(errors="replace"), MAX_REASON)
            return f"its owner closed the connection: {reason or 'it names no reason'}"
        count = len(self.descriptors) if self.is_whole else f"more than {BATCH}"
        return f"its owner sent {len(self.content)} bytes with {count} descriptors"


def _why_not_received() -> str:
    """Why Linux has dropped descriptors that were sent to this process."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno == errno.EMFILE:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return f"this process cannot open more than {limit} files: raise its limit (ulimit -n)"
        return f"this process cannot open more files: {error.strerror}"
    return (
        "Linux has dropped descriptors from its owner, although this process can open more files: "
        "a security module, such as SELinux, may forbid them"
    )
