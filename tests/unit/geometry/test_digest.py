"""The digest against its formula in plain integers, over engines that are cut in any two ways.

NIXL_KV_EXAMPLES and NIXL_KV_SEED are those of test_any_shape.py.
"""

import ctypes
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from cases import Case, cases, classic
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from oracle import Blocks, CacheGroup, Cut, Dense, Engine, Layer, dense

from nixl_kv.geometry import digest
from nixl_kv.geometry.blocks import block_ids
from nixl_kv.geometry.digest import Digest, Key
from nixl_kv.geometry.excerpts import BlockTable, Excerpt, Strip, excerpts, strips
from nixl_kv.geometry.ranks import holding, routes
from nixl_kv.ids import Rank as RankNumber

EXAMPLES = int(os.environ.get("NIXL_KV_EXAMPLES", "150"))
SEED = int(os.environ.get("NIXL_KV_SEED", "1"))
SECRET = "5ec2e7" * 5 + "00"
MASK = 2**64 - 1
NOISES = (0, 256), (0, 256)


# --- the formula, once more, in plain integers


@cache
def number_of(secret: str, index: int) -> int:
    stream = hashlib.shake_256(secret.encode()).digest(8 * (index + 1))
    return int.from_bytes(stream[-8:], "little") | 1


def mixed(value: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> shift) * factor & MASK
    return value ^ value >> 31


