"""Promises that must hold after every step.

a slot            is granted only while it is clear, and cleared once (see `planes.SimSlots`)
a grant           is valid when it leaves, for blocks of the request that it was made for, and of
                  tokens that are written
a valid slot      its blocks are still that request's, and it is not reported as sent; if nothing
                  pins them, they have the KV that was found, and no reset has come since
a read            its blocks are those of the request that it is for, until it cannot write
a good load       has its own prompt's bytes from every rank, when it is reported
a report          is of a load that was started, says of how many tokens, and is the only one
a digest          leaves while the slot of its grant is valid
a verified load   was compared with each rank's digest, and equal
a corrupt load    was damaged on its way
a dropped peer    is not being read (see `planes.SimTransport`)
a stopped rank    is not written by any read, and owes no load (see `rank.RankLife.stop`)
a message         to a peer has no key of a load, which the scheduler believes
the machines      say so themselves

And where no lease runs out and no message is lost (`gentle`), a read is served to its end: its
blocks stay as they are on prefill until nothing reads them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nixl_kv.errors import LocalProtocolError
from nixl_kv.geometry.layout import ABSENT
from nixl_kv.ids import Endpoint, FenceToken, Incarnation, Nonce, Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.events import FailureKind, LoadEnded, OfferEnded
from nixl_kv.protocol.messages import DigestReply, Grant, PackReply, decode_answer
from nixl_kv.protocol.ticket import SealedTicket
from sim.cache import BLOCK_TOKENS, NULL_BLOCK
from sim.engine import Engine
from sim.liars import names_in
from sim.planes import Read
from sim.rank import RankLife
from sim.repeatable import Violation
from sim.world import World


@dataclass(frozen=True)
class Granted:
    rank: RankLife
    nonce: Nonce
    slot: int
    fence_token: FenceToken
    blocks: frozenset[int]
    owner: RequestId

    @property
    def is_valid(self) -> bool:
        return self.rank.seat.slots.read(self.slot) == self.fence_token


@dataclass(frozen=True)
class FailedLoad:
    request: RequestId
    failure: events.Failure
    incarnation: Incarnation


class Invariants:
    def __init__(self, world: World, *, is_served: Callable[[], bool]) -> None:
        """Observe this world. `is_served`: whether each read is served to its end, up to now."""
        self.num_good = 0
        self.failed: list[FailedLoad] = []
        self._world = world
        self._is_served = is_served
        self._grants: dict[tuple[RankLife, Nonce], Granted] = {}
        self._tables: dict[Nonce, list[int]] = {}  # of the grants of cached blocks
        self._owners: dict[int, RequestId | None] = {}  # of reads' blocks, by the read's number
        self._reported: set[tuple[RankLife, RequestId]] = set()
        self._equal: set[tuple[RankLife, RequestId, Rank]] = set()
        world.observer = self

    def check(self) -> None:
        """To be called after a step."""
        alive = list(self._world.ranks())
        if self._grants:
            self._grants = {key: each for key, each in self._grants.items() if each.rank in alive}
            for granted in self._grants.values():
                self._check_grant(granted)
        reads = self._world.fabric.reads()
        for engine in self._world.decodes() if reads else ():
            self._check_reads(engine)
        for rank in alive:
            if rank.has_turned:
                rank.has_turned = False
                _validate(rank)

    # --- as observer

    def on_result(self, rank: RankLife, result: events.Result) -> None:
        engine = self._engine_of(rank)
        if engine is None:
            return
        if isinstance(result, OfferEnded):
            self._check_offer_ended(rank, result)
        if isinstance(result, LoadEnded):
            self._reported.add((rank, result.request))
            self._check_reads(engine)
            self._check_load(engine, rank, result)

    def on_send(self, rank: RankLife, endpoint: Endpoint, payload: bytes) -> None:
        """Beliefs of decode's scheduler that the other side must not know."""
        engine = self._engine_of(rank)
        if engine is None or endpoint == engine.hints_at:
            return
        names = names_in(payload)
        secrets = engine.scheduler.decode.connector._by_hint_key
        if any(name in secrets for name in names):
            raise Violation("secret told to a peer", f"{rank.seat.name}, to {endpoint}")
        self._world.told.extend(names)

    def on_reply(self, rank: RankLife, payload: bytes) -> None:
        answer, engine = decode_answer(payload), self._engine_of(rank)
        if engine is None or rank not in engine.ranks:
            return
        if isinstance(answer, Grant):
            self._add_grant(engine, rank, answer)
        if isinstance(answer, DigestReply) or (
            isinstance(answer, PackReply) and answer.slot is not None
        ):
            granted = self._grants.get((rank, answer.nonce))
            if granted is None or not granted.is_valid:
                kind = "digest" if isinstance(answer, DigestReply) else "chunk"
                raise Violation(f"{kind} of an offer not held", f"{rank.seat.name}: {answer.nonce}")
            self._check_grant(granted)

    def on_overwritten(self, rank: RankLife, blocks: list[int]) -> None:
        for granted in self._grants.values():
            if granted.rank is rank and granted.is_valid and granted.blocks & set(blocks):
                detail = f"{rank.seat.name}: slot {granted.slot}, of {granted.owner}"
                raise Violation("overwritten while its slot is valid", detail)

    def on_compared(self, rank: RankLife, event: events.DigestCompared) -> None:
        if event.difference is None and event.refusal is None:
            self._equal.add((rank, event.request, event.rank))

    def _engine_of(self, rank: RankLife) -> Engine | None:
        return self._world.engines[rank.seat.process.name]

    # --- prefill

    def _add_grant(self, engine: Engine, rank: RankLife, grant: Grant) -> None:
        if grant.nonce in self._world.found:
            self._add_cached(rank, grant)
            return
        # The step in progress may write the blocks behind the granted tokens, for this request.
        end = None if grant.num_tokens is None else -(-grant.num_tokens // BLOCK_TOKENS)
        ids = [block for table in grant.tables for block in table.block_ids[:end].tolist()]
        blocks = frozenset(ids) - {ABSENT}
        # vLLM may have freed a pair's blocks since its last step, which its next step will tell.
        owner = self._world.pairs.get(grant.nonce) or _owner(
            engine, min(blocks, default=NULL_BLOCK)
        )
        if owner is None:
            raise Violation("granted free blocks", f"{rank.seat.name}: blocks {set(blocks)}")
        granted = Granted(rank, grant.nonce, grant.slot, grant.fence_token, blocks, owner)
        is_early, key = grant.nonce in self._world.pairs, (rank, grant.nonce)
        if not granted.is_valid and not is_early:  # the step thread clears a pair's
            raise Violation("granted without a slot", f"{rank.seat.name}: {owner}")
        known = self._grants.get(key)
        grows = known is not None and is_early and granted.blocks >= known.blocks
        if known is not None and known != granted and known.is_valid and not grows:
            raise Violation("granted in two ways", f"{rank.seat.name}: {known} and {granted}")
        self._grants[key] = granted
        self._check_grant(granted)
        if granted.is_valid:
            self._check_written(engine, rank, grant, owner)

    def _add_cached(self, rank: RankLife, grant: Grant) -> None:
        """The step thread may have cleared its slot already."""
        blocks = frozenset(grant.tables[0].block_ids.tolist())
        owner = RequestId(f"found {grant.nonce}")
        granted = Granted(rank, grant.nonce, grant.slot, grant.fence_token, blocks, owner)
        self._grants[rank, grant.nonce] = granted
        self._check_cached(granted, grant.tables[0].block_ids.tolist())
        self._tables[granted.nonce] = grant.tables[0].block_ids.tolist()

    def _check_cached(self, granted: Granted, table: list[int]) -> None:
        found, rank = self._world.found[granted.nonce], granted.rank
        if not granted.is_valid:
            return
        wrong = rank.seat.cache.wrong_tokens(found.prompt, table, range(found.num_tokens))
        detail = f"{rank.seat.name}: slot {granted.slot}, {granted.owner}"
        if wrong:
            raise Violation("other KV while its slot is valid", f"{detail}, tokens {wrong}")
        if found.epoch != rank.epoch:
            raise Violation("valid after a reset", detail)

    def _check_written(
        self, engine: Engine, rank: RankLife, grant: Grant, owner: RequestId
    ) -> None:
        request, (table, *_) = engine.scheduler.prefill.requests.get(owner), grant.tables
        if request is None or table.first or self._world.shape.window:
            return
        num_tokens = grant.num_tokens or request.prompt.length
        wrong = rank.seat.cache.wrong_tokens(
            request.prompt, table.block_ids.tolist(), range(num_tokens)
        )
        if wrong:
            raise Violation("granted before it is written", f"{rank.seat.name}: tokens {wrong}")

    def _check_grant(self, granted: Granted) -> None:
        if granted.nonce in self._world.found:
            self._check_cached(granted, self._tables[granted.nonce])
            return
        engine = self._engine_of(granted.rank)
        # A pair's blocks are not pinned before its ticket leaves: see `on_overwritten`.
        is_early = granted.nonce in self._world.pairs
        if engine is None or is_early or not granted.is_valid:
            return
        for block in granted.blocks:
            if _owner(engine, block) != granted.owner:
                detail = f"{granted.rank.seat.name}: slot {granted.slot}, block {block}"
                raise Violation("blocks free while their slot is valid", detail)

    def _check_offer_ended(self, rank: RankLife, ended: OfferEnded) -> None:
        granted = self._grants.get((rank, ended.nonce))
        if granted is None:
            return
        detail = f"{rank.seat.name}: {ended.request}, slot {granted.slot}"
        if granted.is_valid:
            raise Violation("reported while its slot is valid", detail)
        if self._is_served():
            for read in self._world.fabric.reads():
                if self._warms_up(read):
                    continue
                remote = {rank.seat.cache.block_at(there) for _, (there, _) in read.pieces}
                if remote & granted.blocks:
                    raise Violation("not served to its end", detail)

    # --- decode

    def _check_reads(self, engine: Engine) -> None:
        for rank, read in self._reads(engine):
            blocks = {rank.seat.cache.block_at(address) for address in read.addresses}
            owners = {_owner(engine, block) for block in blocks if block is not None}
            owner = self._owners.setdefault(read.number, next(iter(owners)))
            detail = f"{rank.seat.name}: blocks {blocks} of {owner}"
            if owners != {owner} or owner is None:
                raise Violation("blocks back while a read can write", detail)
            if (rank, owner) in self._reported:
                raise Violation("reported while a read can write", detail)

    def _warms_up(self, read: Read) -> bool:
        """Whether it writes into scratch memory alone."""
        caches = [rank.seat.cache for rank in self._world.ranks()]
        return all(cache.block_at(read.addresses[0]) is None for cache in caches)

    def _reads(self, engine: Engine) -> Iterator[tuple[RankLife, Read]]:
        for rank in engine.ranks:
            for read in self._world.fabric.reads():
                if rank.seat.cache.block_at(read.addresses[0]) is not None:
                    yield rank, read

    def _check_load(self, engine: Engine, rank: RankLife, ended: LoadEnded) -> None:
        request, start = engine.scheduler.requests.get(ended.request), rank.loads.get(ended.request)
        name = f"{rank.seat.name}: {ended.request}"
        if request is None or start is None:
            raise Violation("unexpected report", name)
        if ended.num_tokens != start.num_tokens:
            raise Violation("wrong report", f"{name}: {ended}, of {start}")
        if ended.failure is not None:
            self._check_failure(ended.request, ended.failure)
            incarnation = SealedTicket.parse(request.kv_transfer_params).open().incarnation
            self.failed.append(FailedLoad(ended.request, ended.failure, incarnation))
            return
        self.num_good += 1
        compared = all(
            (rank, ended.request, read.rank) in self._equal
            for read in ended.reads
            if read.num_bytes
        )
        if ended.verified != start.verify or (start.verify and not compared):
            raise Violation("not compared", name)
        packs = self._world.config.path == "staged" and not self._world.has_pack_failed
        if packs and any(r.num_bytes and r.path != "staged" for r in ended.reads):
            raise Violation("read directly although prefill packs", name)
        tokens = range(start.begin, start.end)
        table = engine.scheduler.blocks.table(ended.request)
        wrong = rank.seat.cache.wrong_tokens(request.prompt, table, tokens)
        if wrong:
            raise Violation("wrong bytes", f"{name}, tokens {wrong} of {tokens}")

    def _check_failure(self, request: RequestId, failure: events.Failure) -> None:
        is_corrupt = failure.kind is FailureKind.CORRUPT
        if is_corrupt and request not in self._world.damaged:
            raise Violation("good bytes called corrupt", f"{request}: {failure}")


def _owner(engine: Engine, block: int) -> RequestId | None:
    return engine.scheduler.blocks.block_pool.blocks[block].owner


def _validate(rank: RankLife) -> None:
    """Between a death and the restart the machines are in doubt."""
    if rank.has_died:
        return
    try:
        rank.parts.prefill.check()
        rank.parts.decode.check()
    except LocalProtocolError as error:
        raise Violation("machine invalid", f"{rank.seat.name}: {error}") from error
