"""A worker without its thread and its sockets: what it is sent goes in, what it does is checked.

Its caches stand at addresses of our choice, so that an input that was found once means the same in
the next process.
"""

import ctypes
import mmap
import struct
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from nixl_kv.connector.agents import Agents
from nixl_kv.connector.dataplane import DataPlane
from nixl_kv.connector.engine import Loop, Machinery
from nixl_kv.connector.results import LoadResult, Result
from nixl_kv.connector.sources import Household, Identity
from nixl_kv.geometry.layout import Span
from nixl_kv.ids import Claim, EngineId, Incarnation, Nonce, Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import Reader
from nixl_kv.protocol.offers import Offers
from nixl_kv.protocol.receiver import Receiver
from nixl_kv.protocol.requests import Requests
from nixl_kv.protocol.sender import Sender
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.transport.control import FromEndpoint, FromPeer, Lost, Received
from nixl_kv.transport.memory import Fabric, MemoryTransport
from nixl_kv.transport.slots import SlotPage
from pd.fuzz_samples import CacheMemory, sample

PREFILL, DECODE = EngineId("prefill"), EngineId("decode")
LIFE, RANK_LIFE, READER_LIFE = (Incarnation(digit * 32) for digit in "abd")
NONCE, CLAIM, CONTEXT = Nonce("1" * 32), Claim("c" * 32), "e" * 32
READER: Final = Reader(DECODE, READER_LIFE, 0)
MODEL: Final = {"dtype": "uint8"}
ENDPOINTS: Final = tuple(f"tcp://127.0.0.1:{port}" for port in (5600, 7000, 7001))
"""Of the engine, and of its ranks."""

REQUEST = RequestId("request")
TOKENS = 7
BLOCKS: Final = (2, 5)  # of the request, on either side
TABLE: Final = struct.pack("<2i", *BLOCKS)
GENERATION, SLOT, SLOTS = b"\1" * 16, 3, 64
UNTOUCHED = 0xEE
TURNS = 200
MAP_FIXED_NOREPLACE = 0x100000

PREFILL_MEMORY: Final = Span(0x2000_0000_0000, 1 << 20)
DECODE_MEMORY: Final = Span(0x2100_0000_0000, 1 << 16)
PREFILL_SLOTS: Final = PREFILL_MEMORY.address + (1 << 19)


class BrokenPromiseError(Exception):
    """No exception came, but what must hold does not."""