def unmixed(value: int) -> int:
    """The inverse of `mixed`, step by step backwards."""
    for shift, factor in ((31, 1), (27, 0x94D049BB133111EB), (30, 0xBF58476D1CE4E5B9)):
        value = value * pow(factor, -1, 2**64) & MASK
        found = value
        for _ in range(64 // shift):
            found = value ^ found >> shift
        value = found
    return value


def formula(secret: str, position: int, content: bytes) -> int:
    """One token's term."""
    total = number_of(secret, 0) + number_of(secret, 1) * position
    for index in range(0, len(content), 4):
        word = int.from_bytes(content[index : index + 4].ljust(4, b"\0"), "little")
        total += number_of(secret, 2 + index // 4) * word
    return mixed(total & MASK)


def terms(secret: str, positions: npt.NDArray[np.int64], content: digest.Bytes) -> digest.U64:
    """As the digest makes them."""
    numbers = Key(secret).numbers(digest.num_words(content.shape[-1]))
    return digest.terms(numbers, positions, content)


class Sums(NamedTuple):
    """What a digest should be."""

    rows: list[int]
    columns: list[int]


def expected(whole: Dense, wanted: Sequence[Excerpt], end: int, size: int) -> Sums:
    """From the dense arrays, for columns of `size` tokens."""
    found = Sums([], [0] * -(-end // size))
    for excerpt in wanted:
        for part in whole[excerpt.layer]:
            for head in range(excerpt.first_head, excerpt.end_head):
                row = 0
                for token in range(excerpt.begin, end):
                    term = formula(SECRET, token, part[token, head].tobytes())
                    row += term
                    found.columns[token // size] += (2 * len(found.rows) + 1) * term
                found.rows.append(row & MASK)
    return found._replace(columns=[total & MASK for total in found.columns])


# --- both sides


def window(address: int, length: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))


def run(steps: Iterator[None]) -> tuple[Digest, int]:
    """The digest, and in how many steps it was made."""
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, count
        count += 1


def made(found: Sequence[Strip], secret: str = SECRET) -> Digest:
    return run(digest.digest(Key(secret), found, window))[0]


def same(one: Digest, two: Digest) -> bool:
    return np.array_equal(one.rows, two.rows) and np.array_equal(one.columns, two.columns)


class Both:
    """Prefill and decode with the same KV where it is wanted, and different noise elsewhere."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(case.seed)
        most = max(len(g.spots) for cut in (case.prefill, case.decode) for g in cut.groups)
        self.case = case
        self.whole = dense(case.model, most, rng, 256)
        self.prefill, self.decode = (
            Engine(cut, case.model, rng, noise)
            for cut, noise in zip((case.prefill, case.decode), NOISES, strict=True)
        )
        for engine in (self.prefill, self.decode):
            engine.write(self.whole)
        self._spoil_the_rest(rng)

    def _spoil_the_rest(self, rng: np.random.Generator) -> None:
        """Behind the end, and in decode's case before the beginning, there is anything."""
        for engine, begin in ((self.prefill, 0), (self.decode, self.case.tokens.start)):
            for rank in engine.ranks:
                for layer in rank.layers:
                    present = rank.cut.group_of(layer.name).present
                    other = present[(present >= self.case.tokens.stop) | (present < begin)]
                    for offsets in rank.offsets(layer.name, other) if len(other) else ():
                        rank.memory[offsets] = rng.integers(0, 256, offsets.shape, dtype=np.uint8)

    def pairs(self) -> Iterator[tuple[list[Excerpt], list[Strip], list[Strip]]]:
        """Each read of decode's: what it is, and where it stands here and there."""
        held = [
            [holding(rank.layout) for rank in engine.ranks]
            for engine in (self.decode, self.prefill)
        ]
        end = self.case.tokens.stop
        theirs = [BlockTable(block_ids(g.table)) for g in self.case.prefill.groups]
        firsts = [self.case.tokens.start // g.entry_size for g in self.case.decode.groups]
        mine = [
            BlockTable(block_ids(group.table[first:]), first)
            for group, first in zip(self.case.decode.groups, firsts, strict=True)
        ]
        for number, rank in enumerate(self.decode.ranks):
            for route in routes(RankNumber(number), *held):
                if not route.readers:
                    continue
                wanted = excerpts(rank.layout, route.share, mine)
                there = self.prefill.ranks[route.source].layout
                if wanted:
                    here = strips(rank.layout, wanted, mine, end=end)
                    yield list(wanted), here, strips(there, wanted, theirs, end=end)


def check(case: Case) -> int:
    """Both digests of all that is read are the formula's; how many reads that were."""
    both, count = Both(case), 0
    for wanted, here, there in both.pairs():
        right = expected(both.whole, wanted, case.tokens.stop, 64)
        for found in (here, there):
            got = made(found)
            assert got.rows.tolist() == right.rows
            assert got.columns.tolist() == right.columns
        assert digest.difference(made(here), made(there), here) is None
        weighted = sum((2 * number + 1) * row for number, row in enumerate(right.rows))
        assert weighted & MASK == sum(right.columns) & MASK
        count += 1
    return count


ODD = (Layer("a", 4, 5, 7), Layer("b", 4, 1, 13), Layer("c", 4, 16, 6))
LATENT = (Layer("a", 1, 9, 0), Layer("b", 1, 18, 0))
WINDOWED = (Layer("a", 4, 3, 3, window=9), Layer("b", 4, 3, 3), Layer("c", 4, 3, 3, window=9))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="same"),
        pytest.param({"tp": (2, 1)}, id="TP 1 to 2"),
        pytest.param({"tp": (1, 4)}, id="TP 4 to 1"),
        pytest.param({"tp": (8, 2)}, id="TP 2 to 8, above the heads"),
        pytest.param({"tp": (3, 2), "model": (Layer("a", 6, 3, 5),)}, id="TP 2 to 3"),
        pytest.param({"pp": (1, 2)}, id="PP 2 to 1"),
        pytest.param({"pp": (3, 2), "tp": (2, 4)}, id="PP 2 to 3, TP 4 to 2"),
        pytest.param({"block": (16, 64), "tokens": range(48, 150)}, id="block size 64 to 16"),
        pytest.param({"block": (48, 32), "tokens": range(48, 150)}, id="block size 32 to 48"),
        pytest.param({"block": (4, 6), "tokens": range(8, 70)}, id="block size 6 to 4"),
        pytest.param({"per_entry": (4, 2)}, id="blocks per entry"),
        pytest.param({"orders": ("LB2NHC", "L2BHNC")}, id="K and V apart in two ways"),
        pytest.param({"orders": ("LBHT", "BHLNC")}, id="K transposed here"),
        pytest.param({"orders": ("BLNHC", "BHLT")}, id="K transposed there"),
        pytest.param({"model": ODD}, id="contents of any length"),
        pytest.param({"model": ODD, "orders": ("BLNHC", "LBHT"), "tp": (1, 2)}, id="odd, all"),
        pytest.param({"model": LATENT, "tp": (2, 4)}, id="one part"),
    ],
)
def test_classic_shapes_have_the_formula_s_digest_on_both_sides(changes: dict[str, Any]) -> None:
    assert check(classic(**changes))


def test_windows_are_digested_from_behind_the_last_absent_block() -> None:
    case = classic(model=WINDOWED[1:2], tokens=range(4, 70))
    tables = {"full": tuple(range(18)), "passed": (*[-1] * 15, 3, 1, 2)}
    groups = (
        CacheGroup(("a", "c"), Blocks(count=20, tokens=4), tables["passed"]),
        CacheGroup(("b",), Blocks(count=20, tokens=4), tables["full"]),
    )
    stages = (("a", "b", "c"),)
    decode = replace(case.decode, groups=groups, stages=stages)
    prefill = Cut(2, stages, ("BHLNC",), (groups[0], groups[1]))
    windowed = case._replace(model=WINDOWED, decode=decode, prefill=prefill)
    assert check(windowed) == 2
    begins = {e.layer: e.begin for wanted, _, _ in Both(windowed).pairs() for e in wanted}
    assert begins == {"a": 60, "b": 4, "c": 60}


def test_any_two_engines_have_the_same_digest() -> None:
    reads = 0

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=cases())
    def holds(case: Case) -> None:
        nonlocal reads
        reads += check(case)

    holds()
    assert reads > EXAMPLES


@pytest.mark.parametrize("step_bytes", [1, 40, 1000, 1 << 30])
def test_the_size_of_a_step_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, step_bytes: int
) -> None:
    _, here, _ = next(Both(classic(block=(4, 4), tokens=range(8, 150))).pairs())
    before, _ = run(digest.digest(Key(SECRET), here, window))
    monkeypatch.setattr(digest, "STEP_BYTES", step_bytes)
    after, steps = run(digest.digest(Key(SECRET), here, window))
    assert same(before, after)
    blocks_in_all = sum(len(strip.ids) for strip in here)
    assert steps == {1: blocks_in_all, 1 << 30: 0}.get(step_bytes, steps)


