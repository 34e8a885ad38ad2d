"""A random life of an engine whose cached blocks others read, without pins.

The engine's two ranks execute its steps later than vLLM schedules them, and piece by piece. Another
engine asks its directory at any moment, also in the middle of vLLM's `schedule()`, then asks each
rank for the blocks, and reads them half a block at a time. A read that the rank's fence slot proves
must have the KV of the tokens that were asked for.

The scheduler's half and the ranks' slots are the connector's own. The model is of the rest: which
writes of a step a rank has done.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from vllm.v1.core.sched.output import SchedulerOutput

from fuzz.scheduler.engine import Configuration, Group
from fuzz.scheduler.life import Life
from fuzz.scheduler.memory import Memory, hashes
from nixl_kv.connector.conversations.content import CachedContent
from nixl_kv.conversations.runs import Run, open_run
from nixl_kv.conversations.slots import ContentSlots, Fence
from nixl_kv.ids import Nonce
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import Found
from nixl_kv.transport.base import SlotPage
from support.records import find
from support.vllm_scheduler import BLOCK, make_request

NUM_RANKS: Final = 2
NUM_SLOTS: Final = 8
MAX_READS: Final = 12
ACTS: Final = 14  # of the ranks and of readers, between two acts of vLLM
CROWDED: Final = 14  # blocks; see `Configuration`
LATEST: Final = 8  # requests whose tokens are asked for

_Write: TypeAlias = tuple[int, Mapping[int, int], range, list[int]]  # as of `Memory.write`


class _Recorded(Memory):
    """The beliefs of vLLM's scheduler, and the writes that led to them."""

    def __init__(self, groups: Iterable[Group]) -> None:
        super().__init__(list(groups))
        self.log: list[_Write] = []

    def write(self, number: int, entries: Mapping[int, int], tokens: range, kv: list[int]) -> None:
        super().write(number, entries, tokens, kv)
        self.log.append((number, entries, tokens, kv))

    def pop(self) -> list[_Write]:
        log, self.log = self.log, []
        return log


@dataclass
class _Grant:
    fence: Fence
    seen: list[int] = field(default_factory=list)


class _Rank:
    """A worker: a thread that executes steps, and one that grants."""

    def __init__(self, groups: Iterable[Group], num_blocks: int) -> None:
        self.memory = Memory(list(groups))
        self.page = SlotPage(NUM_SLOTS)
        self.slots = ContentSlots(num_blocks, NUM_SLOTS)
        self.slots.bind(self.page, 0)
        self.key = b""
        self.begun = self.ended = 0
        self.steps: deque[tuple[list[events.Command], list[_Write]]] = deque()
        self._writes: list[_Write] | None = None  # of the step in progress
        self._offers: dict[Nonce, int] = {}  # slots
        self._withdrawn: list[Nonce] = []

    def act(self) -> None:
        """A piece of a step."""
        if self._writes is None:
            if self.steps:
                commands, self._writes = self.steps.popleft()
                self._begin(commands)
        elif self._writes:
            self.memory.write(*self._writes.pop(0))
        else:
            self.slots.end_step(None)
            self._writes, self.ended = None, self.begun

    def _begin(self, commands: list[events.Command]) -> None:
        self.begun += 1
        for command in self.slots.before_step(commands):
            match command:
                case events.SetContentKey():
                    self.key = command.key
                case events.WithdrawOffer():
                    self._withdrawn.append(command.nonce)

    # --- the other thread

    def grant(self, run: Run, offer: Nonce) -> Fence | None:
        self._free()
        fence = self.slots.open(run, offer)
        if fence is not None:
            self._offers[offer] = fence.slot
        return fence

    def release(self, offer: Nonce) -> None:
        slot = self._offers.pop(offer, None)
        if slot is not None:
            self.slots.close(slot)

    def _free(self) -> None:
        while self._withdrawn:
            self.release(self._withdrawn.pop())


@dataclass
class _Read:
    """A read from one rank."""

    rank: _Rank
    found: Found
    kv: list[int]  # the right one
    grant: _Grant | None = None


