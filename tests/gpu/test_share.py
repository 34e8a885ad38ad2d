"""GPU memory that a process in namespaces of its own shares in a directory (`share_dir`).

python -m pytest -s -m gpu tests/gpu/test_share.py

The owner has PID, IPC, network and mount namespaces of its own where this user may make them, and
uses the first GPU; the reader uses the last one. `-s` shows which namespaces, and all times.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("cuda.bindings.driver")

from nixl_kv.errors import TransportError  # noqa: E402
from nixl_kv.geometry.plan import Pieces  # noqa: E402
from nixl_kv.protocol import messages  # noqa: E402
from nixl_kv.reading.gather.memory import HIDDEN, Mapping  # noqa: E402
from nixl_kv.reading.gather.path import GatherPath  # noqa: E402
from nixl_kv.reading.gather.share import Tokens  # noqa: E402
from nixl_kv.reading.kernel import KernelStream  # noqa: E402
from support.share_owner import UNIT, content  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

TESTS: Final = Path(__file__).resolve().parents[1]
SIZE: Final = 1 << 30
PIECE: Final = 8 << 10
COUNT: Final = SIZE // (2 * PIECE)
START_S: Final = 180.0
UNMAPPED_S: Final = 1.0
"""The promise: a reader unmaps the memory in this time once the owner is gone."""
FORKED: Final = ("--pid", "--fork", "--kill-child")
EXPANDABLE: Final = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
KINDS: Final = {"pool": {}, "cumem": {}, "expandable": EXPANDABLE}
LAST_GPU: Final = max(0, torch.cuda.device_count() - 1)


def in_namespaces(command: list[str]) -> list[str]:
    """Run it in the most namespaces that this user may make."""
    for options in (FORKED, (*FORKED, "--ipc"), (*FORKED, "--ipc", "--net", "--mount-proc"))[::-1]:
        prefix = ["unshare", *options]
        with suppress(FileNotFoundError):
            if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
                print("namespaces:", *options)
                return [*prefix, *command]
    print("namespaces: none")
    return command


class Owner:
    """See `support.share_owner`."""

    def __init__(self, kind: str, directory: Path, size: int = SIZE) -> None:
        command = [sys.executable, "-m", "support.share_owner", kind, str(directory), str(size)]
        path = os.pathsep.join((str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")))
        env = os.environ | KINDS.get(kind, {}) | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": GPU}
        self.process = subprocess.Popen(
            in_namespaces(command), env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.export: messages.Export
        self.read_export()

    def read_export(self) -> None:
        export, address = self.read_line(START_S).split()
        self.export = msgspec.msgpack.decode(bytes.fromhex(export), type=messages.Export)
        self.address = int(address)

    def read_line(self, timeout_s: float = 60.0) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        assert ready, "the owner does not answer"
        line = self.process.stdout.readline().decode()
        assert line, f"the owner ended with status {self.process.wait()}"
        return line

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())
        self.process.stdin.flush()

    def ask(self, word: str) -> str:
        self.tell(word)
        return self.read_line().strip()

    def invited(self) -> messages.Export:
        """Its export, with a new token."""
        token = bytes.fromhex(self.ask("invite"))
        share = self.export.share
        assert share is not None
        share = messages.Share(socket=share.socket, token=token)
        return msgspec.structs.replace(self.export, share=share)

    def kill(self) -> None:
        with self.process:  # closes its pipes, and waits for it
            self.process.kill()  # `--kill-child`: its children too


GPU: Final = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
"""The owner sees the first GPU alone."""


@contextmanager
def owner(kind: str, directory: Path, size: int = SIZE) -> Iterator[Owner]:
    if kind == "cumem":
        pytest.importorskip("vllm.cumem_allocator", reason="needs vLLM's CUDA build")
    one = Owner(kind, directory, size)
    try:
        yield one
    finally:
        one.kill()


class Reader:
    """Reads every other piece, in a random order, as the transfer thread does."""

    def __init__(self, directory: Path | None, size: int = SIZE) -> None:
        self.watched: list[int] = []
        share_dir = None if directory is None else str(directory)
        map_memory = partial(Mapping, device=LAST_GPU, share_dir=share_dir, tokens=Tokens())
        self.stream = KernelStream(LAST_GPU)
        self.gather = GatherPath(self.stream, map_memory, self.watched.append, share_dir)
        self.memory = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{LAST_GPU}")
        rng = np.random.default_rng(5)
        self.count = size // (2 * PIECE)
        local, remote = (rng.permutation(self.count).astype(np.int32) for _ in range(2))
        self.pieces = [Pieces(local, remote)]

    def map(self, export: messages.Export, address: int) -> Any:
        first = np.zeros(1, dtype=np.int32)
        lists = [
            np.array([[base, PIECE, 0, 2 * PIECE, self.count]], dtype=np.uint64)
            for base in (self.memory.data_ptr(), address)
        ]
        plan: Any = SimpleNamespace(
            local=lists[0], remote=lists[1], paged_rows=(SimpleNamespace(first=(first, first)),)
        )
        begun = time.perf_counter()
        mapped = self.gather.map(export, plan)
        print(f"mapped {len(export.allocations)} pieces in {time.perf_counter() - begun:.4f} s")
        return mapped

    def read(self, mapped: Any) -> float:
        """Read it; returns GB/s."""
        begun = time.perf_counter()
        read = self.stream.start(mapped.plan, self.pieces)
        while not self.stream.poll(read):
            pass
        return self.count * PIECE / (time.perf_counter() - begun) / 1e9

    def check(self) -> None:
        """All of it is there, and nothing else was written."""
        device = self.memory.device
        pieces = content(str(device)).repeat(SIZE // UNIT).view(self.count, 2, PIECE)[:, 0]
        (pair,) = self.pieces
        to, of = (torch.from_numpy(side.astype(np.int64)) for side in (pair.local, pair.remote))
        expected = torch.zeros_like(self.memory)
        expected.view(self.count, 2, PIECE)[to.to(device), 0] = pieces[of.to(device)]
        assert torch.equal(self.memory, expected)
        self.memory.zero_()
        torch.cuda.synchronize(device)

    def wait_until_unmapped(self) -> float:
        """Turns of the transfer thread, until nothing is mapped; returns the seconds."""
        begun = time.perf_counter()
        while self.gather._mapped:
            ready, _, _ = select.select(self.watched, [], [], 30)
            assert ready, "the reader does not hear that the owner is gone"
            self.gather.tidy()
        return time.perf_counter() - begun


def wait_for_memory(at_least: int, timeout_s: float) -> float:
    """Seconds until this number of bytes of the owner's GPU is free."""
    begun = time.perf_counter()
    while torch.cuda.mem_get_info(0)[0] < at_least:
        assert time.perf_counter() - begun < timeout_s, f"{torch.cuda.mem_get_info(0)} bytes"
        time.sleep(0.001)
    return time.perf_counter() - begun