def test_short_strips_share_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else a short prompt of many layers would take a turn of the thread for each of them."""
    _, here, _ = next(Both(classic(block=(4, 4), tokens=range(8, 150))).pairs())
    num_bytes = sum(strip.num_bytes for strip in here)
    monkeypatch.setattr(digest, "STEP_BYTES", num_bytes // 3)
    _, steps = run(digest.digest(Key(SECRET), here, window))
    assert 1 <= steps <= 3 < len(here)


def test_digests_of_other_secrets_differ_in_every_row() -> None:
    _, here, _ = next(Both(classic()).pairs())
    one, two = made(here), made(here, SECRET[::-1])
    assert (one.rows != two.rows).all()
    assert (one.columns != two.columns).all()


# --- what the wire means


KNOWN: Final = "00112233445566778899aabbccddeeff"
KNOWN_NUMBERS: Final = [
    15459699162837532995,
    15403177402315845193,
    10850441494164078593,
    3317612666046739977,
]
KNOWN_TERMS: Final = [15629482282614546230, 13002214064190901368]
KNOWN_MIXED: Final = [0, 6238072747940578789, 13029008266876403067]
KNOWN_ROWS: Final = [
    3115666331459021287,
    16334773933194723791,
    14203212616071950918,
    11237888770489935927,
]
KNOWN_COLUMNS: Final = [17773966784058714653, 18006609157387819542]


def test_known_numbers() -> None:
    """As they were when the wire's version was 1: others are another protocol."""
    offset, step, multipliers = Key(KNOWN).numbers(2)
    assert [int(offset), int(step), *multipliers.tolist()] == KNOWN_NUMBERS
    content = np.arange(6, dtype=np.uint8)
    found = terms(KNOWN, np.array([0, 7]), np.stack([content, content + 250]))
    assert found.tolist() == KNOWN_TERMS
    assert digest.mix(np.array([0, 1, MASK], dtype=np.uint64)).tolist() == KNOWN_MIXED


