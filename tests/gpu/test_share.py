"""GPU memory that a process in namespaces of its own shares in a directory (`share_dir`).

python -m pytest -s -m gpu tests/gpu/test_share.py

The owner has PID, IPC, network and mount namespaces of its own where this user may make them, and
uses the first GPU; the reader uses the last one. `-s` shows which namespaces, and all times.
"""

import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("cuda.bindings.driver")

from nixl_kv.errors import TransportError  # noqa: E402
from nixl_kv.reading.gather.memory import HIDDEN  # noqa: E402
from support import gpu_memory  # noqa: E402
from support.gpu_memory import EXPANDABLE, SIZE, Owner, running, write_apart  # noqa: E402
from support.gpus import needs_gpus  # noqa: E402

pytestmark = needs_gpus(1)

UNMAPPED_S: Final = 1.0
"""The promise: a reader unmaps the memory in this time once the owner is gone."""
KINDS: Final = {"pool": {}, "cumem": {}, "expandable": EXPANDABLE}
LAST_GPU: Final = max(0, torch.cuda.device_count() - 1)


@contextmanager
def owner(kind: str, directory: Path, size: int = SIZE) -> Iterator[Owner]:
    if kind == "cumem":
        pytest.importorskip("vllm.cumem_allocator", reason="needs vLLM's CUDA build")
    with running(Owner(kind, directory, KINDS.get(kind, {}), size=size)) as one:
        yield one


class Reader(gpu_memory.Reader):
    def __init__(self, directory: Path, size: int = SIZE) -> None:
        super().__init__(LAST_GPU, directory, size)

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
            reader.check_reads(one)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_cannot_write(reader: Reader, share_dir: Path, kind: str) -> None:
    with owner(kind, share_dir) as one:
        shown = write_apart(one, LAST_GPU, str(share_dir))
        print(kind, "a write ends with", shown.split("\n")[0])
        assert "CUDA_ERROR" in shown, shown
        assert "Error:" not in shown, shown
        reader.check_reads(one)


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
        # The first GPU of those that are left.
        shown = write_apart(one, 0, str(share_dir), prefix=mount)
        print(shown[-2000:])
        assert HIDDEN in shown


def test_a_reader_unmaps_the_memory_of_a_killed_owner_and_its_successor_gets_it(
    share_dir: Path,
) -> None:
    """It has most of the GPU's memory, so two do not fit."""
    torch.cuda.empty_cache()
    size = int(torch.cuda.mem_get_info(0)[0] * 0.55) >> 21 << 21
    small = Reader(share_dir, 1 << 20)
    with owner("pool", share_dir, size) as one:
        mapped = small.map(one.invited(), one.address)
        reads = [small.start(mapped) for _ in range(100)]
        free, _ = torch.cuda.mem_get_info(0)
        one.kill()
        small.wait(reads[-1])
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
        reader.check_reads(one)


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