class ReadLife(Life):
    """`plant` puts a bug into it before it begins."""

    def __init__(self, seed: int, plant: Callable[["ReadLife"], None] = lambda _: None) -> None:
        super().__init__(seed, Configuration.drawn_for_reads)
        self._memory: _Recorded = _Recorded(self._groups)
        role: Any = self._engine.role
        self.content: Any
        (self.content,) = [part for part in role._parts if isinstance(part, CachedContent)]
        self.index = self.content._index
        blocks = self.configuration.num_blocks
        self.ranks = [_Rank(self._groups, blocks) for _ in range(NUM_RANKS)]
        self.output: SchedulerOutput  # of the latest schedule()
        self._commands: list[events.Command] = []
        self._num_steps = 0
        self._under_way: deque[int] = deque()  # the numbers of the steps that have not ended
        self._loads_from: dict[str, int] = {}  # the step with which each load began
        self._hashed: set[str] = set()  # requests, in this schedule()
        self._reads: list[_Read] = []
        self._labels = [""]
        self._may_go_on = False  # while another thread asks
        plant(self)
        self._interleave()

    def _interleave(self) -> None:
        """Let another thread ask, before and after each act of vLLM's thread on the index."""
        pool = self._vllm.kv_cache_manager.block_pool
        for owner, name in (
            *((pool, name) for name in ("get_new_blocks", "cache_full_blocks")),
            *((self.index, name) for name in ("on_taken", "on_hashed", "end_step")),
        ):
            setattr(owner, name, self._probed(getattr(owner, name)))
        lookup = self.index._lookup
        cache = pool.cache_full_blocks

        def cache_full_blocks(**fields: Any) -> None:
            self._hashed.add(fields["request"].request_id)
            cache(**fields)

        def slow(key: bytes) -> int | None:
            """Between two lookups of the asking thread, vLLM's thread goes on."""
            if self._may_go_on and self._happens(0.03):
                self._may_go_on = False
                if self._happens(0.5):
                    self._reset(reset_running_requests=self._happens(0.7))
                else:
                    self._turn()
            return lookup(key)

        pool.cache_full_blocks = cache_full_blocks
        self.index._lookup = slow

    def _probed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def probe(*args: Any, **more: Any) -> Any:
            if self._happens(0.03):
                self._ask()
            result = call(*args, **more)
            if self._happens(0.03):
                self._ask()
            return result

        return probe

    # --- vLLM's thread

    def _turn(self) -> None:
        self._act(is_between=True)
        super()._turn()

    def _disturb(self) -> None:
        super()._disturb()
        if self._happens(0.03) and not self._steps and not self._loads and not self._landed:
            self._relabel()
        if self.configuration.num_blocks == CROWDED and not self._vllm.requests:
            self._crowd()

    def _crowd(self) -> None:
        """An urgent request needs a block while a long prompt is computed beside it.

        vLLM then preempts the prompt's request in the step for which it has scheduled it.
        """
        for number, (length, priority) in enumerate(((166, 5), (31, -1))):
            self.counts["arrived"] += 1
            name, first = f"r{self.counts['arrived']}", 600_000 * (1 + self.counts["arrived"])
            tokens = range(first, first + length)
            fields = {"arrival_time": self._engine.now, "priority": priority}
            request = make_request(name, tokens, max_tokens=12 - 6 * number, **fields)
            self._requests[name] = request
            self._vllm.add_request(request)
            self._turn()

    def _relabel(self) -> None:
        """A trainer replaces the weights of an idle engine, and a tool tells their label."""
        if self._vllm.reset_prefix_cache():
            self._weights += 1
            self._labels.append(f"weights {self._weights}")
            directory: Any = self._engine.role._directory
            directory.weights = self._labels[-1]
            self.counts["labels"] += 1

    def _schedule(self) -> None:
        self._hashed.clear()
        super()._schedule()
        commands, self._commands = self._commands, []
        writes = self._memory.pop()
        self._num_steps += 1
        for rank in self.ranks:
            rank.steps.append((commands, list(writes)))
        self._under_way.append(self._num_steps)
        self._act()

    def _note_begun(self, output: SchedulerOutput) -> None:
        super()._note_begun(output)
        self.output = output
        preempted = set(output.preempted_req_ids or ()).difference(output.num_scheduled_tokens)
        lost = self._hashed & preempted
        self.counts["preempted in the step that scheduled them"] += len(lost)

    def _do(self, command: events.Command) -> None:
        super()._do(command)
        match command:
            case events.BlocksTaken() | events.SetContentKey():
                self._commands.append(command)
            case events.StartLoad():
                self._loads_from[command.request] = self._num_steps + 1

    def _land(self, load: events.StartLoad) -> bool:
        """The ranks read the load once they have begun the step that starts it."""
        step = self._loads_from.pop(load.request)
        for rank in self.ranks:
            while rank.begun < step:
                rank.act()
        is_good = super()._land(load)
        for write in self._memory.pop():
            for rank in self.ranks:
                rank.memory.write(*write)
        return is_good

    def _end_step(self) -> None:
        self._act()
        step = self._under_way.popleft()
        for rank in self.ranks:
            while rank.ended < step:
                rank.act()
        super()._end_step()

    @property
    def _is_vllm_at_fault(self) -> bool:
        """Also docs/upstream/vllm-preempted-blocks.md."""
        lost = self.counts["preempted in the step that scheduled them"]
        return lost > 0 or super()._is_vllm_at_fault

    # --- the ranks, and an engine that asks

    def _act(self, *, is_between: bool = False) -> None:
        """`is_between`: between two rounds of vLLM's loop."""
        for _ in range(self._rng.randrange(ACTS)):
            chance = self._rng.random()
            if chance < 0.4:
                self._rng.choice(self.ranks).act()
            elif chance < 0.5:
                self._may_go_on = is_between
                self._ask()
                self._may_go_on = False
            elif self._reads:
                self._read_on(self._rng.choice(self._reads))

    def _ask(self) -> None:
        if not self._requests or len(self._reads) > MAX_READS:
            return
        # Those that wait may have lost their blocks.
        known = [*list(self._requests)[-LATEST:], *self._vllm.requests]
        name = self._rng.choice(known)
        tokens = list(self._requests[name].all_token_ids)
        keys = make_request("asked", tokens).block_hashes
        if not keys:
            return
        first = self._rng.randrange(len(keys)) if self._happens(0.5) else 0
        label = self._labels[-1 - self._happens(0.1) * (len(self._labels) > 1)]
        question = find(keys[first:], first, label)
        found = self.content.find(question)
        self.counts["asks"] += 1
        if not found.num_blocks:
            return
        self.counts["asks with blocks"] += 1
        kv = hashes(tokens, self._weights)[first * BLOCK :][: found.num_blocks * BLOCK]
        self._reads += [_Read(rank, found, kv) for rank in self.ranks]

    def _read_on(self, read: _Read) -> None:
        """A piece of the work of one reader."""
        rank, grant, num_halves = read.rank, read.grant, 2 * read.found.num_blocks
        if grant is None:
            self._ask_rank(read)
        elif len(grant.seen) < num_halves * BLOCK // 2:
            self._read_halves(read, grant, self._rng.randint(1, num_halves))
        else:
            self._reads.remove(read)
            is_proven = rank.page.read(grant.fence.slot) == grant.fence.token
            rank.release(read.found.offer)
            self.counts["cached reads proven" if is_proven else "cached reads fenced"] += 1
            if is_proven:
                self._check(grant.seen == read.kv, f"wrong KV is proven: {read.found}")
                self.counts["cached blocks read"] += read.found.num_blocks

    def _ask_rank(self, read: _Read) -> None:
        rank, found = read.rank, read.found
        run = open_run(found.run, Nonce(found.offer), rank.key)
        if run is not None and not rank.slots.is_written(run) and not rank.slots.is_stale(run):
            self.counts["grants that wait for a step"] += 1
            return
        fence = None if run is None else rank.grant(run, Nonce(found.offer))
        if fence is None:
            self._reads.remove(read)
            self.counts["grants refused"] += 1
        else:
            read.grant = _Grant(fence)

    def _read_halves(self, read: _Read, grant: _Grant, count: int) -> None:
        run = open_run(read.found.run, Nonce(read.found.offer), read.rank.key)
        assert run is not None
        ids = run.block_ids.tolist()
        begin = len(grant.seen) // (BLOCK // 2)
        for half in range(begin, min(begin + count, 2 * len(ids))):
            grant.seen += read.rank.memory.half(ids[half // 2], half % 2)


# --- planted bugs


def _hook(life: ReadLife) -> None:
    """Only the blocks that vLLM names to its workers count as reused."""
    note = life._note_begun

    def note_begun(output: SchedulerOutput) -> None:
        note(output)
        new = [each.block_ids[0] for each in output.scheduled_new_reqs]
        more = [ids[0] for ids in output.scheduled_cached_reqs.new_block_ids if ids]
        named = [block for ids in (*new, *more) for block in ids]
        commands = life._engine.metadata(output).commands
        for place, command in enumerate(commands):
            if isinstance(command, events.BlocksTaken):
                ids = b"".join(block.to_bytes(4, "little") for block in named)
                commands[place] = events.BlocksTaken(command.step, ids, command.epoch)

    life._note_begun = note_begun  # type: ignore[method-assign]


def _born(life: ReadLife) -> None:
    """A block is found as soon as vLLM has inserted its hash."""
    note = life.index.on_hashed

    def on_hashed(request: str, block_ids: list[int], parent: int | None) -> None:
        note(request, block_ids, parent)
        for block in block_ids:
            if life.index._epoch.born[block] <= life.index._built + 1:
                life.index._epoch.born[block] = 0

    life.index.on_hashed = on_hashed


def _check(life: ReadLife) -> None:
    """A rank does not look whether a block was reused before its grant."""
    for rank in life.ranks:
        slots: Any = rank.slots
        slots.is_stale = lambda _: False


def _preempt(life: ReadLife) -> None:
    """Count blocks that a preempted request has hashed in its own step as filled."""
    end = life.index.end_step
    life.index.end_step = lambda _preempted, *, is_doubtful: end((), is_doubtful=is_doubtful)


def _synchronous(life: ReadLife) -> None:
    """A step with synchronous loads is like others."""
    end = life.index.end_step
    life.index.end_step = lambda preempted, **_: end(preempted)


def _parent(life: ReadLife) -> None:
    """KV that was computed on a doubtful block counts as good."""
    note = life.index.on_hashed
    life.index.on_hashed = lambda request, block_ids, _: note(request, block_ids, None)


def _epoch(life: ReadLife) -> None:
    """A reset is not counted."""
    life.index.on_reset = lambda _weights=None: None


PLANTED: Final[Mapping[str, Callable[[ReadLife], None]]] = {
    "hook": _hook,
    "born": _born,
    "check": _check,
    "preempt": _preempt,
    "synchronous load": _synchronous,
    "parent": _parent,
    "epoch": _epoch,
}