def test_known_digest_of_a_cache() -> None:
    model = (Layer("a", 2, 6, 3),)
    case = classic(model=model, tokens=range(66))
    both = Both(case)
    for part, first in zip(both.whole["a"], (1, 100), strict=True):
        part[...] = (np.arange(part.size) * 7 + first).astype(np.uint8).reshape(part.shape)
    both.decode.write(both.whole)
    _, here, _ = next(both.pairs())
    got = made(here, KNOWN)
    assert got.rows.tolist() == KNOWN_ROWS
    assert got.columns.tolist() == KNOWN_COLUMNS


def test_the_last_word_is_padded_with_zeros() -> None:
    content = np.arange(1, 6, dtype=np.uint8)[None]
    padded = np.pad(content, [(0, 0), (0, 3)])
    position = np.array([3])
    assert terms(SECRET, position, content) == terms(SECRET, position, padded)


@given(st.integers(0, MASK))
def test_mix_is_a_bijection(value: int) -> None:
    got = int(digest.mix(np.array([value], dtype=np.uint64))[0])
    assert got == mixed(value)
    assert unmixed(got) == value
    assert mixed(unmixed(value)) == value


def test_positions_beyond_32_bits_of_products_wrap_as_the_formula_says() -> None:
    position, content = 2**31 - 1, bytes([255]) * 12
    got = terms(SECRET, np.array([position]), np.frombuffer(content, dtype=np.uint8)[None])
    assert got.tolist() == [formula(SECRET, position, content)]


