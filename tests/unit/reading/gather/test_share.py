"""Descriptors that pass a socket: of files in memory here, of GPU memory in tests/gpu."""

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nixl_kv.errors import TransportError
from nixl_kv.protocol.messages import MAX_ALLOCATIONS, SHARE_TOKEN_BYTES, Share
from nixl_kv.reading.gather import share
from nixl_kv.reading.gather.share import (
    ACCEPTING_S,
    BATCH,
    FETCHING_S,
    LEAST_RATE,
    MAX_CONNECTIONS,
    MAX_TOKENS,
    MAX_UNPROVEN,
    NUMBER,
    PROVING_S,
    SharedPieces,
    ShareServer,
    SharingError,
    Tokens,
    remove_stale,
)
from support.stepped import Clock

COUNT = 2 * BATCH + 3
LIMIT_S = 60.0
MAX_TOGETHER = 5 * MAX_UNPROVEN
ADMITTED_BYTES = NUMBER.size + SHARE_TOKEN_BYTES
REFUSED = NUMBER.pack(0)


def export(piece: int) -> int:
    """A file that holds the number of the piece."""
    descriptor = os.memfd_create(f"piece {piece}")
    os.write(descriptor, str(piece).encode())
    return descriptor


class Owner:
    """A server, and the transfer thread's loop on a thread of its own while it is `serving`."""

    def __init__(self, directory: Path, export: Callable[[int], int] = export) -> None:
        self.clock = Clock()
        self.watched: list[int] = []
        self.server = ShareServer(
            str(directory), COUNT, export, watch=self.watched.append, clock=self.clock
        )
        self.path = directory / self.server.socket_name

    def turn(self, timeout_s: float = LIMIT_S) -> None:
        """Wait as the transfer thread does, and let the server work. Then it accepts again."""
        assert self.is_woken(timeout_s), "nothing woke the transfer thread"
        assert self.server.poll() == []
        self.clock.now += ACCEPTING_S
        assert self.server.poll() == []

    def is_woken(self, timeout_s: float = 0) -> bool:
        return bool(select.select(self.watched, [], [], timeout_s)[0])

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        stopped, wake = threading.Event(), os.eventfd(0)

        def serve() -> None:
            while not stopped.is_set():
                is_accepting = self.server.wait_s is None
                select.select([*self.watched, wake], [], [], None if is_accepting else ACCEPTING_S)
                self.clock.now += ACCEPTING_S
                self.server.poll()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            os.eventfd_write(wake, 1)
            thread.join()
            os.close(wake)

    def invitation(self) -> Share:
        return Share(socket=self.server.socket_name, token=self.server.invite())

    def pieces(self, invitation: Share | None = None, tokens: Tokens | None = None) -> SharedPieces:
        """A reader of them, which a test closes."""
        directory = str(self.path.parent)
        return SharedPieces(directory, invitation or self.invitation(), tokens or Tokens())

    @contextlib.contextmanager
    def admitted(self) -> Iterator[socket.socket]:
        """A connection whose token was good."""
        with self.connect() as one:
            self.turn()
            one.send(self.server.invite())
            self.turn()
            assert len(one.recv(100)) == ADMITTED_BYTES
            yield one

    def connect(self, timeout_s: float = LIMIT_S) -> socket.socket:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one.settimeout(timeout_s)
        one.connect(str(self.path))
        return one


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    gc.collect()  # objects of earlier tests may hold open files, which tests count
    one = Owner(tmp_path)
    yield one
    one.server.close()


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def read_all(pieces: SharedPieces) -> list[int]:
    found = []
    for descriptor in pieces.descriptors(COUNT):
        found.append(int(os.pread(descriptor, 100, 0)))
        os.close(descriptor)
    return found


def has_ended(pieces: SharedPieces, timeout_s: float = 0) -> bool:
    return bool(select.select([pieces.socket], [], [], timeout_s)[0])


def refusal(one: socket.socket) -> str:
    """Why the owner has ended a connection; '' if it does not say so."""
    packet = one.recv(share.PACKET_BYTES)
    assert packet[: NUMBER.size] in {REFUSED, b""}
    assert one.recv(100) == b""
    return packet[NUMBER.size :].decode()