@pytest.fixture(scope="module")
def share_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("share")
    path.chmod(0o700)
    return path


@pytest.fixture(scope="module")
def reader(share_dir: Path) -> Reader:
    return Reader(share_dir)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_reads_memory_of_another_container(
    reader: Reader, share_dir: Path, kind: str
) -> None:
    with owner(kind, share_dir) as one:
        mapped = reader.map(one.invited(), one.address)
        reader.read(mapped)
        speed = max(reader.read(mapped) for _ in range(5))
        reader.check()
        print(f"{kind}: {len(one.export.allocations)} pieces, {speed:.0f} GB/s")
        reader.gather.unmap(mapped)


def test_plain_memory_is_mapped_within_one_pid_namespace_alone(
    reader: Reader, share_dir: Path
) -> None:
    """It has a CUDA IPC handle, with and without `share_dir`."""
    with owner("plain", share_dir) as one:
        assert all(each.handle for each in one.export.allocations)
        is_apart = one.export.host.split()[1] != str(Path("/proc/self/ns/pid").readlink())
        if is_apart:
            with pytest.raises(TransportError, match="another PID namespace"):
                reader.map(one.export, one.address)
        else:
            mapped = reader.map(one.export, one.address)
            reader.read(mapped)
            reader.check()
            reader.gather.unmap(mapped)


