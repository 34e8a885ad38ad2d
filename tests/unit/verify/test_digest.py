"""The digest is that of its formula in plain integers, however two engines are divided.

With TRITON_INTERPRET=1 the kernel for GPUs computes it too, of this process's memory (slowly;
test_gpu.py does that).

NIXL_KV_EXAMPLES and NIXL_KV_SEED are those of test_any_shape.py.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings

from nixl_kv.geometry.layout import extent
from nixl_kv.geometry.match import routes
from nixl_kv.ids import Rank
from nixl_kv.protocol.events import StartLoad
from nixl_kv.protocol.messages import KVSlice
from nixl_kv.verify import digest
from nixl_kv.verify.digest import Digest, Digester, describe_difference
from nixl_kv.verify.slices import LocalSlice, find_slices, name_slices
from support import any_shape
from support.cases import Case, cases, typical
from support.digest_caches import SECRET, is_equal, reference, window
from support.oracle import Blocks, CacheGroup, Dense, Layer
from support.records import D1
from support.seeds import seed_or

EXAMPLES = int(os.environ.get("NIXL_KV_EXAMPLES", "20"))
SEED = seed_or(1)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MASK = 2**64 - 1


# --- the formula in plain integers


@cache
def number_of(secret: str, index: int) -> int:
    stream = hashlib.shake_256(secret.encode()).digest(8 * (index + 1))
    return int.from_bytes(stream[-8:], "little") | 1


def mix(value: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> shift) * factor & MASK
    return value ^ value >> 31


def formula(secret: str, position: int, content: bytes) -> int:
    total = number_of(secret, 0) + number_of(secret, 1) * position
    for index in range(0, len(content), 4):
        word = int.from_bytes(content[index : index + 4].ljust(4, b"\0"), "little")
        total += number_of(secret, 2 + index // 4) * word
    return mix(total & MASK)


def tokens_of(kv: KVSlice, end: int) -> list[int]:
    return [
        token
        for token in range(kv.begin, end)
        if all(token // s.width % s.count == s.place for s in kv.stripes)
    ]


def expected_sums(
    dense: Dense, slices: Sequence[KVSlice], end: int, size: int
) -> tuple[list[int], list[int]]:
    """Rows and columns from the dense arrays, for columns of `size` tokens."""
    rows: list[int] = []
    columns = [0] * -(-end // size)
    for kv in slices:
        for part in dense[kv.layer]:
            for head in range(kv.first_head, kv.end_head):
                row = 0
                for token in tokens_of(kv, end):
                    term = formula(SECRET, token, part[token, head].tobytes())
                    row += term
                    columns[token // size] += (2 * len(rows) + 1) * term
                rows.append(row & MASK)
    return rows, [total & MASK for total in columns]


# --- both sides


def num_steps(slices: Sequence[LocalSlice]) -> int:
    return sum(1 for _ in Digester()(SECRET, slices))


def kernel_digest_of(slices: Sequence[LocalSlice]) -> Digest:
    """The digest by the kernel, through one tensor that covers all slices."""
    torch, gpu = (pytest.importorskip(name) for name in ("torch", "nixl_kv.verify.gpu"))
    begin = min(local.region.base for local in slices) // 4 * 4
    end = max(local.region.base + extent(local.region, local.group) for local in slices)
    view = torch.from_numpy(window(begin, -(-(end - begin) // 4) * 4))
    groups = {local.table_number: local.group for local in slices}
    filled = [groups.get(number, slices[0].group) for number in range(max(groups) + 1)]
    *_, sums = gpu.KernelDigester(view, begin, filled).launch(SECRET, slices)
    return Digest(*(one.numpy().view(np.uint64) for one in sums))


class Pair(any_shape.Pair):
    """Prefill and decode with the same KV where decode reads it, and different noise elsewhere."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.decode.write(self.dense)
        # Tokens after the end are noise, and in decode those before the beginning too.
        rng = np.random.default_rng(case.seed)
        for engine, begin in ((self.prefill, 0), (self.decode, case.tokens.start)):
            for rank in engine.ranks:
                for layer in rank.layers:
                    present = rank.present(layer.name)
                    other = present[(present >= case.tokens.stop) | (present < begin)]
                    for offsets in rank.offsets(layer.name, other) if len(other) else ():
                        rank.memory[offsets] = rng.integers(0, 256, offsets.shape, dtype=np.uint8)

    def reads(self) -> Iterator[tuple[tuple[KVSlice, ...], list[LocalSlice], list[LocalSlice]]]:
        """For each read of decode: its slices, and where they are on both sides."""
        start, end = self.case.tokens.start, self.case.tokens.stop
        tables, remote_tables = self.tables()
        for number, rank in enumerate(self.decode.ranks):
            for route in routes(Rank(number), *self.held):
                if not route.readers:
                    continue
                remote = self.prefill.ranks[route.remote_rank].layout
                load = StartLoad(D1, start, end, tuple(tables))
                slices = name_slices(rank.layout, route, remote, load)
                if slices:
                    yield (
                        slices,
                        find_slices(rank.layout, slices, tables, end=end),
                        find_slices(remote, slices, remote_tables, end=end),
                    )

    def first_read(self) -> list[LocalSlice]:
        """Where the slices of the first read are on decode."""
        return next(self.reads())[1]


