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

import pytest

from nixl_kv.errors import TransportError
from nixl_kv.protocol.messages import MAX_ALLOCATIONS, SHARE_TOKEN_BYTES, Share
from nixl_kv.reading.gather import share
from nixl_kv.reading.gather.share import (
    ACCEPTING_S,
    BATCH,
    FETCHING_S,
    MAX_CONNECTIONS,
    MAX_TOKENS,
    MAX_UNPROVEN,
    NUMBER,
    PROVING_S,
    SharedPieces,
    ShareServer,
    Tokens,
    remove_stale,
)
from support.stepped import Clock

COUNT = 2 * BATCH + 3
LIMIT_S = 60.0
MAX_TOGETHER = 5 * MAX_UNPROVEN


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


def test_a_reader_gets_all_descriptors_in_order_and_keeps_the_connection(
    owner: Owner, tmp_path: Path
) -> None:
    before = num_open_files()
    with owner.serving():
        pieces = SharedPieces(str(tmp_path), owner.invitation(), Tokens())
        assert read_all(pieces) == list(range(COUNT))
    assert not has_ended(pieces)
    assert len(owner.server) == 1
    assert num_open_files() == before + 2, "more than both ends of the connection are open"
    pieces.close()
    owner.turn()
    assert len(owner.server) == 0
    assert num_open_files() == before


def test_few_descriptors_are_open_at_a_time(owner: Owner, tmp_path: Path) -> None:
    with owner.serving():
        pieces = SharedPieces(str(tmp_path), owner.invitation(), Tokens())
        before = num_open_files()
        for descriptor in pieces.descriptors(COUNT):
            assert num_open_files() <= before + 2 * BATCH  # the owner's and the reader's
            os.close(descriptor)
        pieces.close()


def test_a_reader_that_stops_early_closes_what_it_has(owner: Owner, tmp_path: Path) -> None:
    before = num_open_files()
    with owner.serving():
        pieces = SharedPieces(str(tmp_path), owner.invitation(), Tokens())
        with contextlib.closing(pieces.descriptors(COUNT)) as descriptors:
            os.close(next(descriptors))
    assert num_open_files() == before + 2
    pieces.close()


@pytest.mark.parametrize("token", [b"", bytes(SHARE_TOKEN_BYTES), b"short", bytes(1000)])
def test_a_wrong_token_is_refused(owner: Owner, tmp_path: Path, token: bytes) -> None:
    owner.server.invite()
    with owner.connect() as one:
        owner.turn()
        one.send(token) if token else one.shutdown(socket.SHUT_WR)
        owner.turn()
        assert one.recv(100) == b""
    assert len(owner.server) == 0
    del tmp_path


def test_a_token_is_good_for_one_connection(owner: Owner, tmp_path: Path) -> None:
    with owner.serving():
        invitation = owner.invitation()
        first = SharedPieces(str(tmp_path), invitation, Tokens())
        with pytest.raises(TransportError, match="refuses the token as used"):
            SharedPieces(str(tmp_path), invitation, Tokens())
        assert not has_ended(first)
        first.close()


def test_a_reader_connects_again_with_the_token_that_followed(owner: Owner, tmp_path: Path) -> None:
    """Another NIXL agent maps the memory too, with the same description."""
    tokens = Tokens()
    with owner.serving():
        invitation = owner.invitation()
        for _ in range(3):
            pieces = SharedPieces(str(tmp_path), invitation, tokens)
            assert read_all(pieces) == list(range(COUNT))
            pieces.close()


def test_threads_that_map_the_same_memory_take_turns(owner: Owner, tmp_path: Path) -> None:
    tokens, mapped, errors = Tokens(), list[SharedPieces](), list[Exception]()
    invitation = owner.invitation()

    def connect() -> None:
        try:
            mapped.append(SharedPieces(str(tmp_path), invitation, tokens))
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
    tokens, nobody = Tokens(), Share(socket="0" * 16, token=b"token")
    for _ in range(2):
        with pytest.raises(TransportError, match="No such file"):
            SharedPieces(str(tmp_path), nobody, tokens)
    with tokens.of(nobody) as (token, _):
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
    for token, answer in ((first, b""), (others[0], None)):
        with owner.connect() as one:
            owner.turn()
            one.send(token)
            owner.turn()
            assert (one.recv(100) == b"") == (answer == b"")


def test_a_new_incarnation_ends_connections_and_tokens(owner: Owner, tmp_path: Path) -> None:
    with owner.serving():
        held = SharedPieces(str(tmp_path), owner.invitation(), Tokens())
        read_all(held)
        unused = owner.invitation()
    owner.server.begin_life()
    assert has_ended(held)
    held.close()
    with owner.serving():
        with pytest.raises(TransportError, match="refuses the token"):
            SharedPieces(str(tmp_path), unused, Tokens())
        again = SharedPieces(str(tmp_path), owner.invitation(), Tokens())
        assert read_all(again) == list(range(COUNT))
        again.close()