WRITE_THERE = """\
import sys
import msgspec
import numpy as np
from cuda.bindings import driver
from nixl_kv.gpu import make_current
from nixl_kv.protocol import messages
from nixl_kv.reading.gather.memory import Mapping
device = int(sys.argv[4])
make_current(device)
export = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=messages.Export)
first = np.array([int(sys.argv[2])])
(place,) = Mapping(export, device, sys.argv[3]).locate(first, first + 64).tolist()
(posted,) = driver.cuMemsetD8(place, 0xEE, 64)
(ended,) = driver.cuCtxSynchronize()
print(posted.name, ended.name)
"""


def run_apart(one: Owner, share_dir: Path, device: int, prefix: tuple[str, ...] = ()) -> str:
    """Map its memory in another process, and write to it; returns all that it prints."""
    arguments = msgspec.msgpack.encode(one.invited()).hex(), str(one.address), str(share_dir)
    command = [*prefix, sys.executable, "-c", WRITE_THERE, *arguments, str(device)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_cannot_write(reader: Reader, share_dir: Path, kind: str) -> None:
    with owner(kind, share_dir) as one:
        shown = run_apart(one, share_dir, LAST_GPU)
        print(kind, "a write ends with", shown.split("\n")[0])
        assert "CUDA_ERROR" in shown, shown
        assert "Error:" not in shown, shown
        mapped = reader.map(one.invited(), one.address)
        reader.read(mapped)
        reader.check()
        reader.gather.unmap(mapped)


HIDE_GPU = """\
set -e
mkdir -p "$1"
mount -t tmpfs none "$1"
for node in /dev/nvidia* /dev/null /dev/zero /dev/urandom /dev/random /dev/full; do
    test "$node" = "/dev/nvidia$2" && continue
    if test -d "$node"; then mkdir "$1/${node#/dev/}"; else touch "$1/${node#/dev/}"; fi
    mount --bind "$node" "$1/${node#/dev/}"
done
mkdir "$1/shm"
mount --rbind "$1" /dev
shift 2
exec "$@"
"""


SHOW_GPUS: Final = """\
import torch
for number in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_properties(number).uuid)
"""


def without_gpu(gpu: int, folder: Path) -> tuple[str, ...]:
    """A command's prefix: a mount namespace in which CUDA sees all GPUs but this one.

    Device nodes need not have the numbers of the driver's list, as in a container. So this hides
    one after the other until the right GPU is gone.
    """
    hidden = str(torch.cuda.get_device_properties(gpu).uuid)
    for node in Path("/dev").glob("nvidia[0-9]*"):
        number = node.name.removeprefix("nvidia")
        mount = ("unshare", "--mount", "sh", "-c", HIDE_GPU, "sh", str(folder / number), number)
        show = [*mount, sys.executable, "-c", SHOW_GPUS]
        seen = subprocess.run(show, capture_output=True, text=True, check=False)
        print(f"without {node}:", seen.stdout.split(), seen.stderr[-300:])
        if seen.returncode == 0 and seen.stdout.strip() and hidden not in seen.stdout:
            return mount
    pytest.skip("needs root, and a device node without which CUDA sees the other GPUs alone")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_container_without_the_owners_gpu_says_so(share_dir: Path, tmp_path: Path) -> None:
    """One device per pod, as device plugins do it."""
    mount = without_gpu(0, tmp_path)
    with owner("pool", share_dir) as one:
        shown = run_apart(one, share_dir, 0, mount)  # the first GPU of those that are left
        print(shown[-2000:])
        assert HIDDEN in shown


def test_a_token_is_good_once(reader: Reader, share_dir: Path) -> None:
    with owner("pool", share_dir) as one:
        export = one.invited()
        mapped = [reader.map(export, one.address) for _ in range(3)]
        assert len(mapped) == 3, "a reader goes on with the token that it got for the last one"
        with pytest.raises(TransportError, match="its token is unknown or used"):
            Reader(share_dir, 1 << 20).map(export, one.address)
        assert export.share is not None
        wrong = messages.Share(socket=export.share.socket, token=bytes(32))
        with pytest.raises(TransportError, match="its token is unknown or used"):
            reader.map(msgspec.structs.replace(export, share=wrong), one.address)
        for each in mapped:
            reader.gather.unmap(each)


def test_a_reader_unmaps_the_memory_of_a_killed_owner_and_its_successor_gets_it(
    share_dir: Path,
) -> None:
    """It has most of the GPU's memory, so two do not fit."""
    torch.cuda.empty_cache()
    size = int(torch.cuda.mem_get_info(0)[0] * 0.55) >> 21 << 21
    small = Reader(share_dir, 1 << 20)
    with owner("pool", share_dir, size) as one:
        mapped = small.map(one.invited(), one.address)
        reads = [small.stream.start(mapped.plan, small.pieces) for _ in range(100)]
        free, _ = torch.cuda.mem_get_info(0)
        one.kill()
        while not small.stream.poll(reads[-1]):
            pass
        seconds = small.wait_until_unmapped()
        back = wait_for_memory(free + size, 30)
        print(f"killed: unmapped after {seconds:.4f} s, {size / 2**30:.0f} GiB {back:.4f} s later")
        assert seconds + back < UNMAPPED_S
    with owner("pool", share_dir, size) as again:
        mapped = small.map(again.invited(), again.address)
        small.read(mapped)
        small.gather.unmap(mapped)
    assert len(list(share_dir.iterdir())) <= 1, "the sockets of killed owners stay"


def test_memory_comes_back_when_the_owner_sleeps(reader: Reader, share_dir: Path) -> None:
    with owner("cumem", share_dir) as one:
        mapped = reader.map(one.invited(), one.address)
        reader.read(mapped)
        reader.check()
        free, _ = torch.cuda.mem_get_info(0)
        one.tell("sleep")
        seconds = reader.wait_until_unmapped()
        print("slept:", one.read_line().strip(), f"unmapped after {seconds:.4f} s")
        back = wait_for_memory(free + SIZE, 30)
        print(f"memory is back {back:.4f} s later")
        assert back < UNMAPPED_S
        one.tell("wake")
        one.read_export()
        mapped = reader.map(one.invited(), one.address)
        reader.read(mapped)
        reader.check()
        reader.gather.unmap(mapped)


def test_a_new_incarnation_ends_all_mappings(reader: Reader, share_dir: Path) -> None:
    with owner("pool", share_dir) as one:
        old = one.invited()
        mapped = reader.map(old, one.address)
        unused = one.invited()
        assert one.ask("life") == "ok"
        assert reader.wait_until_unmapped() < UNMAPPED_S
        assert mapped.mapping.has_owner_ended
        with pytest.raises(TransportError, match="its token is unknown or used"):
            reader.map(unused, one.address)
        mapped = reader.map(one.invited(), one.address)
        reader.read(mapped)
        reader.check()
        reader.gather.unmap(mapped)


def test_an_owner_may_stop_while_its_memory_is_read(reader: Reader, share_dir: Path) -> None:
    with owner("pool", share_dir) as one:
        mapped = reader.map(one.invited(), one.address)
        for process in (one.process.pid, *_children(one.process.pid)):
            os.kill(process, signal.SIGSTOP)
        try:
            reader.read(mapped)
            reader.check()
            assert not mapped.mapping.has_owner_ended
        finally:
            for process in (*_children(one.process.pid), one.process.pid):
                os.kill(process, signal.SIGCONT)
        reader.gather.unmap(mapped)


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(each) for each in text.split()]


def test_a_pool_gives_its_memory_back() -> None:
    """In another process, because a pool's functions live until a process ends."""
    program = (
        "import gc, torch\n"
        "from nixl_kv.reading.gather.gpu import SharePool\n"
        "pool = SharePool(0)\n"
        "warm = torch.ones(1, dtype=torch.uint8, device='cuda:0'); warm += 1; int(warm.max())\n"
        "before, _ = torch.cuda.mem_get_info(0)\n"
        "with pool.use():\n"
        "    a = torch.zeros(1 << 30, dtype=torch.uint8, device='cuda:0')\n"
        "b = torch.zeros(1 << 28, dtype=torch.uint8, device='cuda:0')\n"
        "a += 1; assert (int(a.min()), int(a.max())) == (1, 1)\n"
        "within, _ = torch.cuda.mem_get_info(0)\n"
        "del a, b, pool; gc.collect(); torch.cuda.empty_cache()\n"
        "after, _ = torch.cuda.mem_get_info(0)\n"
        "print(before - within, after - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    print(done.stdout, done.stderr[-2000:])
    assert done.returncode == 0
    used, returned = map(int, done.stdout.split())
    assert used >= 5 << 28
    assert returned >= -(64 << 20)
