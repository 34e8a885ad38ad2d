"""Which cached blocks are found, against a naive model of vLLM's pool and of a rank's memory."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_kv.conversations.index import ContentIndex
from nixl_kv.conversations.runs import Run
from nixl_kv.geometry.layout import Table
from nixl_kv.protocol.events import BlocksTaken

A, B, C = b"a", b"b", b"c"
BLOCKS: Final = 12
JUNK: Final = (-1, b"")
TAKEN: Final = bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])
Kv: TypeAlias = tuple[
    int, bytes
]  # the contents of a block: the weights, and the hash of its tokens


class Map(dict[bytes, int]):
    """vLLM's map, and an index of it."""

    def __init__(self, *, drops_last: bool = False) -> None:
        super().__init__()
        self.index = ContentIndex(BLOCKS, self.get, drops_last=drops_last)

    def take(self, *blocks: int) -> None:
        self.index.on_taken(blocks)

    def insert(
        self, *hashes: bytes, first: int = 1, parent: int | None = None, by: str = "r"
    ) -> None:
        """Blocks from `first` on get these hashes."""
        blocks = range(first, first + len(hashes))
        self.index.on_hashed(by, blocks, parent)
        self.update(zip(hashes, blocks, strict=True))

    def find(self, *hashes: bytes, weights: str = "") -> tuple[int, int, list[int]] | None:
        found = self.index.find(hashes, 0, weights)
        return None if found is None else (found.steps, found.need, found.block_ids.tolist())

    def end_step(self, *preempted: str, is_doubtful: bool = False) -> tuple[int, list[int]]:
        taken = self.index.end_step(preempted, is_doubtful=is_doubtful)
        return taken.step, Table(0, taken.ids).block_ids.tolist()


@pytest.fixture
def vllm() -> Map:
    made = Map()
    made.take(1, 2, 3)
    return made


def test_a_block_is_found_once_the_step_that_fills_it_is_built(vllm: Map) -> None:
    vllm.insert(A, B)
    assert vllm.find(A, B) is None
    assert vllm.end_step() == (1, [1, 2, 3])
    assert vllm.find(A, B) == (1, 1, [1, 2])
    vllm.insert(C, first=3, parent=2)
    assert vllm.find(A, B, C) == (1, 1, [1, 2]), "the step that fills C is not built"
    assert vllm.end_step() == (2, [])
    assert vllm.find(A, B, C) == (2, 2, [1, 2, 3])
    assert vllm.find(B, C) == (2, 2, [2, 3])


def test_a_run_ends_at_the_first_unknown_hash(vllm: Map) -> None:
    vllm.insert(A, B)
    vllm.end_step()
    assert vllm.find(A, C, B) == (1, 1, [1])
    assert vllm.find(C, A) is None
    assert vllm.find() is None


def test_at_a_place_that_no_block_can_have_nothing_is_found(vllm: Map) -> None:
    """The question comes from another engine. A block table ends at 2^31 entries."""
    vllm.insert(A, B)
    vllm.end_step()
    places = (0, BLOCKS - 2, BLOCKS - 1, (1 << 31) - 1)
    found = [vllm.index.find((A, B), place, "") for place in places]
    assert [run and run.end_block for run in found] == [2, BLOCKS, None, None]


def test_an_empty_step_has_a_number_too(vllm: Map) -> None:
    assert [vllm.index.end_step() for _ in range(2)] == [BlocksTaken(1, TAKEN), BlocksTaken(2, b"")]


def test_a_preempted_request_fills_nothing(vllm: Map) -> None:
    vllm.insert(A)
    vllm.insert(B, first=2, parent=1, by="preempted")
    vllm.insert(C, first=3, parent=2, by="its reader")
    vllm.end_step("preempted")
    assert vllm.find(A, B, C) == (1, 1, [1])
    assert vllm.find(C) is None, "it was computed on B"


def test_a_preemption_leaves_former_steps_alone(vllm: Map) -> None:
    vllm.insert(A)
    vllm.end_step()
    vllm.insert(B, first=2, parent=1)
    vllm.end_step("r")
    assert vllm.find(A, B) == (2, 1, [1])


def test_nothing_of_a_step_with_synchronous_loads_is_found(vllm: Map) -> None:
    vllm.insert(A, B)
    vllm.end_step(is_doubtful=True)
    assert vllm.find(A) is None
    vllm.insert(C, first=3, parent=2)
    vllm.end_step()
    assert vllm.find(C) is None, "it was computed on B"


def test_a_block_that_such_a_step_began_to_fill_is_not_found(vllm: Map) -> None:
    vllm.end_step(is_doubtful=True)
    vllm.insert(A)
    vllm.end_step()
    assert vllm.find(A) is None


