"""A rank under test: a transfer engine without thread and sockets, whose turns are checked.

Its memory is at addresses of our choice, its clock is virtual, and its incarnation is named by a
placeholder. So an input means the same in the next process.
"""

import ctypes
import mmap
from functools import cache
from typing import Final

import numpy as np
from typing_extensions import Self

from fuzz.decoders.samples import CacheMemory
from harness.local.engine import features_with
from harness.local.memory import Fabric, MemoryTransport
from harness.local.memory_control import MemoryControl, MemoryNetwork
from harness.local.offers import check_prefill
from nixl_kv.config import Config
from nixl_kv.engine.engine import RankSpec, TransferEngine
from nixl_kv.geometry.layout import Span, Table
from nixl_kv.ids import (
    Claim,
    Endpoint,
    EngineId,
    FenceToken,
    Incarnation,
    Nonce,
    Rank,
    RequestId,
    endpoint_at,
)
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import Reader
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.transport.base import FromEndpoint
from sim.data_plane import Background

HOST: Final = "127.0.0.1"
PREFILL, DECODE = EngineId("prefill"), EngineId("decode")
LIFE, RANK_LIFE, OTHER_LIFE = (Incarnation(digit * 32) for digit in "abf")
"""Of the engine that is read, of its ranks, and of a stranger's rank."""

OWN_LIFE: Final = Incarnation("d" * 32)
"""The placeholder for the incarnation of the rank under test."""

NONCE, CLAIM, CONTEXT = Nonce("1" * 32), Claim("c" * 32), "e" * 32
OWN_READER: Final = Reader(engine=DECODE, incarnation=OWN_LIFE, rank=Rank(0))
OTHER_READER: Final = Reader(engine=DECODE, incarnation=OTHER_LIFE, rank=Rank(0))
MODEL: Final = {"dtype": "uint8"}
DIRECTORY_PORT: Final = 5600
ENDPOINTS: Final = tuple(endpoint_at(HOST, port) for port in (DIRECTORY_PORT, 7000, 7001))
"""Of the engine that is read, and of its ranks."""

LOADED, OFFERED = RequestId("loaded"), RequestId("offered")
TOKENS = 7
BLOCKS: Final = (2, 5)  # of both requests
TABLE: Final = Table.of(BLOCKS)
FENCE_TOKEN, SLOT, SLOTS = FenceToken(b"\1" * 16), 3, 64
UNTOUCHED = 0xEE
MAX_TURNS = 200
TURN_S = 0.01
MAP_FIXED_NOREPLACE = 0x100000

PREFILL_MEMORY: Final = Span(0x2000_0000_0000, 1 << 20)
"""Of the engine that is read: zeros, and slots."""

OWN_MEMORY: Final = Span(0x2100_0000_0000, 1 << 16)
PREFILL_SLOTS: Final = PREFILL_MEMORY.address + (1 << 19)

TICKET: Final = Ticket(
    engine=PREFILL,
    host=HOST,
    port=DIRECTORY_PORT,
    incarnation=LIFE,
    nonce=NONCE,
    num_tokens=TOKENS + 1,
    context=CONTEXT,
)
COMMANDS: Final[tuple[events.Command, ...]] = (
    events.PrepareOffer(NONCE, OFFERED, CONTEXT, TOKENS + 1, (TABLE, TABLE)),
    events.PublishOffer(NONCE, OFFERED),
    events.PrepareLoad(LOADED, TICKET, CLAIM),
    events.StartLoad(LOADED, 0, TOKENS, (TABLE, TABLE), verify=True),
)
"""An offer that is out, and a load that has its blocks."""


class BrokenPromiseError(Exception):
    """No exception came, but what must hold does not."""