def check(case: Case) -> int:
    """Both sides' digests of all reads match the formula. Returns the number of reads."""
    pair, count = Pair(case), 0
    for slices, local, remote in pair.reads():
        rows, columns = expected_sums(pair.dense, slices, case.tokens.stop, 64)
        programs = (reference, kernel_digest_of) if INTERPRETED else (reference,)
        digests = [program(side) for side in (local, remote) for program in programs]
        for made in digests:
            assert (made.rows.tolist(), made.columns.tolist()) == (rows, columns)
        assert describe_difference(digests[0], digests[-1], local) is None
        count += 1
    return count


ODD = (Layer("a", 4, 5, 7), Layer("b", 4, 1, 13), Layer("c", 4, 16, 6))
LATENT = (Layer("a", 1, 9, 0), Layer("b", 1, 18, 0))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"tp": (8, 2)}, id="TP 2 to 8, above the heads"),
        pytest.param({"block": (48, 32), "tokens": range(48, 150)}, id="block size 32 to 48"),
        pytest.param({"orders": ("LB2NHC", "L2BHNC")}, id="K and V apart in two ways"),
        pytest.param(
            {"model": ODD, "orders": ("BLNHC", "LBHT"), "tp": (1, 2)},
            id="content of any length, TP 2 to 1, K transposed on prefill",
        ),
        pytest.param(
            {"model": LATENT, "tp": (4, 2), "stripes": ((4, 2), (2, 4)), "tokens": range(16, 99)},
            id="tokens divided on both",
        ),
    ],
)
def test_typical_engines_have_the_digest_of_the_formula(changes: dict[str, Any]) -> None:
    assert check(typical(**changes))


def test_any_two_engines_have_the_digest_of_the_formula() -> None:
    reads = 0

    @seed(SEED)
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(case=cases())
    def check_and_count(case: Case) -> None:
        nonlocal reads
        reads += check(case)

    check_and_count()
    assert reads > EXAMPLES


@pytest.mark.parametrize("step_bytes", [1, 40, 1000, 1 << 30])
def test_the_digest_does_not_depend_on_the_size_of_a_step(
    monkeypatch: pytest.MonkeyPatch, step_bytes: int
) -> None:
    slices = Pair(typical(tokens=range(8, 150))).first_read()
    before = reference(slices)
    monkeypatch.setattr(digest, "STEP_BYTES", step_bytes)
    assert is_equal(before, reference(slices))
    num_blocks = sum(len(kv.ids) for kv in slices)
    steps = num_steps(slices)
    assert steps == {1: num_blocks + 1, 1 << 30: 1}.get(step_bytes, steps)


# --- part of the wire protocol


KNOWN: Final = "00112233445566778899aabbccddeeff"
KNOWN_ROWS: Final = [
    3115666331459021287,
    16334773933194723791,
    14203212616071950918,
    11237888770489935927,
]
KNOWN_COLUMNS: Final = [17773966784058714653, 18006609157387819542]


def test_the_digest_of_a_cache_has_the_values_of_the_wire_protocol() -> None:
    pair = Pair(typical(model=(Layer("a", 2, 6, 3),), tokens=range(66)))
    for part, first in zip(pair.dense["a"], (1, 100), strict=True):
        part[...] = (np.arange(part.size) * 7 + first).astype(np.uint8).reshape(part.shape)
    pair.decode.write(pair.dense)
    sums = reference(pair.first_read(), KNOWN)
    assert sums.rows.tolist() == KNOWN_ROWS
    assert sums.columns.tolist() == KNOWN_COLUMNS