def test_a_block_that_is_taken_again_is_good_again(vllm: Map) -> None:
    vllm.insert(A)
    vllm.end_step(is_doubtful=True)
    vllm.take(1)
    assert vllm.find(A) is None
    vllm.insert(A)
    assert vllm.end_step() == (2, [1])
    assert vllm.find(A) == (2, 2, [1])


def test_a_block_that_no_request_took_is_not_found(vllm: Map) -> None:
    vllm.insert(A, first=4)
    vllm.end_step()
    assert vllm.find(A) is None


def test_a_reset_hides_blocks_that_were_taken_before_it(vllm: Map) -> None:
    vllm.insert(A)
    vllm.end_step()
    vllm.index.on_reset()
    assert vllm.find(A) is None
    vllm.insert(B, first=2)  # some of its tokens were computed before the reset
    vllm.take(4)
    vllm.insert(C, first=4, parent=2)
    vllm.end_step()
    assert vllm.find(B) is None
    assert vllm.find(C) is None
    vllm.take(5)
    vllm.insert(A, first=5)
    vllm.end_step()
    assert vllm.find(A) == (3, 3, [5])


def test_a_run_has_its_place_in_the_prompt_and_its_epoch(vllm: Map) -> None:
    vllm.index.on_reset()
    vllm.take(1, 2)
    vllm.insert(A, B)
    assert vllm.index.end_step().epoch == 1
    found = vllm.index.find([A, B], 7, "")
    assert found == Run(
        first_block=7, ids=bytes([1, 0, 0, 0, 2, 0, 0, 0]), steps=1, need=1, epoch=1
    )


def test_only_the_engines_own_weights_find_anything(vllm: Map) -> None:
    vllm.insert(A)
    vllm.end_step()
    assert vllm.find(A, weights="other") is None
    vllm.index.on_reset("other")
    assert vllm.find(A, weights="other") is None, "the former weights have computed it"
    vllm.take(1)
    vllm.insert(A)
    vllm.end_step()
    assert vllm.find(A) is None
    assert vllm.find(A, weights="other") == (2, 2, [1])
    vllm.index.on_reset()
    vllm.take(1)
    vllm.insert(A)
    vllm.end_step()
    assert vllm.find(A, weights="other") == (3, 3, [1]), "the label remains"


def test_a_draft_model_costs_the_last_block() -> None:
    vllm = Map(drops_last=True)
    vllm.take(1, 2, 3)
    vllm.insert(A, B, C)
    vllm.end_step()
    assert vllm.find(A, B, C) == (1, 1, [1, 2])
    assert vllm.find(A, B) == (1, 1, [1])
    assert vllm.find(A) is None


# --- against a model


@dataclass
class Running:
    chat: int
    table: list[int] = field(default_factory=list)
    num_hashed: int = 0