def map_memory() -> None:
    """Make both sides' memory; once per process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_size_t
    libc.mmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_size_t]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    for span in (PREFILL_MEMORY, DECODE_MEMORY):
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if libc.mmap(span.address, span.length, access, flags, -1, 0) != span.address:
            raise OSError(ctypes.get_errno(), f"no memory at {span.address:#x}")
    ctypes.memmove(PREFILL_SLOTS + SLOT * len(GENERATION), GENERATION, len(GENERATION))


class MuteControl:
    """In place of the sockets: what is to be received is put in, what is answered is kept."""

    def __init__(self) -> None:
        """Nothing is there."""
        self.waiting: list[Received] = []
        self.replies: list[bytes] = []
        self.endpoints: set[str] = set()

    def poll(self, _timeout_s: float | None) -> list[Received]:
        """What waits, at once."""
        received, self.waiting = self.waiting, []
        return received

    def send(self, endpoint: str, _payload: bytes) -> None:
        """Nobody is there."""
        self.endpoints.add(endpoint)

    def reply(self, _route: bytes, payload: bytes) -> None:
        """Nobody is there."""
        self.replies.append(payload)

    def disconnect(self, endpoint: str) -> None:
        """Forget that it was talked to."""
        self.endpoints.discard(endpoint)


class Worker:
    """One rank in both roles. A prefill rank's memory can be read beside it: zeros, and slots."""

    def __init__(self) -> None:
        """With one offer, and one request that wants another engine's blocks."""
        fabric = Fabric()
        MemoryTransport(fabric).register(PREFILL_MEMORY, "DRAM", 0)
        cache = CacheMemory(DECODE_MEMORY.address)
        memory = (ctypes.c_uint8 * cache.span.length).from_address(cache.address)
        self._cache = np.ctypeslib.as_array(memory).reshape(cache.shape)
        household = Household.alone(cache.layout(), Identity(MODEL, Rank(0)))
        self._agents = Agents(lambda: MemoryTransport(fabric), household)
        self._agents.open()
        self._control = MuteControl()
        self._results: deque[Result] = deque()
        self._requests = Requests(READER, timeout_s=30, renew_interval_s=1)
        self._offers = Offers(num_slots=SLOTS, offer_ttl_s=30, lease_s=5)
        data = DataPlane(self._agents, household)
        self._digests = data.digests
        machinery = Machinery(
            self._control,  # type: ignore[arg-type]
            data,
            None,
            SlotPage(SLOTS),
            Sender(RANK_LIFE, self._offers),
            Receiver(READER, self._requests),
            b"",
        )
        self._loop = Loop(machinery, deque(_commands()), self._results)

    def receive(self, items: Sequence[Received]) -> None:
        """Let it handle these one after the other, then lose all its connections.

        Raises:
            BrokenPromiseError: if a read or a digest does not end, the request is not reported
                once, blocks of others are written, or bytes are called verified that are not.
        """
        self._cache[...] = UNTOUCHED
        self._turns()
        for item in items:
            self._control.waiting.append(item)
            self._turns()
        self._control.waiting += [Lost(e, "gone") for e in sorted(self._control.endpoints)]
        self._turns()
        self._check()

    @property
    def loads(self) -> list[events.Loaded]:
        """What it has reported."""
        return [result.loaded for result in self._results if isinstance(result, LoadResult)]

    def _turns(self) -> None:
        """Until no read and no digest is under way."""
        for _ in range(TURNS):
            self._loop.turn()
            if not self._agents.busy and self._digests.patience is None:
                return
        raise BrokenPromiseError(f"a read or a digest has not ended after {TURNS} turns")

    def _check(self) -> None:
        reported = self.loads
        if len(reported) != 1:
            raise BrokenPromiseError(f"the request was reported {len(reported)} times")
        _, _, heads, _, content = self._cache.shape
        tokens = self._cache[:, BLOCKS].swapaxes(2, 3).reshape(-1, heads * content)
        read = tokens.reshape(len(self._cache), -1, heads * content)[:, :TOKENS]
        if reported[0].verified and read.any():
            raise BrokenPromiseError("what is called verified is not what prefill has")
        if (np.delete(self._cache, BLOCKS, axis=1) != UNTOUCHED).any():
            raise BrokenPromiseError("blocks of another request were written")
        self._requests.validate()
        self._offers.validate()


def _commands() -> list[events.Command]:
    """An offer that is out, and a request that has its blocks."""
    tables = (TABLE, TABLE)
    ticket = sample(
        Ticket,
        remote_engine_id=PREFILL,
        remote_host="127.0.0.1",
        remote_port=5600,
        incarnation=LIFE,
        nonce=NONCE,
        num_tokens=TOKENS + 1,
        context=CONTEXT,
    )
    return [
        events.Prepare(NONCE, RequestId("offered"), CONTEXT, TOKENS + 1, tables),
        events.Offer(NONCE, RequestId("offered")),
        events.Fetch(REQUEST, ticket, CLAIM),
        events.Load(REQUEST, 0, TOKENS, tables, verify=True),
    ]


def from_peer(payload: bytes) -> FromPeer:
    """A message to the worker's own port."""
    return FromPeer(b"route", payload)


def from_endpoint(payload: bytes, number: object) -> FromEndpoint:
    """An answer, of the engine that was asked or of one of its ranks."""
    known = isinstance(number, int) and 0 <= number < len(ENDPOINTS)
    return FromEndpoint(ENDPOINTS[int(number) if known else 0], payload)  # type: ignore[call-overload]