def test_the_end_of_the_server_ends_connections_and_its_file(owner: Owner, tmp_path: Path) -> None:
    with owner.serving():
        held = SharedPieces(str(tmp_path), owner.invitation(), Tokens())
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
        assert one.recv(100) == b""
    assert (len(owner.server), owner.server.wait_s) == (0, None)


def test_a_reader_fetches_within_a_time_and_holds_without_one(owner: Owner) -> None:
    with owner.connect() as slow, owner.connect() as done:
        owner.turn()
        for one in (slow, done):
            one.send(owner.server.invite())
            owner.turn()
            assert len(one.recv(100)) == SHARE_TOKEN_BYTES
        for number in range(0, COUNT, BATCH):
            done.send(NUMBER.pack(number))
            owner.turn()
            _, descriptors, _, _ = socket.recv_fds(done, 100, BATCH)
            for descriptor in descriptors:
                os.close(descriptor)
        owner.clock.now += FETCHING_S
        owner.server.poll()
        assert slow.recv(100) == b""
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
        assert len(silent[-1].recv(100)) == SHARE_TOKEN_BYTES


def test_readers_that_connect_at_once_are_all_answered(owner: Owner) -> None:
    """As when the owner's thread is busy while engines start on all GPUs of a host."""
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(owner.connect(timeout_s=0)) for _ in range(MAX_TOGETHER)]
        for one in readers:
            one.send(owner.server.invite())
        while len(owner.server) < MAX_TOGETHER:
            owner.turn()
        owner.turn()
        assert [len(one.recv(100)) for one in readers] == [SHARE_TOKEN_BYTES] * MAX_TOGETHER


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
        assert len(one.recv(100)) == SHARE_TOKEN_BYTES


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
            one = stack.enter_context(owner.connect())
            owner.turn()
            one.send(owner.server.invite())
            owner.turn()
        one = stack.enter_context(owner.connect())
        owner.turn()
        assert one.recv(100) == b""
        assert len(owner.server) == MAX_CONNECTIONS


@pytest.mark.parametrize(
    "packet", [b"x", NUMBER.pack(COUNT), NUMBER.pack((1 << 32) - 1), bytes(share.PACKET_BYTES)]
)
def test_what_is_not_a_piece_ends_a_connection(owner: Owner, packet: bytes) -> None:
    with owner.connect() as one:
        owner.turn()
        one.send(owner.server.invite())
        owner.turn()
        one.recv(100)
        one.send(packet)
        owner.turn()
        assert one.recv(100) == b""


def test_a_holder_that_asks_for_more_is_cut_off(owner: Owner) -> None:
    with owner.connect() as one:
        owner.turn()
        one.send(owner.server.invite())
        owner.turn()
        one.recv(100)
        for _ in range(2):
            one.send(NUMBER.pack(COUNT - 1))
            owner.turn()
        _, descriptors, _, _ = socket.recv_fds(one, 100, BATCH)
        os.close(*descriptors)
        assert one.recv(100) == b""


def test_a_reader_that_never_takes_its_answers_blocks_nobody(owner: Owner) -> None:
    with owner.connect() as one:
        owner.turn()
        one.send(owner.server.invite())
        owner.turn()
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
        pieces = SharedPieces(str(tmp_path), owner.invitation(), Tokens())
        with pytest.raises(TransportError, match=r"cannot export it: .*(CUDA_ERROR_X|Too many)"):
            read_all(pieces)
    pieces.close()
    assert num_open_files() == before
    owner.server.close()


def test_a_reader_asks_for_no_more_pieces_than_a_description_may_have(
    owner: Owner, tmp_path: Path
) -> None:
    with owner.serving():
        pieces = SharedPieces(str(tmp_path), owner.invitation(), Tokens())
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


def test_an_owner_that_hangs_costs_a_reader_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share, "PROVING_S", 0.2)
    with another_owner(tmp_path) as (process, invitation):
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(TransportError, match="timed out"):
            SharedPieces(str(tmp_path), invitation, Tokens())


def test_an_owner_that_hangs_later_costs_no_more(
    owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode engine plans one rank at a time, so other peers would wait as long."""
    with owner.serving():
        pieces = SharedPieces(str(tmp_path), owner.invitation(), Tokens())
    monkeypatch.setattr(share, "PROVING_S", 0.2)
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
        SharedPieces(str(tmp_path), invitation, Tokens())
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
    assert owner.path.exists()


def test_a_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"listening in share_dir .*No such file"):
        Owner(tmp_path / "gone")
