"""GPU memory of another process, and a kernel that reads it, for tests on GPUs.

The owner uses the first GPU.
"""

import os
import select
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
import torch

from nixl_kv.geometry.plan import Pieces
from nixl_kv.protocol import messages
from nixl_kv.reading.gather.memory import Mapping
from nixl_kv.reading.gather.path import GatherPath
from nixl_kv.reading.gather.share import Tokens
from nixl_kv.reading.kernel import KernelStream
from support.gpus import visible
from support.share_owner import UNIT, content

TESTS: Final = Path(__file__).resolve().parents[1]
SIZE: Final = 1 << 30
PIECE: Final = 8 << 10
START_S: Final = 180.0
FORKED: Final = ("--pid", "--fork", "--kill-child")
EXPANDABLE: Final = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


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
    """A process that runs `support.share_owner`, in namespaces of its own if it `is_apart`."""

    def __init__(
        self,
        kind: str,
        directory: Path,
        settings: dict[str, str],
        *,
        size: int = SIZE,
        is_apart: bool = True,
    ) -> None:
        command = [sys.executable, "-m", "support.share_owner", kind, str(directory), str(size)]
        path = os.pathsep.join((str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")))
        self.process = subprocess.Popen(
            in_namespaces(command) if is_apart else command,
            env=os.environ | settings | visible(0) | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
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
        """Its export, with a new token if it shares the memory in a directory."""
        if self.export.share is None:
            return self.export
        share = messages.Share(
            socket=self.export.share.socket, token=bytes.fromhex(self.ask("invite"))
        )
        return msgspec.structs.replace(self.export, share=share)

    def kill(self) -> None:
        with self.process:  # closes its pipes, and waits for it
            self.process.kill()  # `--kill-child`: its children too


@contextmanager
def running(owner: Owner) -> Iterator[Owner]:
    try:
        yield owner
    finally:
        owner.kill()


class Reader:
    """Reads every other piece, in a random order, as the transfer thread does."""

    def __init__(self, device: int, directory: Path | None = None, size: int = SIZE) -> None:
        self.watched: list[int] = []
        share_dir = None if directory is None else str(directory)
        map_memory = partial(Mapping, device=device, share_dir=share_dir, tokens=Tokens())
        self.stream = KernelStream(device)
        self.gather = GatherPath(self.stream, map_memory, self.watched.append, share_dir)
        self.memory = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{device}")
        torch.cuda.synchronize(device)
        rng = np.random.default_rng(5)
        self.count = size // (2 * PIECE)
        local, remote = (rng.permutation(self.count).astype(np.int32) for _ in range(2))
        self.pieces = [Pieces(local, remote)]

    def map(self, export: messages.Export, address: int) -> Any:
        begun = time.perf_counter()
        mapped = self.gather.map(export, self.plan(address))
        print(f"mapped {len(export.allocations)} pieces in {time.perf_counter() - begun:.4f} s")
        return mapped

    def plan(self, address: int) -> Any:
        first = np.zeros(1, dtype=np.int32)
        local, remote = (
            np.array([[base, PIECE, 0, 2 * PIECE, self.count]], dtype=np.uint64)
            for base in (self.memory.data_ptr(), address)
        )
        rows = (SimpleNamespace(first=(first, first)),)
        return SimpleNamespace(local=local, remote=remote, paged_rows=rows)

    def start(self, mapped: Any) -> Any:
        return self.stream.start(mapped.plan, self.pieces)

    def wait(self, read: Any) -> None:
        while not self.stream.poll(read):
            pass

    def read(self, mapped: Any) -> float:
        """Read it; returns GB/s."""
        begun = time.perf_counter()
        self.wait(self.start(mapped))
        return self.count * PIECE / (time.perf_counter() - begun) / 1e9

    def check(self) -> None:
        """All of it is there, and nothing else was written."""
        device = self.memory.device
        repeated = content(str(device)).repeat(len(self.memory) // UNIT)
        pieces = repeated.view(self.count, 2, PIECE)[:, 0]
        (pair,) = self.pieces
        to, of = (torch.from_numpy(side.astype(np.int64)) for side in (pair.local, pair.remote))
        expected = torch.zeros_like(self.memory)
        expected.view(self.count, 2, PIECE)[to.to(device), 0] = pieces[of.to(device)]
        assert torch.equal(self.memory, expected)
        self.memory.zero_()
        torch.cuda.synchronize(device)

    def check_reads(self, owner: Owner) -> None:
        """Map the owner's memory, read it once, and unmap it."""
        mapped = self.map(owner.invited(), owner.address)
        self.read(mapped)
        self.check()
        self.gather.unmap(mapped)


WRITE_THERE = """\
import sys
import msgspec
import numpy as np
from cuda.bindings import driver
from nixl_kv.gpu import make_current
from nixl_kv.protocol import messages
from nixl_kv.reading.gather.memory import Mapping
device = int(sys.argv[3])
make_current(device)
export = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=messages.Export)
first = np.array([int(sys.argv[2])])
(place,) = Mapping(export, device, *sys.argv[4:]).locate(first, first + 64).tolist()
(posted,) = driver.cuMemsetD8(place, 0xEE, 64)
(ended,) = driver.cuCtxSynchronize()
print(posted.name, ended.name)
"""


def write_apart(one: Owner, device: int, *directory: str, prefix: tuple[str, ...] = ()) -> str:
    """Map its memory in another process, and write to it; returns all that it prints."""
    export = msgspec.msgpack.encode(one.invited()).hex()
    arguments = (export, str(one.address), str(device), *directory)
    command = [*prefix, sys.executable, "-c", WRITE_THERE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.stdout + done.stderr