@pytest.mark.parametrize(
    ("end", "tokens"),
    [(1, 64), (64, 64), (65, 64), (64 * 4096, 64), (64 * 4096 + 1, 128), (2**31, 2**19)],
    ids=str,
)
def test_columns_are_longer_where_they_would_be_too_many(end: int, tokens: int) -> None:
    assert digest.column_tokens(end) == tokens
    assert digest.num_columns(end) == -(-end // tokens) <= digest.MAX_COLUMNS


# --- faults


def test_a_flipped_bit_of_any_byte_is_detected_and_named() -> None:
    """Two columns, a prefix hit, an end inside a block; parts of 1 and 6 bytes."""
    model = (Layer("a", 2, 1, 6), Layer("b", 2, 1, 6))
    pair = Pair(typical(model=model, tokens=range(60, 67), orders=("BHLNC", "LBNHC")))
    rank = pair.decode.ranks[0]
    reads = [(local, reference(remote)) for _, local, remote in pair.reads()]
    flipped = 0
    for layer in rank.layers:
        tokens = np.array(pair.case.tokens)
        for part, offsets in zip("KV", rank.offsets(layer.name, tokens), strict=True):
            for (token, head, _), offset in np.ndenumerate(offsets):
                first, last = (60, 63) if tokens[token] < 64 else (64, 66)
                place = f"{part} of head {head} of layer {layer.name} differs in tokens"
                for bit in (0, 7):
                    rank.memory[offset] ^= 1 << bit
                    texts = [describe_difference(reference(kv), proof, kv) for kv, proof in reads]
                    rank.memory[offset] ^= 1 << bit
                    (text,) = filter(None, texts)
                    assert text.startswith(f"{place} {first} to {last} ")
                    flipped += 1
    assert flipped == 7 * 2 * 2 * 7 * 2


# --- descriptions of differences


def make_digest(rows: Sequence[int], columns: Sequence[int]) -> Digest:
    return Digest(np.array(rows, dtype=np.uint64), np.array(columns, dtype=np.uint64))


def test_a_description_counts_blocks_of_the_group_that_differs() -> None:
    """Groups may have blocks of different sizes."""
    model = (Layer("a", 1, 1, 0), Layer("b", 1, 1, 0))
    case = typical(model=model, tokens=range(128))
    groups = (
        CacheGroup(("a",), Blocks(count=8, tokens=16), tuple(range(8))),
        CacheGroup(("b",), Blocks(count=32, tokens=4), tuple(range(32))),
    )
    pair = Pair(case._replace(decode=replace(case.decode, groups=groups)))
    digests = make_digest([1, 2], [5, 6]), make_digest([1, 9], [5, 9])
    assert describe_difference(*digests, pair.first_read()) == (
        "KV of head 0 of layer b differs in tokens 64 to 127 "
        "(blocks 16 to 31 of the request; 1 of 2 columns of 64 tokens)"
    )


NO_SIZE = "digests of (4, 5) heads and columns here and"


@pytest.mark.parametrize(
    ("rows", "columns", "words", "blocks"),
    [
        ([1, 2, 3], [5] * 5, f"{NO_SIZE} (3, 5) there", ""),
        ([1, 2, 3, 4], [], f"{NO_SIZE} (4, 0) there", ""),
        ([9, 8, 7, 6], [5] * 5, "K of head 0 of layer a and 3 more heads in no single place", ""),
        (
            *([1, 9, 3, 4], [5, 5, 9, 5, 5], "K of head 1 of layer a differs in tokens 128 to 191"),
            "32 to 47 of the request; 1",
        ),
        (
            *([1, 2, 9, 9], [5, 9, 5, 5, 9]),
            "V of head 0 of layer a and 1 more heads differs in tokens 64 to 299",
            "16 to 74 of the request; 2",
        ),
        (
            *([1, 2, 3, 4], [9, 5, 5, 5, 5], "no single head differs in tokens 0 to 63"),
            "0 to 15 of the request; 1",
        ),
    ],
)
def test_a_description_names_heads_tokens_and_blocks(
    rows: list[int], columns: list[int], words: str, blocks: str
) -> None:
    """Four rows, 300 tokens in blocks of 4."""
    pair = Pair(typical(model=(Layer("a", 2, 1, 1),), tokens=range(300)))
    local, remote = make_digest([1, 2, 3, 4], [5] * 5), make_digest(rows, columns)
    expected = words + (f" (blocks {blocks} of 5 columns of 64 tokens)" if blocks else "")
    assert describe_difference(local, remote, pair.first_read()) == expected
    assert describe_difference(local, local, pair.first_read()) is None
