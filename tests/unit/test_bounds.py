"""Constants MAX_* that bound a table: the bound is made small, and more is added than fits.

A stranger, a client without a key or a peer can add to most of them.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest

from harness.local.memory_control import MemoryControl, MemoryNetwork
from nixl_kv.connector.decode import DecodeScheduler, Prompt
from nixl_kv.connector.paging import Paging, RequestBlocks
from nixl_kv.connector.prefill import Address, PrefillScheduler
from nixl_kv.engine.directory import DirectoryServer
from nixl_kv.errors import LimitedLog
from nixl_kv.ids import (
    Claim,
    HintKey,
    Incarnation,
    Nonce,
    Rank,
    RequestId,
    endpoint_at,
)
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.peers import PeerBook
from nixl_kv.protocol.prefill import PrefillMachine
from nixl_kv.protocol.read_queue import ReadQueue
from nixl_kv.protocol.ticket import SealedTicket
from support.agent_reading import R0, Reading
from support.cache_manager import CacheManager
from support.records import (
    CONTEXT,
    D1,
    ENGINE_LIFE,
    PEER,
    PREFILL,
    RANK_LIFE,
    at,
    fits,
    hex32,
    landed,
    no_record,
    prepare_load,
    prepare_offer,
    reader,
    refusal,
    ticket_for,
)
from support.scripts import decode_machine
from support.stepped import Clock

BOUND, MANY = 2, 7

Growth: TypeAlias = Iterator[int]
"""The number of entries after each one that is added."""


def nonce_of(number: int) -> Nonce:
    return Nonce(hex32(number))


def request_of(number: int) -> RequestId:
    return RequestId(f"r{number}")


# --- of all layers


def kinds_of_log_lines() -> Growth:
    log = LimitedLog(logging.getLogger("test_bounds"), Clock())
    for number in range(MANY):
        log.warning("dropped %d", number, about=f"peer {number}")
        yield len(log._kinds)


# --- machines


def unusable_peers() -> Growth:
    book = PeerBook(no_record, reader)
    for number in range(MANY):
        key = events.PeerKey(PREFILL, Incarnation(hex32(number)), at(0))
        book.want(key, prepare_load(), 0.0, is_sealed=True)
        book.on_refused(key, refusal("restarted"), 0.0)
        book.on_tick(events.Tick(), lambda _: False, 0.0)
        yield len(book.known)


def ended_offers() -> Growth:
    machine = PrefillMachine(RANK_LIFE, no_record, num_slots=4, offer_ttl_s=1, lease_s=1, hold_s=1)
    for number in range(MANY):
        machine.handle(prepare_offer(nonce=nonce_of(number), request=request_of(number)), 0.0)
        machine.handle(events.WithdrawOffer(nonce_of(number)), 0.0)
        yield len(machine._ended)


def reads_from_a_rank() -> Growth:
    machine = decode_machine()
    machine.handle(prepare_load(D1, Claim(hex32(99))), 0.0)
    machine.handle(fits(), 0.0)
    for number in range(MANY):
        load = prepare_load(request_of(number), Claim(hex32(number)), nonce=nonce_of(100 + number))
        machine.handle(load, 0.0)
        yield len(machine._unfinished[at(0)])


def reads_under_way() -> Growth:
    queue, num_started = ReadQueue(), 0
    for number in range(MANY):
        queue.add((Claim(hex32(number)), Rank(0)), at(number), 0)
        num_started += len(queue.pop_startable(0.0))
        yield num_started


# --- both halves of the scheduler, and the directory


def pair_tickets() -> Growth:
    blocks = RequestBlocks([Paging(0, 4, 0)], 20, CacheManager())
    scheduler = PrefillScheduler(blocks, 0.5, lambda _: {})
    scheduler.address = Address(PREFILL, ENGINE_LIFE, "10.0.0.1", 5600)
    for number in range(MANY):
        scheduler.on_new_request(request_of(number), 8, lambda _: (CONTEXT, ""), nonce_of(number))
        scheduler.request_finished(request_of(number), [[]], reason="aborted")
        yield len(scheduler._promised)


TOKEN_IDS = list(range(8))


def _decode_met(number: int, decode: DecodeScheduler) -> None:
    """Another prefill engine."""
    met = ticket_for(TOKEN_IDS, nonce_of(number), incarnation=Incarnation(hex32(1 + number)))
    prompt = Prompt(request_of(number), len(TOKEN_IDS), TOKEN_IDS)
    decode.on_new_request(prompt, met.params(None))


def prefill_engines_that_decode_met() -> Growth:
    decode = DecodeScheduler([Paging(0, 4, 0)], SealedTicket.parse)
    for number in range(MANY):
        _decode_met(number, decode)
        yield len(decode._epochs)


def prefill_engines_from_before_a_reset() -> Growth:
    decode = DecodeScheduler([Paging(0, 4, 0)], SealedTicket.parse)
    for number in range(MANY):
        _decode_met(number, decode)
        decode.reset_cache()
        yield len(decode._outdated)


@dataclass
class _Directory:
    server: DirectoryServer
    asker: MemoryControl

    @classmethod
    def new(cls) -> "_Directory":
        network = MemoryNetwork()
        return cls(DirectoryServer(MemoryControl(network), "10.0.0.1", 0), MemoryControl(network))

    def tell(self, message: Any) -> None:
        self.asker.send(endpoint_at("10.0.0.1", self.server.port), messages.encode(message))
        self.server.turn(0)


def hints() -> Growth:
    directory = _Directory.new()
    for number in range(MANY):
        directory.tell(landed(hint_key=HintKey(hex32(number))))
        yield len(directory.server._hints)


# --- reading


def warm_up_reads() -> Growth:
    reading = Reading(memory="DRAM")
    reading.fabric.reads_hang = True
    rank = reading.agent.ranks.find(PEER, R0)
    assert rank is not None
    for _ in range(MANY):
        reading.agent._warm_up(rank)
        yield len(reading.agent.warm_ups)


def buffers_of_copies() -> Growth:
    kernel = pytest.importorskip("nixl_kv.reading.kernel", reason="needs torch and Triton")
    stream = kernel.KernelStream.__new__(kernel.KernelStream)
    stream._free = []
    numbers = SimpleNamespace(done=SimpleNamespace(query=lambda: True))
    for _ in range(MANY):
        assert stream.poll(SimpleNamespace(numbers=numbers))
        yield len(stream._free)


@pytest.mark.parametrize(
    ("name", "fill"),
    [
        ("errors.MAX_KINDS", kinds_of_log_lines),
        ("engine.directory.MAX_HINTS", hints),
        ("protocol.messages.MAX_CLAIMS", reads_from_a_rank),
        ("protocol.peers.MAX_UNUSABLE", unusable_peers),
        ("protocol.prefill.MAX_ENDED", ended_offers),
        ("protocol.read_queue.MAX_READS", reads_under_way),
        ("connector.prefill.MAX_PROMISED", pair_tickets),
        ("connector.decode.MAX_ENGINES", prefill_engines_that_decode_met),
        ("connector.decode.MAX_ENGINES", prefill_engines_from_before_a_reset),
        ("reading.agent.MAX_WARM_UPS", warm_up_reads),
        ("reading.kernel.MAX_FREE", buffers_of_copies),
    ],
)
def test_a_table_grows_to_its_bound(
    name: str, fill: Callable[[], Growth], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"nixl_kv.{name}", BOUND)
    sizes = list(fill())
    assert len(sizes) == MANY
    assert max(sizes) == BOUND, f"{name} is {BOUND}"