def test_a_reader_gets_all_descriptors_in_order_and_keeps_the_connection(owner: Owner) -> None:
    before = num_open_files()
    with owner.serving():
        pieces = owner.pieces()
        assert read_all(pieces) == list(range(COUNT))
    assert not has_ended(pieces)
    assert len(owner.server) == 1
    assert num_open_files() == before + 2, "more than both ends of the connection are open"
    pieces.close()
    owner.turn()
    assert len(owner.server) == 0
    assert num_open_files() == before


def test_a_reader_that_stops_early_closes_its_descriptors(owner: Owner) -> None:
    before = num_open_files()
    with owner.serving():
        pieces = owner.pieces()
        with contextlib.closing(pieces.descriptors(COUNT)) as descriptors:
            os.close(next(descriptors))
    assert num_open_files() == before + 2
    pieces.close()


@pytest.mark.parametrize("token", [b"", bytes(SHARE_TOKEN_BYTES), b"short", bytes(1000)])
def test_a_wrong_token_is_refused(owner: Owner, token: bytes) -> None:
    owner.server.invite()
    with owner.connect() as one:
        owner.turn()
        one.send(token) if token else one.shutdown(socket.SHUT_WR)
        owner.turn()
        assert refusal(one) == ("its token is unknown or used" if token else "")
    assert len(owner.server) == 0


def test_a_token_is_good_for_one_connection(owner: Owner) -> None:
    with owner.serving():
        invitation = owner.invitation()
        first = owner.pieces(invitation)
        with pytest.raises(
            TransportError, match="closed the connection: its token is unknown or used"
        ):
            owner.pieces(invitation)
        assert not has_ended(first)
        first.close()


