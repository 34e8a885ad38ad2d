"""Every constant MAX_* that bounds a table: the bound is made small, and more is added than fits.

A stranger, a client without a key or a peer can add to most of them.
"""

import ast
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import pytest

import nixl_kv
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
PACKAGE: Final = Path(nixl_kv.__file__).parent

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


TABLES_OF: Final[Mapping[str, tuple[Any, ...]]] = {
    "errors.MAX_KINDS": (kinds_of_log_lines,),
    "engine.directory.MAX_HINTS": (hints,),
    "protocol.messages.MAX_CLAIMS": (reads_from_a_rank,),
    "protocol.peers.MAX_UNUSABLE": (unusable_peers,),
    "protocol.prefill.MAX_ENDED": (ended_offers,),
    "protocol.read_queue.MAX_READS": (reads_under_way,),
    "connector.prefill.MAX_PROMISED": (pair_tickets,),
    "connector.decode.MAX_ENGINES": (
        prefill_engines_that_decode_met,
        prefill_engines_from_before_a_reset,
    ),
    "reading.agent.MAX_WARM_UPS": (warm_up_reads,),
    "reading.kernel.MAX_FREE": (buffers_of_copies,),
}
ELSEWHERE: Final = {
    "conversations.part.MAX_WAITING": "conversations/test_part.py",
    "conversations.part.MAX_WAITING_OF_READER": "conversations/test_part.py",
    "conversations.finding.MAX_FINDS": "conversations/test_finding.py",
    "conversations.finding.MAX_HASHES": "conversations/test_finding.py",
    "conversations.owners.MAX_OWNERS": "conversations/test_owners.py",
    "early.asks.MAX_ASKS": "early/test_asks.py",
    "early.asks.MAX_ASKS_OF_READER": "early/test_asks.py",
    "engine.admission.MAX_HOSTS": "engine/test_admission.py",
    "engine.loop.MAX_DECODING": "engine/test_loop.py",
    "engine.peer_links.MAX_PEERS": "engine/test_peer_links.py",
    "engine.peer_links.MAX_READS": "engine/test_peer_links.py",
    "protocol.messages.MAX_LISTED": "engine/test_status.py",
    "reading.agent.MAX_SLOT_READS": "reading/test_agent.py",
    "reading.paths.MAX_SLICES": "reading/test_paths.py",
    "reading.gather.share.MAX_CONNECTIONS": "reading/gather/test_share.py",
    "reading.gather.share.MAX_OWNERS": "reading/gather/test_share.py",
    "reading.gather.share.MAX_TOKENS": "reading/gather/test_share.py",
    "reading.gather.share.MAX_UNPROVEN": "reading/gather/test_share.py",
    "reading.staged.path.MAX_CROPS": "reading/staged/test_path.py",
    "transport.ports.MAX_CONNECTIONS": "transport/test_zmq.py",
    "transport.ucx.paced.MAX_STREAMS": "transport/ucx/test_paced.py",
    "transport.zmq.MAX_BATCH": "transport/test_zmq.py",
}
NO_TABLES: Final = {
    # seconds, attempts, characters, and numbers that people read
    *["protocol.load.MAX_LOST", "protocol.load.MAX_TIMEOUTS"],
    *["protocol.peers.MAX_FAILURES", "protocol.peers.MAX_PAUSE_S"],
    *["transport.ucx.descriptors.MAX_STALE", "errors.MAX_TEXT", "errors.MAX_TRACEBACK_LINES"],
    *["config.MAX_PORT", "config.MAX_LABEL", "engine.event_log.MAX_CAUSE"],
    *["config.MAX_SHARE_DIR", "reading.gather.share.MAX_REASON"],
    *["engine.event_log.MAX_REQUESTS", "engine.status.MAX_SETTINGS"],
    "protocol.ticket.MAX_LENGTH",
    "engine.clock.MAX_GAP_S",
    *[
        "protocol.ticket.MAX_REASON",
        "protocol.ticket.MAX_WHY",
        "connector.vllm_config.MAX_FACT",
        "cli.options.MAX_ERROR",
    ],
    *["connector.plugin.MAX_SHOWN", "errors.MAX_ID", "protocol.ticket.MAX_NAME"],
    *["config.MAX_SHOWN", "config.MAX_MISS", "config.MAX_SECONDS"],
    # characters of a key file; addresses of one process, and how many fit into one kernel filter
    *["keys.MAX_TEXT", "transport.ucx.ports.MAX_LISTENS", "transport.ports.MAX_TOGETHER"],
    *["protocol.params.MAX_LEVELS", "protocol.params.MAX_SIZE"],  # of one client's parameters
    *["cli.doctor.engines.MAX_SHOWN", "cli.doctor.engines.MAX_PAIRS", "cli.compare.MAX_RANGES"],
    # fields of one message or layout, and what follows from them: see test_messages, test_layout
    *["protocol.messages.MAX_ALLOCATIONS", "protocol.messages.MAX_RANKS"],
    *["protocol.messages.MAX_ADDRESSES", "protocol.messages.MAX_HASHES"],
    "protocol.messages.MAX_RUN",
    *["protocol.messages.MAX_ROWS", "protocol.messages.MAX_COLUMNS"],
    *["protocol.messages.MAX_SLICES", "protocol.messages.MAX_CHUNKS"],
    *["protocol.messages.MAX_RING_SLOTS", "geometry.layout.MAX_ADDRESS"],
    *["geometry.layout.MAX_COUNT", "geometry.layout.MAX_TEXT", "geometry.layout.MAX_ENTRIES"],
    *["geometry.layout.MAX_UNITS", "geometry.match.MAX_TOKEN_SEGMENTS"],
    *["geometry.match.MAX_STRIPED_SEGMENTS", "geometry.plan.MAX_PIECES"],
    *["geometry.plan.MAX_INDEX", "geometry.plan.MAX_ROWS", "engine.engine.MAX_SLOTS"],
    *["reading.staged.copier.MAX_VIEWS", "transport.zmq.MAX_ANSWER_BYTES"],
    # work at a time
    *["protocol.read_queue.MAX_BYTES", "transport.nixl.MAX_COPYING"],
    "verify.gpu.MAX_UNROLLED",
    "connector.vllm_config.MAX_PACKED_BLOCK_SIZE",
}


def bounds_in(path: Path) -> Iterator[str]:
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and target.id.startswith("MAX_"):
                yield f"{module}.{target.id}"


FOUND: Final = {name for path in PACKAGE.rglob("*.py") for name in bounds_in(path)}


@pytest.mark.parametrize(
    ("name", "fill"),
    [
        pytest.param(name, fill, id=fill.__name__)
        for name, fills in TABLES_OF.items()
        for fill in fills
        if name in FOUND  # a tree may lack a feature's folder
    ],
)
def test_a_table_grows_to_its_bound(name: str, fill: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"nixl_kv.{name}", BOUND)
    sizes = list(fill())
    assert len(sizes) == MANY
    assert max(sizes) == BOUND, f"{name} is {BOUND}"


def test_each_bound_is_tested() -> None:
    untested = FOUND.difference(TABLES_OF, ELSEWHERE, NO_TABLES)
    assert not untested, "give it a row in TABLES_OF, or name it in ELSEWHERE or NO_TABLES"
    for name in FOUND.intersection(ELSEWHERE):
        path = Path(__file__).parent / ELSEWHERE[name]
        assert name.rpartition(".")[2] in path.read_text(), path
