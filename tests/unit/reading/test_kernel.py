"""The kernel that copies runs: by Triton's interpreter, and compiled for a GPU.

It moves the bytes of a plan, and no more; and it spills no register. This needs no GPU. Triton is
that of this environment, which may differ from the one beside a GPU.
"""

import contextlib
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from nixl_kv.geometry.match import routes
from nixl_kv.geometry.plan import Pieces, Plan, plan
from nixl_kv.ids import Rank
from nixl_kv.reading.tiles import Tiling
from support.any_shape import Pair
from support.cases import typical
from support.oracle import Layer

TESTS = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@pytest.mark.slow
def test_the_kernel_moves_the_bytes_of_a_plan() -> None:
    """In a process of its own: Triton asks for the interpreter when a kernel is defined."""
    path = os.pathsep.join(map(str, (TESTS.parent, TESTS.parent / "scripts", TESTS)))
    ended = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (ended.returncode, ended.stdout) == (0, "right\n"), ended.stderr[-2000:]


CASES: tuple[dict[str, Any], ...] = (
    {},
    {"orders": ("BHLNC", "BHLNC")},  # whole blocks
    {"tp": (2, 1)},
    {"block": (64, 16), "tokens": range(64, 200)},
    {"block": (4, 6), "orders": ("BHLNC", "LBNHC")},
    {"tp": (2, 1), "orders": ("LBHT", "BHLNC")},
    {"tokens": range(20_000)},
)


def main() -> None:
    """Do the reads of all cases on a stream, several at a time: their buffers are used again."""
    import torch  # noqa: PLC0415 - only here

    empty = torch.empty

    def unpinned(*shape: int, pin_memory: bool = False, **kind: Any) -> torch.Tensor:
        del pin_memory
        return empty(*shape, **kind)

    torch.empty = unpinned  # type: ignore[assignment]
    torch.cuda.Event = Mock  # type: ignore[misc,assignment] # all is done when it is ordered
    torch.cuda.Stream = Mock(return_value=Mock(device="cpu"))  # type: ignore[misc]
    torch.cuda.stream = torch.cuda.device = lambda _: contextlib.nullcontext()  # type: ignore[assignment,misc]
    from nixl_kv.reading.kernel import KernelPlan, KernelStream  # noqa: PLC0415

    reads = [read for changes in CASES for read in reads_of(changes)]
    stream, choose = KernelStream(0), np.random.default_rng(1)
    order = [reads[n] for n in np.concatenate([choose.permutation(len(reads)) for _ in range(6)])]
    under_way: list[Any] = []
    for number, (_, _, planned, pieces) in enumerate(order):
        tiling = Tiling(planned, lambda first, _: first)
        prepared = KernelPlan(tiling, torch.from_numpy(tiling.rows))
        under_way.append(stream.start(prepared, pieces))
        while len(under_way) > (3 if number < len(order) - 1 else 0):
            assert stream.poll(under_way.pop(choose.integers(len(under_way))))
    copied: defaultdict[tuple[Pair, int], int] = defaultdict(int)
    for pair, rank, planned, pieces in reads:
        copied[pair, rank] += planned.num_bytes(pieces)
    for (pair, rank), num_bytes in copied.items():
        pair.check_memory(rank, num_bytes)
    print("right")


def reads_of(changes: dict[str, Any]) -> Iterator[tuple[Pair, int, Plan, tuple[Pieces, ...]]]:
    """The reads of a case: the pair, decode's rank, the plan and its pieces."""
    even = tuple(Layer(name, 4, 6, 4) for name in "abc")
    pair = Pair(typical(**{"model": even} | changes))
    for number, local in enumerate(pair.decode.ranks):
        for route in routes(Rank(number), *pair.held):
            if route.readers:
                remote = pair.prefill.ranks[route.remote_rank]
                planned = plan(local.layout, remote.layout, route.share)
                pieces = planned.pieces(*pair.tables(), pair.case.tokens)
                yield pair, number, planned, pieces


HOPPER = 90
NUM_REGISTERS = 65536
"""A processor has them, and a program's threads share them."""


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # unset, some versions warn


def resources(kernel: Any, tmp_path: Path) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack, as the assembler says."""
    tools = Path(importlib.import_module("triton").__file__ or "").parent / "backends/nvidia/bin"
    path = tmp_path / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    said = subprocess.run(
        [tools / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True
    )
    found = re.findall(r"(REG|STACK):(\d+)", said.stdout + said.stderr)
    return {name: int(number) for name, number in found}


def compiled(function: Any, types: dict[str, str], cut: object, num_warps: int) -> Any:
    from triton import compile as compile_kernel  # type: ignore[attr-defined]  # noqa: PLC0415
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    pointers = [number for number, kind in enumerate(types.values()) if kind == "*i64"]
    aligned = {(number,): [["tt.divisibility", 16]] for number in pointers}
    source = ASTSource(function, types | {"cut": "constexpr"}, {(len(types),): cut}, aligned)
    return compile_kernel(source, GPUTarget("cuda", HOPPER, 32), {"num_warps": num_warps})


def test_a_copy_keeps_all_in_registers(tmp_path: Path) -> None:
    """Fails if registers do not fit, or 16 bytes are not one access."""
    from nixl_kv.reading import kernel as gpu_copy  # noqa: PLC0415 - Triton

    types = dict.fromkeys(("numbers", "rows"), "*i64")
    types |= dict.fromkeys(("num_jobs", "num_tiles"), "i32")
    units = gpu_copy.TILE_BYTES // 16
    kernel = compiled(gpu_copy._copy, types, (16, units), gpu_copy.NUM_WARPS)
    used = resources(kernel, tmp_path)
    assert used["STACK"] == 0
    assert used["REG"] * gpu_copy.NUM_WARPS * 32 <= NUM_REGISTERS
    stores = re.findall(r"st\.global\.v2\.b64", kernel.asm["ptx"])
    assert len(stores) == units // gpu_copy.NUM_WARPS // 32


if __name__ == "__main__":
    main()
