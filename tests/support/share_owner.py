"""A process that shares GPU memory in a directory, and obeys its standard input.

python -m support.share_owner KIND DIRECTORY NUM_BYTES

It prints its export, and the address of the memory, then an answer to each line:

    invite  a token, in hexadecimal
    life    begins another incarnation
    sleep   stops sharing, and frees the memory (`cumem`)
    wake    allocates it again, and prints the new export
"""

import os
import select
import sys
import time
from functools import partial
from typing import Any

import msgspec
import torch

from nixl_kv.geometry.layout import Span
from nixl_kv.reading.gather.memory import Exported, Shared
from nixl_kv.reading.gather.share import ShareServer

SEED = 5
UNIT = 1 << 20


def content(device: str = "cuda:0") -> Any:
    """The bytes that fill each UNIT of the memory."""
    generator = torch.Generator("cpu").manual_seed(SEED)
    return torch.randint(0, 256, (UNIT,), dtype=torch.uint8, generator=generator).to(device)


class Owner:
    def __init__(self, kind: str, directory: str, num_bytes: int) -> None:
        self.kind, self.directory, self.num_bytes = kind, directory, num_bytes
        self.watched: list[int] = []
        self.server: Any = None
        self.memory = self._allocate()
        self.fill()
        self.share()

    def _allocate(self) -> Any:
        make = partial(torch.empty, self.num_bytes, dtype=torch.uint8, device="cuda:0")
        if self.kind == "pool":
            from nixl_kv.reading.gather.gpu import SharePool  # noqa: PLC0415

            self.pool: Any = SharePool(0)
            with self.pool.use():
                return make()
        if self.kind == "cumem":
            from vllm.device_allocator.cumem import CuMemAllocator  # noqa: PLC0415

            self.allocator: Any = CuMemAllocator.get_instance()
            with self.allocator.use_memory_pool(tag="kv_cache"):
                return make()
        return make()  # "plain", or expandable segments by the environment

    def fill(self) -> None:
        self.memory.view(-1, UNIT).copy_(content())
        torch.cuda.synchronize()

    def share(self) -> None:
        span = Span(self.memory.data_ptr(), self.num_bytes)
        if self.kind == "plain":
            self.exported: Any = Exported([span], 0)
        else:
            make = partial(
                ShareServer, self.directory, watch=self.watched.append, clock=time.monotonic
            )
            begun = time.perf_counter()
            self.exported = Shared([span], 0, make)
            self.server = self.exported.server
            print(f"shared in {time.perf_counter() - begun:.4f} s", file=sys.stderr, flush=True)
        export = msgspec.msgpack.encode(self.exported.description).hex()
        print(export, span.address, flush=True)

    def obey(self, word: str) -> None:
        match word:
            case "invite":
                print(self.server.invite().hex(), flush=True)
            case "life":
                self.server.begin_life()
                print("ok", flush=True)
            case "sleep":
                self.exported.close()
                self.watched.clear()
                begun = time.perf_counter()
                self.allocator.sleep(())
                print(f"ok {time.perf_counter() - begun:.4f}", flush=True)
            case "wake":
                self.allocator.wake_up()
                self.fill()
                self.share()

    def run(self) -> None:
        """Serve and obey until the standard input ends."""
        rest = b""
        while True:
            due_s = None if self.server is None else self.server.wait_s
            ready, _, _ = select.select([0, *self.watched], [], [], 0.5 if due_s is None else due_s)
            if self.server is not None:
                self.server.poll()
            if 0 in ready:
                some = os.read(0, 4096)
                if not some:
                    return
                *lines, rest = (rest + some).split(b"\n")
                for line in lines:
                    self.obey(line.decode())


if __name__ == "__main__":
    Owner(sys.argv[1], sys.argv[2], int(sys.argv[3])).run()