@pytest.mark.parametrize(
    ("end", "tokens"),
    [(1, 64), (64, 64), (65, 64), (64 * 4096, 64), (64 * 4096 + 1, 128), (2**31, 2**19)],
)
def test_columns_become_longer_where_they_would_be_too_many(end: int, tokens: int) -> None:
    assert digest.column(end) == tokens
    assert -(-end // tokens) <= digest.MAX_COLUMNS


# --- faults


def small() -> Both:
    """Two layers of two heads, the tokens 60 to 66: two columns, a prefix hit, an end in a block.

    The parts are 1 and 6 bytes long.
    """
    model = (Layer("a", 2, 1, 6), Layer("b", 2, 1, 6))
    return Both(classic(model=model, tokens=range(60, 67), orders=("BHLNC", "LBNHC")))


FOUND = re.compile(
    r"(?P<part>\w+) of head (?P<head>\d+) of layer (?P<layer>\w+)( and (?P<more>\d+) more heads)? "
    r"(differs in tokens (?P<first>\d+) to (?P<last>\d+) .*|in no single place)"
)


def place_of(text: str | None) -> dict[str, str | None]:
    assert text is not None
    found = FOUND.fullmatch(text)
    assert found, text
    return found.groupdict()


def test_every_bit_is_seen_and_named() -> None:
    both = small()
    rank = both.decode.ranks[0]
    reads = [(here, made(there)) for _, here, there in both.pairs()]
    flipped = 0
    for layer in rank.layers:
        tokens = np.array(both.case.tokens)
        for part, offsets in zip("KV", rank.offsets(layer.name, tokens), strict=True):
            for (token, head, _), offset in np.ndenumerate(offsets):
                wanted = {"part": part, "head": str(head), "layer": layer.name, "more": None}
                edges = ("60", "63") if tokens[token] < 64 else ("64", "66")
                wanted |= {"first": edges[0], "last": edges[1]}
                for bit in range(8):
                    rank.memory[offset] ^= 1 << bit
                    told = [digest.difference(made(here), proof, here) for here, proof in reads]
                    rank.memory[offset] ^= 1 << bit
                    assert [place_of(text) for text in told if text] == [wanted]
                    flipped += 1
    assert flipped == 7 * 2 * 2 * 7 * 8


def test_no_byte_outside_matters() -> None:
    both = small()
    rank = both.decode.ranks[0]
    inside = np.zeros(len(rank.memory), dtype=bool)
    for layer in rank.layers:
        for offsets in rank.offsets(layer.name, np.array(both.case.tokens)):
            inside[offsets] = True
    before = [made(here) for _, here, _ in both.pairs()]
    rank.memory[~inside] ^= 0xFF
    after = [made(here) for _, here, _ in both.pairs()]
    assert all(map(same, before, after))
    assert (~inside).sum() > inside.sum()


def exchanged(array: np.ndarray, one: Any, two: Any) -> None:
    array[one], array[two] = array[two].copy(), array[one].copy()


def swap_tokens(whole: Dense) -> None:
    for part in whole["a"]:
        exchanged(part, 3, 9)


def swap_tokens_of_one_head(whole: Dense) -> None:
    exchanged(whole["a"][1], (3, 1), (4, 1))


def swap_blocks(whole: Dense) -> None:
    for parts in whole.values():
        for part in parts:
            exchanged(part, slice(0, 4), slice(8, 12))


def swap_heads(whole: Dense) -> None:
    exchanged(whole["a"][0], (slice(None), 0), (slice(None), 1))


def swap_layers(whole: Dense) -> None:
    for one, two in zip(whole["a"], whole["b"], strict=True):
        one[...], two[...] = two.copy(), one.copy()


def swap_parts(whole: Dense) -> None:
    key, value = whole["b"]
    key[...], value[...] = value.copy(), key.copy()


def shift_tokens(whole: Dense) -> None:
    whole["b"][0][1:, 3] = whole["b"][0][:-1, 3].copy()


def zero_a_token(whole: Dense) -> None:
    whole["c"][1][20, 2] = 0


def reverse_words(whole: Dense) -> None:
    """In one token the halves of each word change places."""
    whole["c"][0][5, 0] = np.roll(whole["c"][0][5, 0].reshape(-1, 4), 2, axis=1).reshape(-1)


def negate_a_head(whole: Dense) -> None:
    """The sign bits of 16-bit numbers."""
    whole["c"][1][:, 1, 1::2] ^= 0x80


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (swap_tokens, "K of head 0 of layer a and 7 more heads differs in tokens 0 to 20"),
        (swap_tokens_of_one_head, "V of head 1 of layer a differs in tokens 0 to 20"),
        (swap_blocks, "K of head 0 of layer a and 23 more heads"),
        (swap_heads, "K of head 0 of layer a and 1 more heads differs in tokens 0 to 20"),
        (swap_layers, "K of head 0 of layer a and 15 more heads differs in tokens 0 to 20"),
        (swap_parts, "K of head 0 of layer b and 7 more heads differs in tokens 0 to 20"),
        (shift_tokens, "K of head 3 of layer b differs in tokens 0 to 20"),
        (zero_a_token, "V of head 2 of layer c differs in tokens 0 to 20"),
        (reverse_words, "K of head 0 of layer c differs in tokens 0 to 20"),
        (negate_a_head, "V of head 1 of layer c differs in tokens 0 to 20"),
    ],
)
def test_what_changed_places_is_seen(fault: Callable[[Dense], None], named: str) -> None:
    model = [Layer(name, 4, 8, 8) for name in "abc"]
    both = Both(classic(model=model, orders=("BHLNC", "LBNHC")))
    fault(both.whole)
    both.decode.write(both.whole)
    told = [digest.difference(made(here), made(there), here) for _, here, there in both.pairs()]
    assert [str(text)[: len(named)] for text in told] == [named]


