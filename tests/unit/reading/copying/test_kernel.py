"""The kernel that copies runs, by Triton's interpreter: it moves what a plan says, and no more.

What it digests meanwhile is prefill's digest.
"""

import contextlib
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def test_the_kernel_moves_the_bytes_of_a_plan() -> None:
    """In a process of its own: Triton asks for the interpreter when a kernel is defined."""
    ended = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{TESTS.parent}:{TESTS}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    names = (*CASES, *DIGESTED, "reads in turn")
    assert ended.stdout.splitlines() == [f"{name}: right" for name in names]


CASES: dict[str, dict[str, Any]] = {
    "equal ranks, whole blocks": {"orders": ("BHLNC", "BHLNC")},
    "two ranks read from one": {"tp": (2, 1)},
    "block size 6 to 4": {"block": (4, 6), "orders": ("BHLNC", "LBNHC")},
    "K transposed": {"tp": (2, 1), "orders": ("LBHT", "BHLNC")},
}


DIGESTED: dict[str, dict[str, Any]] = {
    "digested, whole blocks": {"orders": ("BHLNC", "BHLNC")},
    "digested, two ranks from one, a hit": {"tp": (2, 1), "tokens": range(4, 21)},
    "digested, block size 64 to 16": {"block": (16, 64), "tokens": range(32, 190)},
    "digested, one unit a token": {"size": 16, "orders": ("L2BNHC", "BLHNC")},
    "digested, columns of 128 tokens": {
        "model": ("a", 1),
        "size": 16,
        "block": (64, 16),
        "tokens": range(262_080, 264_001),
    },
    "digested, 4 KiB a token": {"size": 4096, "tokens": range(9), "tp": (1, 4)},
}


def main() -> None:
    """Copy each case's KV with the kernel, all ranks."""
    copy_all()
    digest_all()
    read_in_turn()


def digested_pair(changes: dict[str, Any]) -> Any:
    """Of a case."""
    from support.cases import typical  # noqa: PLC0415 - as below
    from support.digested import DigestedPair  # noqa: PLC0415
    from support.oracle import Layer  # noqa: PLC0415

    others = dict(changes)
    size, (names, heads) = others.pop("size", 64), others.pop("model", ("abc", 4))
    model = tuple(Layer(name, heads, size, size) for name in names)
    return DigestedPair(typical(model=model, **others))


def digest_all() -> None:
    """Of each case all reads, by the kernel and by the reference on prefill's memory."""
    import torch  # noqa: PLC0415 - only here

    from nixl_kv.reading.copying import kernel as gpu_copy  # noqa: PLC0415
    from support.digested import digest_of, is_equal  # noqa: PLC0415

    for name, changes in DIGESTED.items():
        for read in digested_pair(changes).reads():
            (launch,) = read.tiling.launches(read.pieces, gpu_copy.TILE_BYTES)
            digest_input = read.contents.request(*read.local, read.pieces, launch)
            expected = digest_of(*read.remote)
            numbers, rows, sums = map(
                torch.from_numpy, (launch.numbers, read.contents.numbers, digest_input.numbers)
            )
            gpu_copy.launch_copy(launch, numbers, rows, (sums, read.contents.size))
            assert is_equal(digest_input.digest(sums.numpy()), expected)
            assert is_equal(digest_of(*read.local), expected), "copied elsewhere"
        print(f"{name}: right")  # noqa: T201


class Event:
    """Of a stream whose work is done when it is ordered."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


class Stream:
    """Of the host."""

    device = "cpu"

    def __init__(self, _: int) -> None: ...

    def synchronize(self) -> None: ...


def read_in_turn() -> None:
    """By a stream, some at a time, with and without a digest: their buffers are used again."""
    import torch  # noqa: PLC0415 - only here

    empty = torch.empty

    def unpinned(*shape: int, pin_memory: bool = False, **kind: Any) -> torch.Tensor:
        del pin_memory
        return empty(*shape, **kind)

    torch.empty = unpinned  # type: ignore[assignment]
    torch.cuda.Event, torch.cuda.Stream = Event, Stream  # type: ignore[assignment,misc]
    torch.cuda.stream = torch.cuda.device = lambda _: contextlib.nullcontext()  # type: ignore[assignment,misc]
    from nixl_kv.reading.copying.kernel import TILE_BYTES, KernelStream  # noqa: PLC0415
    from support.digested import digest_of, is_equal  # noqa: PLC0415

    some: tuple[dict[str, Any], ...] = (
        {},
        {"tp": (2, 1)},
        {"block": (64, 16), "tokens": range(64, 200)},
    )
    long = {"model": ("a", 1), "tokens": range(20_000)}
    reads = [read for changes in (*some, long) for read in digested_pair(changes).reads()]
    stream, choose = KernelStream(0, 64), np.random.default_rng(1)
    under_way: list[Any] = []
    ended = []
    for number in range(40):
        read, is_digested = reads[choose.integers(len(reads))], choose.random() < 0.7
        launches = read.tiling.launches(read.pieces, TILE_BYTES)
        digested = read.contents.request(*read.local, read.pieces, launches[0]), 64
        rows = torch.from_numpy(read.contents.numbers)
        copy = stream.copy(launches, rows, digested if is_digested else None)
        under_way.append((read, copy, is_digested))
        while len(under_way) > (3 if number < 39 else 0):
            one = under_way.pop(choose.integers(len(under_way)))
            assert stream.has_ended(one[1], "copying")
            ended.append(one)
    for read, copy, is_digested in ended:
        assert (copy.digest is not None) == is_digested
        assert copy.digest is None or is_equal(copy.digest, digest_of(*read.remote))
    print("reads in turn: right")  # noqa: T201


def copy_all() -> None:
    """Of each case."""
    import torch  # noqa: PLC0415 - only here

    from nixl_kv.geometry.match import routes  # noqa: PLC0415
    from nixl_kv.geometry.plan import plan  # noqa: PLC0415
    from nixl_kv.ids import Rank  # noqa: PLC0415
    from nixl_kv.reading.copying import kernel as gpu_copy  # noqa: PLC0415
    from nixl_kv.reading.copying.tiles import Tiling  # noqa: PLC0415
    from support.cases import typical  # noqa: PLC0415
    from support.oracle import Layer  # noqa: PLC0415

    sys.path.insert(0, str(TESTS / "unit" / "geometry"))
    make_pair = importlib.import_module("test_any_shape").Pair
    even = tuple(Layer(name, 4, 6, 4) for name in "abc")
    for name, changes in CASES.items():
        pair = make_pair(typical(**{"model": even} | changes))
        for number, local in enumerate(pair.decode.ranks):
            copied = 0
            for route in routes(Rank(number), *pair.held):
                if route.readers:
                    remote = pair.prefill.ranks[route.remote_rank]
                    planned = plan(local.layout, remote.layout, route.share)
                    local_tables, remote_tables = pair.tables()
                    pieces = planned.pieces(local_tables, remote_tables, pair.case.tokens)
                    tiling = Tiling(planned, lambda first, _: first)
                    for launch in tiling.launches(pieces, gpu_copy.TILE_BYTES):
                        numbers = torch.from_numpy(launch.numbers)
                        gpu_copy.launch_copy(launch, numbers, torch.from_numpy(tiling.rows))
                    copied += planned.num_bytes(pieces)
            pair.check_memory(number, copied)
        print(f"{name}: right")  # noqa: T201


if __name__ == "__main__":
    main()
