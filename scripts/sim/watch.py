"""What must hold after every step.

a standing slot   the blocks of its grant are those of the request that it was granted for, and
                  this request is not reported as sent
a read            its blocks are those of the request that it is for, until it cannot write
a good load       has its own prompt's bytes from every rank, when it is reported
a proof           leaves while the slot of its grant stands
a corrupt load    was damaged on its way
the machines      say so themselves
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nixl_kv.connector.results import LoadResult, Result
from nixl_kv.errors import LocalProtocolError
from nixl_kv.geometry.blocks import block_ids
from nixl_kv.protocol import messages
from nixl_kv.protocol.events import Loaded, Sent, Why
from nixl_kv.protocol.messages import Grant, Proof
from sim.engine import Engine
from sim.fabric import Read
from sim.net import SimControl
from sim.rank import Observer, RankLife
from sim.violations import Violation
from sim.world import PREFILL, World


@dataclass(frozen=True)
class Granted:
    """A grant that left a prefill rank, and whose the blocks were then."""

    rank: RankLife
    slot: int
    generation: bytes
    blocks: tuple[int, ...]
    owner: str

    @property
    def stands(self) -> bool:
        """Whether a reader would believe it."""
        return bytes(self.rank.seat.slots.read(self.slot)) == self.generation


@dataclass(frozen=True)
class Failed:
    """A load that failed; `life` is that of the engine that its ticket names."""

    request: str
    why: Why
    detail: str
    life: str


class Watch(Observer):
    """See the module's head."""

    def __init__(self, world: World) -> None:
        """Watch this world."""
        self._world = world
        self._grants: dict[tuple[RankLife, int, bytes, str], Granted] = {}
        self._owners: dict[int, str | None] = {}  # of the blocks of reads, by the read's number
        self._over: set[tuple[RankLife, str]] = set()
        self.good = 0
        self.verified = 0
        self.failed: list[Failed] = []
        world.around.observer = self
        world.network.replied = self._replied

    def told(self, rank: RankLife, result: Result) -> None:
        """A rank's loop has reported; from now on vLLM may use the blocks for anything.

        Raises:
            Violation: if it may not.
        """
        engine = self._world.engines[rank.seat.engine.name]
        if engine is None:
            return
        if isinstance(result, Sent):
            self._note_grants()
            for granted in self._grants.values():
                if granted.rank is rank and granted.owner == result.request and granted.stands:
                    told = f"{rank.seat.name}: {result.request}, slot {granted.slot}"
                    raise Violation("reported while its slot stands", told)
        if isinstance(result, LoadResult):
            self._over.add((rank, result.loaded.request))
            self._check_reads(engine)
            self._check_load(engine, rank, result.loaded)

    def look(self) -> None:
        """After a step.

        Raises:
            Violation: says what does not hold.
        """
        self._note_grants()
        for granted in self._grants.values():
            self._check_grant(granted)
        for engine in self._world.alive():
            if engine.name != PREFILL:
                self._check_reads(engine)
        for rank in self._world.ranks():
            _validate(rank)

    def _replied(self, control: SimControl, payload: bytes) -> None:
        """A prefill rank answers: what it proves, it holds."""
        answer = messages.decode_answer(payload)
        if not isinstance(answer, Proof):
            return
        self._note_grants()
        found = [g for (_, _, _, nonce), g in self._grants.items() if nonce == answer.nonce]
        held = [g for g in found if g.rank.control is control and g.stands]
        if not held:
            raise Violation("proof of what is not held", f"{control.name}: {answer.nonce}")
        self._check_grant(held[0])

    def _note_grants(self) -> None:
        observed, self._world.network.observed = self._world.network.observed, []
        engine = self._world.engines[PREFILL]
        if engine is None:
            self._grants.clear()
            return
        self._grants = {k: g for k, g in self._grants.items() if g.rank in engine.ranks}
        for control, payload in observed:
            answer = messages.decode_answer(payload)
            rank = next((rank for rank in engine.ranks if rank.control is control), None)
            if isinstance(answer, Grant) and rank is not None:
                self._note_grant(rank, answer, engine)

    def _note_grant(self, rank: RankLife, grant: Grant, engine: Engine) -> None:
        key = (rank, grant.slot, grant.generation, grant.nonce)
        if key in self._grants:
            return
        blocks = tuple(int(block) for table in grant.tables for block in block_ids(table))
        owner = _owner(engine, blocks[0])
        if owner is None:
            raise Violation("granted what is free", f"{rank.seat.name}: block {blocks[0]}")
        self._grants[key] = Granted(rank, grant.slot, grant.generation, blocks, owner)

    def _check_grant(self, granted: Granted) -> None:
        engine = self._world.engines[PREFILL]
        if engine is None or not granted.stands:
            return
        for block in granted.blocks:
            if _owner(engine, block) != granted.owner:
                told = f"{granted.rank.seat.name}: slot {granted.slot}, block {block}"
                raise Violation("blocks free while their slot stands", told)

    def _check_reads(self, engine: Engine) -> None:
        for rank, read in self._reads(engine):
            blocks = {rank.seat.memory.block_at(address) for address in read.into}
            owners = {_owner(engine, block) for block in blocks}
            owner = self._owners.setdefault(read.number, next(iter(owners)))
            told = f"{rank.seat.name}: blocks {sorted(blocks)} of {owner}"
            if owners != {owner} or owner is None:
                raise Violation("blocks back while a read can write", told)
            if (rank, owner) in self._over:
                raise Violation("reported while a read can write", told)

    def _reads(self, engine: Engine) -> Iterator[tuple[RankLife, Read]]:
        for rank in engine.ranks:
            begin, end = rank.seat.memory.span
            for read in self._world.fabric.alive():
                if begin <= read.into[0] < end:
                    yield rank, read

    def _check_load(self, engine: Engine, rank: RankLife, loaded: Loaded) -> None:
        request = engine.side.requests.get(loaded.request)
        if request is None:
            raise Violation("unexpected report", f"{rank.seat.name}: {loaded.request}")
        if loaded.failure is not None:
            why, life = loaded.failure.why, request.kv_transfer_params["incarnation"]
            self.failed.append(Failed(loaded.request, why, str(loaded.failure), life))
            if why is Why.CORRUPT and loaded.request not in self._world.damage.requests:
                raise Violation("good bytes called corrupt", f"{loaded.request}: {loaded.failure}")
            return
        self.good += 1
        self.verified += loaded.verified
        tokens = range(request.local, request.local + loaded.num_tokens)
        table = engine.side.book.table(loaded.request)
        wrong = rank.seat.memory.wrong(request.prompt, table, tokens)
        if wrong:
            told = f"{rank.seat.name}: {loaded.request}, tokens {wrong} of {tokens}"
            raise Violation("wrong bytes", told)


def _owner(engine: Engine, block: int) -> str | None:
    return engine.side.book.block_pool.blocks[block].owner


def _validate(rank: RankLife) -> None:
    """Between a death and the restart the machines are in doubt."""
    if rank.died:
        return
    try:
        rank.machinery.sender.offers.validate()
        rank.machinery.receiver.requests.validate()
    except LocalProtocolError as error:
        raise Violation("machine invalid", f"{rank.seat.name}: {error}") from error