@cache
def map_memory() -> None:
    """Map both sides' memory; a second call in a process does nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_size_t
    libc.mmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_size_t]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    for span in (PREFILL_MEMORY, OWN_MEMORY):
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if libc.mmap(span.address, span.length, access, flags, -1, 0) != span.address:
            raise OSError(ctypes.get_errno(), f"no memory at {span.address:#x}")
    ctypes.memmove(PREFILL_SLOTS + SLOT * len(FENCE_TOKEN), FENCE_TOKEN, len(FENCE_TOKEN))


class RankUnderTest:
    """One rank in both roles, with one offer, and one load that wants another engine's blocks."""

    def __init__(self) -> None:
        """Start it; `close` ends it."""
        self.loads: list[events.LoadEnded] = []
        self._now, self._background = 0.0, Background()
        fabric, self._network = Fabric(), MemoryNetwork(held=True)
        MemoryTransport(fabric).register(PREFILL_MEMORY, "DRAM", 0)
        self._control = MemoryControl(self._network, "under test")
        self._stranger = MemoryControl(self._network, "stranger")
        cache = CacheMemory(OWN_MEMORY.address)
        memory = (ctypes.c_uint8 * cache.span.length).from_address(cache.address)
        self.cache = np.ctypeslib.as_array(memory).reshape(cache.shape)
        self.cache[...] = UNTOUCHED
        spec = RankSpec(
            engine=DECODE,
            rank=Rank(0),
            layout=cache.layout(),
            model=MODEL,
            config=Config(host=HOST),
            host=HOST,
            is_prefill=True,
            is_decode=True,
            make_transport=lambda: MemoryTransport(fabric),
            make_control=lambda: self._control,
            features=features_with(make_threads=lambda: self._background),
            make_background=lambda _count: self._background,
            num_slots=SLOTS,
            clock=lambda: self._now,
        )
        self._engine = TransferEngine(spec)
        self._loop = self._engine.start_stepped()
        self._parts = self._loop.parts
        self._engine.submit(COMMANDS)
        self._run()

    def __enter__(self) -> Self:
        """It ends with the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._loop.close()

    @property
    def replies(self) -> list[bytes]:
        """What it has answered to the stranger."""
        return [packet.payload for packet in self._network.packets if packet.is_answer]

    def ask(self, payload: bytes) -> None:
        """A stranger sends this to its port."""
        self._stranger.send(self._parts.description.endpoint, self._named(payload))
        self._network.deliver(self._network.packets[-1])
        self._run()

    def answer(self, endpoint: Endpoint, payload: bytes) -> None:
        """This comes from an endpoint."""
        self._control.inbox.append(FromEndpoint(endpoint, self._named(payload)))
        self._run()

    def finish(self) -> None:
        """Take all of its connections away; then check what must hold.

        Raises:
            BrokenPromiseError: if a read, a digest or packing does not end, the load is not
                reported once, other blocks are written, or bytes are called verified that are not.
        """
        while self._control.open_links:  # which it opens once more, to look a second time
            for link in list(self._control.open_links.values()):
                self._network.cut(link)
                self._network.report_loss(link)
            self._run()
        self._run()
        self.check()

    def check(self) -> None:
        """See `finish`."""
        if len(self.loads) != 1:
            raise BrokenPromiseError(f"the load was reported {len(self.loads)} times")
        _, _, heads, _, content = self.cache.shape
        tokens = self.cache[:, BLOCKS].swapaxes(2, 3).reshape(-1, heads * content)
        read = tokens.reshape(len(self.cache), -1, heads * content)[:, :TOKENS]
        if self.loads[0].verified and read.any():
            raise BrokenPromiseError("what is called verified is not what prefill has")
        if (np.delete(self.cache, BLOCKS, axis=1) != UNTOUCHED).any():
            raise BrokenPromiseError("blocks of another request were written")
        self._parts.decode.validate()
        check_prefill(self._parts.prefill)

    def _named(self, payload: bytes) -> bytes:
        """The payload with the true incarnation in place of the placeholder."""
        return payload.replace(OWN_LIFE.encode(), self._parts.description.incarnation.encode())

    def _run(self) -> None:
        """Turns, until no read, no digest and no packing is under way."""
        for _ in range(MAX_TURNS):
            self._now += TURN_S
            self._control.wake()
            self._loop.turn()
            while self._background.waiting:
                self._background.work()
            for result in self._engine.pop_results():
                if isinstance(result, events.LoadEnded):
                    self.loads.append(result)
            parts = self._parts
            if not (parts.agents.is_busy or parts.digests or len(parts.packs or ())):
                return
        raise BrokenPromiseError(f"something under way has not ended after {MAX_TURNS} turns")