def test_threads_that_map_the_same_memory_take_turns(owner: Owner) -> None:
    tokens, mapped, errors = Tokens(), list[SharedPieces](), list[Exception]()
    invitation = owner.invitation()

    def connect() -> None:
        try:
            mapped.append(owner.pieces(invitation, tokens))
        except TransportError as error:
            errors.append(error)

    with owner.serving():
        threads = [threading.Thread(target=connect) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (len(mapped), errors) == (8, [])
    for pieces in mapped:
        pieces.close()


def test_after_a_failure_the_description_s_token_counts_again(tmp_path: Path) -> None:
    tokens, gone = Tokens(), Share(socket="0" * 16, token=b"token")
    for _ in range(2):
        with pytest.raises(TransportError, match="No such file") as refused:
            SharedPieces(str(tmp_path), gone, tokens)
        assert not isinstance(refused.value, SharingError), "it would be tried again for ever"
    with tokens.of(gone) as (token, _):
        assert token == b"token"


def test_a_reader_remembers_the_tokens_of_so_many_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forgotten one gets the token of its description, which is used."""
    monkeypatch.setattr(share, "MAX_OWNERS", 3)
    tokens = Tokens()
    owners = [Share(socket=f"{number:016x}", token=b"first") for number in range(5)]
    for one in owners:
        with tokens.of(one) as (_, keep):
            keep(b"next")
    assert len(tokens._next) == 3
    found = []
    for one in owners[::-1][:3]:
        with tokens.of(one) as (token, keep):
            found.append(token)
            keep(b"later")
    assert found[0] == b"next"


def test_old_tokens_become_invalid(owner: Owner) -> None:
    first = owner.server.invite()
    others = [owner.server.invite() for _ in range(MAX_TOKENS)]
    for token, is_good in ((first, False), (others[0], True)):
        with owner.connect() as one:
            owner.turn()
            one.send(token)
            owner.turn()
            assert (len(one.recv(100)) == ADMITTED_BYTES) == is_good


def test_a_new_incarnation_ends_connections_and_tokens(owner: Owner) -> None:
    with owner.serving():
        held = owner.pieces()
        read_all(held)
        unused = owner.invitation()
    owner.server.begin_life()
    assert has_ended(held)
    held.close()
    with owner.serving():
        with pytest.raises(TransportError, match="its token is unknown or used"):
            owner.pieces(unused)
        again = owner.pieces()
        assert read_all(again) == list(range(COUNT))
        again.close()


def test_the_end_of_the_server_ends_connections_and_its_file(owner: Owner, tmp_path: Path) -> None:
    with owner.serving():
        held = owner.pieces()
        read_all(held)
    owner.server.close()
    owner.server.close()
    assert has_ended(held)
    held.close()
    assert list(tmp_path.iterdir()) == []
    assert owner.server.poll() == []
    assert owner.server.wait_s is None


# Bounds


def test_silent_connections_end_in_time(owner: Owner) -> None:
    assert owner.server.wait_s is None
    with owner.connect() as one:
        owner.turn()
        assert owner.server.wait_s == pytest.approx(PROVING_S - ACCEPTING_S)
        owner.clock.now += PROVING_S / 2
        owner.server.poll()
        assert len(owner.server) == 1
        assert owner.server.wait_s == pytest.approx(PROVING_S / 2 - ACCEPTING_S)
        owner.clock.now += PROVING_S / 2
        owner.server.poll()
        assert refusal(one) == "it did not send a token in time"
    assert (len(owner.server), owner.server.wait_s) == (0, None)


def test_a_reader_fetches_within_a_time_and_holds_without_one(owner: Owner) -> None:
    with owner.admitted() as slow, owner.admitted() as done:
        for number in range(0, COUNT, BATCH):
            done.send(NUMBER.pack(number))
            owner.turn()
            _, descriptors, _, _ = socket.recv_fds(done, 100, BATCH)
            for descriptor in descriptors:
                os.close(descriptor)
        owner.clock.now += FETCHING_S
        owner.server.poll()
        assert refusal(slow) == "it did not send the number of a piece in time"
        assert (len(owner.server), owner.server.wait_s) == (1, None)
        done.settimeout(0)
        with pytest.raises(BlockingIOError):
            done.recv(100)


def test_connections_without_a_token_are_few(owner: Owner) -> None:
    with contextlib.ExitStack() as stack:
        silent = []
        for _ in range(2 * MAX_UNPROVEN):
            silent.append(stack.enter_context(owner.connect()))
            owner.turn()
        assert len(owner.server) == MAX_UNPROVEN
        assert [bool(select.select([one], [], [], 0)[0]) for one in silent] == (
            [True] * MAX_UNPROVEN + [False] * MAX_UNPROVEN
        ), "the oldest ones end"
        silent[-1].send(owner.server.invite())
        owner.turn()
        assert len(silent[-1].recv(100)) == ADMITTED_BYTES


def test_readers_that_connect_at_once_are_all_answered(owner: Owner) -> None:
    """This happens if the owner's thread is busy while engines start on all GPUs of a host."""
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(owner.connect(timeout_s=0)) for _ in range(MAX_TOGETHER)]
        for one in readers:
            one.send(owner.server.invite())
        while len(owner.server) < MAX_TOGETHER:
            owner.turn()
        owner.turn()
        assert [len(one.recv(100)) for one in readers] == [ADMITTED_BYTES] * MAX_TOGETHER


def test_a_flood_of_connections_wakes_the_thread_once_in_a_pause(owner: Owner) -> None:
    with owner.connect():
        assert owner.is_woken()
        owner.server.poll()
        with owner.connect():
            assert not owner.is_woken()
            assert owner.server.wait_s == pytest.approx(ACCEPTING_S)
            owner.clock.now += ACCEPTING_S
            owner.server.poll()
            assert len(owner.server) == 2