class Model:
    """vLLM's pool and one rank, which executes a step when its metadata is built.

    A request's blocks hold the KV of a chat's tokens, block after block. A request's block
    gets the right KV if the request's blocks before it have theirs.
    """

    def __init__(self) -> None:
        self.map: dict[bytes, int] = {}
        self.free = list(range(BLOCKS))
        self.running: dict[str, Running] = {}
        self.index = ContentIndex(BLOCKS, self.lookup)
        self.weights = 0
        self.pending: list[tuple[Running, str, int]] = []  # the blocks that the next step fills
        self.preempted: set[str] = set()
        self.is_doubtful = False
        self.discarded: list[tuple[Running, str, int]] = []  # computed again in place
        self.kv: dict[int, Kv] = {}
        self.history: dict[int, list[Kv]] = defaultdict(list)  # by block, after each step
        self.reused: list[set[int]] = [set()]  # by step
        self.runs: list[tuple[list[bytes], int, Run]] = []
        self.between: Callable[[], None] = lambda: None

    def lookup(self, key: bytes) -> int | None:
        """Between two lookups, vLLM's thread may do anything."""
        self.between()
        found = self.map.get(key)
        self.between()
        return found

    @staticmethod
    def key(chat: int, number: int) -> bytes:
        """Chats 0 and 1 have the first block in common."""
        return b"%d/%d" % (chat if number else chat // 2, number)

    # --- vLLM's thread

    def take(self, chat: int, size: int) -> None:
        """A request of a chat begins, with the cached blocks, or goes on."""
        name = f"r{chat}"
        request = self.running.get(name)
        if request is None:
            request = self.running[name] = Running(chat)
            while (cached := self.map.get(self.key(chat, request.num_hashed))) is not None:
                request.table.append(cached)
                request.num_hashed += 1
                if cached in self.free:
                    self.free.remove(cached)
        blocks = [self.free.pop(0) for _ in range(min(size, len(self.free)))]
        self.map = {key: block for key, block in self.map.items() if block not in blocks}
        self.index.on_taken(blocks)
        request.table += blocks
        self.pending += [(request, name, number) for number in self._new(request, len(blocks))]

    @staticmethod
    def _new(request: Running, count: int) -> range:
        return range(len(request.table) - count, len(request.table))

    def hash(self, chat: int, size: int) -> None:
        request = self.running.get(f"r{chat}")
        if request is None or request.num_hashed == len(request.table):
            return
        first, end = request.num_hashed, min(request.num_hashed + size, len(request.table))
        parent = request.table[first - 1] if first else None
        self.index.on_hashed(f"r{chat}", request.table[first:end], parent)
        for number in range(first, end):
            self.map.setdefault(self.key(chat, number), request.table[number])
        request.num_hashed = end

    def work(self, chat: int, size: int) -> None:
        self.take(chat, size)
        self.hash(chat, size)

    def end(self, chat: int, size: int) -> None:
        """A request ends, or vLLM preempts it, maybe in the schedule() that has scheduled it."""
        name = f"r{chat}"
        request = self.running.pop(name, None)
        if request is None:
            return
        if size % 2:
            self.preempted.add(name)
            self.pending = [each for each in self.pending if each[1] != name]
        in_use = {block for other in self.running.values() for block in other.table}
        self.free += [block for block in request.table if block not in in_use]

    def doubt(self, _chat: int, _size: int) -> None:
        self.is_doubtful = True

    def reset(self, _chat: int, size: int) -> None:
        """Reset vLLM's cache, which fails while requests run, or the connector."""
        if size % 2 and not self.running:
            self.map = {}
            self.index.on_reset()
        else:
            self.index.on_reset("")
        self.weights += 1

    def step(self, _chat: int = 0, _size: int = 0) -> None:
        command = self.index.end_step(self.preempted, is_doubtful=self.is_doubtful)
        taken = set(Table(0, command.ids).block_ids.tolist())
        assert command.step == len(self.reused)
        self.reused.append(taken)
        again = [each for each in self.discarded if self.running.get(each[1]) is each[0]]
        self.discarded = []
        for work in again + self.pending:
            request, _, place = work
            before = self.kv.get(request.table[place - 1]) if place else None
            is_right = not place or before == (self.weights, self.key(request.chat, place - 1))
            if self.is_doubtful:
                is_right = False
                self.discarded.append(work)
            kv = (self.weights, self.key(request.chat, place)) if is_right else JUNK
            self.kv[request.table[place]] = kv
        for block in range(BLOCKS):
            self.history[block].append(self.kv.get(block, JUNK))
        self.pending, self.preempted, self.is_doubtful = [], set(), False

    # --- the other thread

    def find(self, chat: int, between: Sequence[tuple[str, int, int]]) -> None:
        rest = list(between)

        def act() -> None:
            if rest:
                name, *more = rest.pop(0)
                getattr(self, name)(*more)

        self.between = act
        hashes = [self.key(chat, number) for number in range(4)]
        found = self.index.find(hashes, 0, "")
        self.between = lambda: None
        if found is not None:
            self.runs.append((hashes, self.weights, found))

    def judge(self) -> None:
        """Each run is right from `need` on, until a step after S reuses one of its blocks."""
        for hashes, weights, found in self.runs:
            ids = found.block_ids.tolist()
            later = range(found.steps + 1, len(self.reused))
            end = next((s for s in later if not self.reused[s].isdisjoint(ids)), len(self.reused))
            assert 0 < found.need <= found.steps
            for step in range(found.need, end):
                for key, block in zip(hashes, ids, strict=False):
                    assert self.history[block][step - 1] == (weights, key), (step, block, found)


CHATS, SIZES = st.integers(0, 2), st.integers(1, 4)
USUAL = ("work", "work", "work", "take", "hash", "step", "step", "step", "step", "end", "end")
ACTS = st.tuples(st.sampled_from(USUAL * 8 + ("doubt", "reset")), CHATS, SIZES)
FINDS = st.tuples(CHATS, st.lists(ACTS, max_size=4))
EVENTS = st.lists(ACTS | FINDS, min_size=60, max_size=120)


@settings(max_examples=150)
@given(EVENTS)
def test_each_run_is_right_whatever_happens_while_it_is_found(
    events: list[tuple[str, int, int] | tuple[int, list[tuple[str, int, int]]]],
) -> None:
    model = Model()
    for event in events:
        if len(event) == 2:
            model.find(*event)
        else:
            name, *more = event
            getattr(model, name)(*more)
    for _ in range(2):
        model.step()
    model.judge()