# --- as a statistician sees it


FAULTS_OF_EACH_KIND = 40_000
BATCH = 2_000
TOKENS, LENGTH = 6, 24


def two_sign_flips(rng: np.random.Generator, content: np.ndarray) -> None:
    """In one token: of all faults the one that the multipliers may hide most easily."""
    rows = np.arange(len(content))
    words = np.argsort(rng.random((len(content), LENGTH // 4)), axis=1)[:, :2]
    token = rng.integers(TOKENS, size=len(content))
    for word in words.T:
        content[rows, token, 4 * word + 3] ^= 0x80


def one_token_zeroed(rng: np.random.Generator, content: np.ndarray) -> None:
    content[np.arange(len(content)), rng.integers(TOKENS, size=len(content))] = 0


def shifted_by_one_token(rng: np.random.Generator, content: np.ndarray) -> None:
    del rng
    content[...] = np.roll(content, 1, axis=1)


def negated(rng: np.random.Generator, content: np.ndarray) -> None:
    del rng
    content[..., 1::2] ^= 0x80


def halves_of_a_word_exchanged(rng: np.random.Generator, content: np.ndarray) -> None:
    rows, token = np.arange(len(content)), rng.integers(TOKENS, size=len(content))
    word = 4 * rng.integers(LENGTH // 4, size=len(content))
    places = [(rows, token, word + byte) for byte in range(4)]
    exchanged(content, places[0], places[2])
    exchanged(content, places[1], places[3])


def two_words_exchanged(rng: np.random.Generator, content: np.ndarray) -> None:
    rows, token = np.arange(len(content)), rng.integers(TOKENS, size=len(content))
    for byte in range(4):
        exchanged(content, (rows, token, byte), (rows, token, byte + 8))


@pytest.mark.parametrize(
    "fault",
    [
        two_sign_flips,
        one_token_zeroed,
        shifted_by_one_token,
        negated,
        halves_of_a_word_exchanged,
        two_words_exchanged,
    ],
)
def test_no_structured_fault_of_many_is_missed(
    fault: Callable[[np.random.Generator, np.ndarray], None],
) -> None:
    rng, planted, missed = np.random.default_rng(11), 0, 0
    for batch in range(FAULTS_OF_EACH_KIND // BATCH):
        numbers = rng.standard_normal((BATCH, TOKENS, LENGTH // 2)).astype("<f2")
        content = numbers.view(np.uint8).reshape(BATCH, TOKENS, LENGTH)
        spoilt = content.copy()
        fault(rng, spoilt)
        differ = (spoilt != content).any(axis=(1, 2))
        secret, positions = f"{fault.__name__}/{batch}", np.arange(TOKENS)
        sums = [
            terms(secret, positions, one).sum(axis=1, dtype=np.uint64) for one in (content, spoilt)
        ]
        planted += int(differ.sum())
        missed += int((differ & (sums[0] == sums[1])).sum())
    assert planted > 0.99 * FAULTS_OF_EACH_KIND
    assert missed == 0


@pytest.mark.parametrize(("second", "hidden"), [(2**33 - 1, True), (2**33 + 1, False)])
def test_two_sign_flips_are_hidden_by_one_pair_of_multipliers_in_2_to_the_32(
    monkeypatch: pytest.MonkeyPatch, second: int, *, hidden: bool
) -> None:
    """The bound of the module's head is reached: where their sum is a multiple of 2^33."""
    multipliers = np.array([1, second], dtype=np.uint64)
    monkeypatch.setattr(Key, "numbers", lambda *_: (np.uint64(7), np.uint64(9), multipliers))
    content = np.zeros((2, 8), dtype=np.uint8)
    content[1, [3, 7]] = 0x80
    one, other = terms(SECRET, np.array([5, 5]), content)
    assert (one == other) is np.bool_(hidden)


def test_each_bit_of_the_content_changes_half_of_the_term() -> None:
    rng = np.random.default_rng(3)
    content = rng.integers(0, 256, (400, 8), dtype=np.uint8)
    positions = np.arange(400)
    before = terms(SECRET, positions, content)
    for bit in range(64):
        spoilt = content.copy()
        spoilt[:, bit // 8] ^= 1 << bit % 8
        changed = before ^ terms(SECRET, positions, spoilt)
        share = np.unpackbits(changed.view(np.uint8)).mean()
        assert abs(share - 0.5) < 0.02  # 6 sigma of 25,600 coins


# --- in words


def of(rows: Sequence[int], columns: Sequence[int]) -> Digest:
    return Digest(np.array(rows, dtype=np.uint64), np.array(columns, dtype=np.uint64))


def test_blocks_are_those_of_the_group_that_differs() -> None:
    """Block tables of other groups count other blocks."""
    model = (Layer("a", 1, 1, 0), Layer("b", 1, 1, 0))
    case = classic(model=model, tokens=range(128))
    groups = (
        CacheGroup(("a",), Blocks(count=8, tokens=16), tuple(range(8))),
        CacheGroup(("b",), Blocks(count=32, tokens=4), tuple(range(32))),
    )
    both = Both(case._replace(decode=replace(case.decode, groups=groups)))
    _, here, _ = next(both.pairs())
    told = digest.difference(of([1, 2], [5, 6]), of([1, 9], [5, 9]), here)
    assert told == (
        "KV of head 0 of layer b differs in tokens 64 to 127 "
        "(blocks 16 to 31 of the request; 1 of 2 columns of 64 tokens)"
    )


@pytest.fixture(scope="module")
def found() -> list[Strip]:
    """Four rows, 300 tokens in blocks of 4."""
    case = classic(model=(Layer("a", 2, 1, 1),), tokens=range(300))
    return next(Both(case).pairs())[1]


@pytest.mark.parametrize(
    ("mine", "theirs", "told"),
    [
        (([1, 2, 3, 4], [5] * 5), ([1, 2, 3, 4], [5] * 5), None),
        (
            ([1, 2, 3, 4], [5] * 5),
            ([1, 2, 3], [5] * 5),
            "digests of (4, 5) heads and columns here and (3, 5) there",
        ),
        (
            ([1, 2, 3, 4], [5] * 5),
            ([1, 2, 3, 4], []),
            "digests of (4, 5) heads and columns here and (4, 0) there",
        ),
        (
            ([1, 2, 3, 4], [5, 5, 5, 5, 5]),
            ([1, 9, 3, 4], [5, 5, 9, 5, 5]),
            (
                "K of head 1 of layer a differs in tokens 128 to 191 "
                "(blocks 32 to 47 of the request; 1 of 5 columns of 64 tokens)"
            ),
        ),
        (
            ([1, 2, 3, 4], [5, 5, 5, 5, 5]),
            ([1, 2, 9, 9], [5, 9, 5, 5, 9]),
            (
                "V of head 0 of layer a and 1 more heads differs in tokens 64 to 299 "
                "(blocks 16 to 74 of the request; 2 of 5 columns of 64 tokens)"
            ),
        ),
        (
            ([9, 9, 9, 9], [5] * 5),
            ([1, 2, 3, 4], [5] * 5),
            "K of head 0 of layer a and 3 more heads in no single place",
        ),
        (
            ([1, 2, 3, 4], [9, 5, 5, 5, 5]),
            ([1, 2, 3, 4], [5, 5, 5, 5, 5]),
            (
                "no single head differs in tokens 0 to 63 "
                "(blocks 0 to 15 of the request; 1 of 5 columns of 64 tokens)"
            ),
        ),
    ],
)
def test_differences_are_told_in_words(
    found: list[Strip],
    mine: tuple[list[int], list[int]],
    theirs: tuple[list[int], list[int]],
    told: str | None,
) -> None:
    assert digest.difference(of(*mine), of(*theirs), found) == told