def test_without_descriptors_the_thread_waits_before_it_accepts_again(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    with owner.connect() as one:
        with no_descriptors_left():
            assert owner.is_woken()
            owner.server.poll()
            assert not owner.is_woken(), "it would be busy for as long as it has none"
        assert "Too many open files" in caplog.text
        owner.clock.now += ACCEPTING_S
        owner.server.poll()
        one.send(owner.server.invite())
        owner.turn()
        assert len(one.recv(100)) == ADMITTED_BYTES


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in taken:
            os.close(descriptor)


def test_connections_are_limited(owner: Owner) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(owner.admitted())
        one = stack.enter_context(owner.connect())
        owner.turn()
        assert refusal(one) == f"allowed: {MAX_CONNECTIONS} ranks that map this rank's memory"
        assert len(owner.server) == MAX_CONNECTIONS


@pytest.mark.parametrize(
    "packet", [b"x", NUMBER.pack(COUNT), NUMBER.pack((1 << 32) - 1), bytes(share.PACKET_BYTES)]
)
def test_a_message_other_than_a_piece_ends_a_connection(owner: Owner, packet: bytes) -> None:
    with owner.admitted() as one:
        one.send(packet)
        owner.turn()
        assert "allowed: " in refusal(one)


def test_a_holder_that_asks_for_more_is_cut_off(owner: Owner) -> None:
    with owner.admitted() as one:
        for _ in range(2):
            one.send(NUMBER.pack(COUNT - 1))
            owner.turn()
        _, descriptors, _, _ = socket.recv_fds(one, 100, BATCH)
        os.close(*descriptors)
        assert refusal(one) == "it sent 4 bytes; allowed: nothing: all pieces are sent"


def test_a_reader_that_never_takes_its_answers_blocks_no_other(owner: Owner) -> None:
    with owner.admitted() as one:
        one.settimeout(0)
        with contextlib.suppress(OSError):
            for _ in range(10_000):
                one.send(NUMBER.pack(0))
                owner.turn()
        assert len(owner.server) <= 1
        with owner.connect():
            owner.turn()


@pytest.mark.parametrize("error", [TransportError("CUDA_ERROR_X"), OSError(24, "Too many files")])
def test_a_piece_that_cannot_be_exported_is_a_reason(tmp_path: Path, error: Exception) -> None:
    def fail(piece: int) -> int:
        if piece == 1:
            raise error
        return export(piece)

    owner = Owner(tmp_path, fail)
    before = num_open_files()
    with owner.serving():
        pieces = owner.pieces()
        with pytest.raises(
            TransportError, match=r"pieces 0 to 31 cannot be handed out: .*(CUDA_|Too many)"
        ):
            read_all(pieces)
    pieces.close()
    assert num_open_files() == before
    owner.server.close()


def test_a_reader_asks_for_no_more_pieces_than_a_description_may_have(owner: Owner) -> None:
    with owner.serving():
        pieces = owner.pieces()
        with pytest.raises(TransportError, match=f"allowed: {MAX_ALLOCATIONS}"):
            next(pieces.descriptors(MAX_ALLOCATIONS + 1))
        pieces.close()


# Owners that end

DIES = """\
import os, sys, time
from nixl_kv.reading.gather.share import ShareServer
import select
watched = []
server = ShareServer(sys.argv[1], 3, lambda _: os.memfd_create("x"), watch=watched.append,
                     clock=time.monotonic)
print(server.socket_name, server.invite().hex(), flush=True)
while True:
    select.select(watched, [], [], server.wait_s)
    server.poll()
"""


@contextlib.contextmanager
def another_owner(directory: Path) -> Iterator[tuple["subprocess.Popen[str]", Share]]:
    command = [sys.executable, "-c", DIES, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name, token = process.stdout.readline().split()
        try:
            yield process, Share(socket=name, token=bytes.fromhex(token))
        finally:
            process.kill()


def test_a_reader_hears_at_once_that_the_owner_was_killed(tmp_path: Path) -> None:
    with another_owner(tmp_path) as (process, invitation):
        pieces = SharedPieces(str(tmp_path), invitation, Tokens())
        assert len(list(pieces.descriptors(3))) == 3
        process.send_signal(signal.SIGSTOP)
        assert not has_ended(pieces, 0.1), "it may go on"
        process.kill()
        assert has_ended(pieces, LIMIT_S)
        pieces.close()


class Time:
    """See the module `time`. It passes only when an owner takes it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.time = time.time

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Time:
    one = Time()
    monkeypatch.setattr(share, "time", one)
    return one


@contextlib.contextmanager
def answering(
    directory: Path, answer: Callable[[socket.socket, bytes], None]
) -> Iterator[SharedPieces]:
    """A reader of a process that answers each question as it likes."""
    invitation = Share(socket="0" * 16, token=b"token")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(str(directory / invitation.socket))
        listener.listen()

        def serve() -> None:
            with listener.accept()[0] as one:
                one.settimeout(LIMIT_S)
                one.recv(100)
                one.send(NUMBER.pack(1) + bytes(SHARE_TOKEN_BYTES))
                while question := one.recv(100):
                    answer(one, question)

        thread = threading.Thread(target=serve)
        thread.start()
        stack.callback(thread.join)
        pieces = SharedPieces(str(directory), invitation, Tokens())
        stack.callback(pieces.close)
        yield pieces


def fetch(pieces: SharedPieces, count: int) -> None:
    for descriptor in pieces.descriptors(count):
        os.close(descriptor)


def send_pieces(one: socket.socket, count: int, size: int | None = None) -> None:
    descriptors = [os.memfd_create("piece") for _ in range(count)]
    socket.send_fds(one, [NUMBER.pack(count if size is None else size)], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


def test_an_owner_that_sends_piece_by_piece_costs_no_more_than_one_that_hangs(
    tmp_path: Path, passing: Time
) -> None:
    """Plans of other peers wait for it."""

    def drip(one: socket.socket, _question: bytes) -> None:
        passing.now += 0.4 * PROVING_S
        send_pieces(one, 1)

    with (
        answering(tmp_path, drip) as pieces,
        pytest.raises(TransportError, match="fetching piece 3 from its owner: it answers too slow"),
    ):
        fetch(pieces, MAX_ALLOCATIONS)
    assert passing.now < 1.5 * PROVING_S


def test_an_owner_has_time_for_each_piece(tmp_path: Path, passing: Time) -> None:
    """A cache in expandable segments has thousands."""

    def send(one: socket.socket, _question: bytes) -> None:
        passing.now += BATCH / LEAST_RATE
        send_pieces(one, BATCH)

    with answering(tmp_path, send) as pieces:
        fetch(pieces, 100 * BATCH)
    assert passing.now > PROVING_S


def test_an_owner_saves_up_no_time(tmp_path: Path, passing: Time) -> None:
    answers = iter([0.0] * 100 + [1.1 * PROVING_S] * 2)

    def send(one: socket.socket, _question: bytes) -> None:
        passing.now += next(answers)
        send_pieces(one, BATCH)

    with (
        answering(tmp_path, send) as pieces,
        pytest.raises(TransportError, match="it answers too slowly"),
    ):
        fetch(pieces, MAX_ALLOCATIONS)
    assert next(answers, None) == 1.1 * PROVING_S


def test_a_reader_that_gave_up_may_try_again_with_its_token(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner was stopped, and then finds the token of a connection that has ended."""
    invitation, tokens = owner.invitation(), Tokens()
    with monkeypatch.context() as impatient:
        impatient.setattr(share, "PROVING_S", 0.2)
        with pytest.raises(SharingError, match="proving a token to its owner: timed out"):
            owner.pieces(invitation, tokens)
    owner.turn()
    assert len(owner.server) == 0
    with owner.serving():
        pieces = owner.pieces(invitation, tokens)
        assert read_all(pieces) == list(range(COUNT))
        pieces.close()


# Reasons


def before_it_asks(patch: pytest.MonkeyPatch, step: Callable[[], object]) -> None:
    ask = SharedPieces._ask
    patch.setattr(SharedPieces, "_ask", lambda pieces, packet: (step(), ask(pieces, packet))[1])


def after_it_asks(patch: pytest.MonkeyPatch, step: Callable[[], object]) -> None:
    receive, steps = share._Answer.receive, iter([step])
    later: Any = lambda connection: (next(steps, int)(), receive(connection))[1]  # noqa: E731
    patch.setattr(share._Answer, "receive", later)


@pytest.mark.parametrize("when", [before_it_asks, after_it_asks])
def test_a_full_owner_says_so(owner: Owner, monkeypatch: pytest.MonkeyPatch, when: Any) -> None:
    """Also if it ends a connection without reading the token."""
    monkeypatch.setattr(share, "MAX_CONNECTIONS", 0)
    when(monkeypatch, owner.turn)
    with pytest.raises(SharingError, match="owner closed the connection: allowed: 0 ranks that"):
        owner.pieces()


@pytest.mark.parametrize("when", [before_it_asks, after_it_asks])
def test_an_owner_that_ends_has_refused_nothing(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, when: Any
) -> None:
    when(monkeypatch, owner.server.close)
    with pytest.raises(SharingError, match="owner closed the connection: it has ended, or takes"):
        owner.pieces()


def test_a_lack_of_descriptors_is_named_with_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = threading.Event()

    def send(one: socket.socket, _question: bytes) -> None:
        send_pieces(one, BATCH)
        sent.set()

    def receive_none(connection: socket.socket) -> None:
        assert sent.wait(LIMIT_S)
        with no_descriptors_left():
            receive(connection).refuse()

    before = num_open_files()
    with answering(tmp_path, send) as pieces:
        receive = share._Answer.receive
        monkeypatch.setattr(share._Answer, "receive", receive_none)
        with pytest.raises(SharingError, match=r"cannot open more than \d+ files: raise its limit"):
            next(pieces.descriptors(BATCH))
    assert num_open_files() == before


def test_the_limit_is_not_blamed_for_other_losses() -> None:
    """Linux also drops descriptors that a security module forbids."""
    answer = share._Answer(NUMBER.pack(BATCH), [], is_whole=False)
    with pytest.raises(SharingError, match="although this process can open more files"):
        answer.refuse()


@pytest.mark.parametrize(
    ("count", "size", "why"),
    [
        (BATCH + 1, None, f"sent 4 bytes with more than {BATCH} descriptors"),
        (2, 3, "sent 4 bytes with 2 descriptors"),
        (5, None, "sent 4 bytes with 5 descriptors"),  # more than were asked for
        (0, None, "closed the connection: it names no reason"),
    ],
)
def test_an_answer_that_is_not_right_is_described(
    tmp_path: Path, count: int, size: int | None, why: str
) -> None:
    before = num_open_files()
    with (
        answering(tmp_path, lambda one, _: send_pieces(one, count, size)) as pieces,
        pytest.raises(SharingError, match=why),
    ):
        next(pieces.descriptors(4))
    assert num_open_files() == before


def test_a_message_with_more_descriptors_than_it_says_is_refused(tmp_path: Path) -> None:
    """Linux drops those that do not fit, so the others look like all that the owner sent."""
    before = num_open_files()
    with (
        answering(tmp_path, lambda one, _: send_pieces(one, BATCH + 1, BATCH)) as pieces,
        pytest.raises(SharingError, match=f"more than {BATCH} descriptors"),
    ):
        next(pieces.descriptors(2 * BATCH))
    assert num_open_files() == before


def test_an_owner_that_hangs_later_costs_no_more(owner: Owner) -> None:
    """A decode engine plans one rank at a time, so other peers would wait as long."""
    with owner.serving():
        pieces = owner.pieces()
    begun = time.monotonic()
    with pytest.raises(TransportError, match="fetching piece 0 from its owner: timed out"):
        read_all(pieces)
    assert time.monotonic() - begun < FETCHING_S / 2
    pieces.close()


def test_the_next_owner_removes_the_sockets_of_killed_ones(tmp_path: Path, owner: Owner) -> None:
    with another_owner(tmp_path) as (process, invitation):
        stale = tmp_path / invitation.socket
        assert stale.is_socket()
        process.kill()
        process.wait()
    (tmp_path / "notes").write_text("not ours")
    (tmp_path / ("1" * 16)).write_text("not a socket")
    second = Owner(tmp_path)
    assert not stale.exists()
    left = {owner.server.socket_name, second.server.socket_name, "notes", "1" * 16}
    assert {path.name for path in tmp_path.iterdir()} == left
    with pytest.raises(TransportError, match="No such file"):
        owner.pieces(invitation)
    second.server.close()


def test_a_socket_that_is_not_listening_yet_stays_for_a_while(tmp_path: Path) -> None:
    young, old = tmp_path / ("." + "2" * 16), tmp_path / ("." + "3" * 16)
    for path in (young, old):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
            one.bind(str(path))
    then = time.time() - 2 * share.BINDING_S
    os.utime(old, (then, then))
    remove_stale(tmp_path)
    assert (young.exists(), old.exists()) == (True, False)


def test_another_program_s_socket_stays_and_harms_no_owner(tmp_path: Path) -> None:
    """One of another type refuses the connection with another error."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(tmp_path / ("4" * 16)))
        other.listen()
        Owner(tmp_path).server.close()
    assert (tmp_path / ("4" * 16)).exists()


def test_a_socket_with_a_full_queue_is_alive(tmp_path: Path, owner: Owner) -> None:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(BlockingIOError):
            while True:
                one = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                one.settimeout(0)
                one.connect(str(owner.path))
        remove_stale(tmp_path)
        with pytest.raises(SharingError, match="too many connections wait for it"):
            owner.pieces()
    assert owner.path.exists()


def test_a_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"listening in share_dir .*No such file"):
        Owner(tmp_path / "gone")
