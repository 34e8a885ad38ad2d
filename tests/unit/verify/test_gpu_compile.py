"""The kernels, compiled for a GPU that need not be here: they can be, and no register is spilled.

It is the Triton of this environment, which may be another one than beside a GPU.
"""

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

HOPPER = 90
NUM_REGISTERS = 65536
"""Of a processor, which a program's threads share."""


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


def test_what_copies_keeps_all_in_registers(tmp_path: Path) -> None:
    """And takes 16 bytes in one access."""
    from nixl_kv.reading.copying import kernel as gpu_copy  # noqa: PLC0415 - Triton

    types = dict.fromkeys(("numbers", "rows"), "*i64")
    types |= dict.fromkeys(("num_jobs", "num_tiles"), "i32")
    units, num_warps = gpu_copy.TILE_BYTES // 16, gpu_copy.NUM_WARPS
    kernel = compiled(gpu_copy._copy, types, (16, units), num_warps)
    used = resources(kernel, tmp_path)
    assert used["STACK"] == 0
    assert used["REG"] * num_warps * 32 <= NUM_REGISTERS
    stores = re.findall(r"st\.global\.v2\.b64", kernel.asm["ptx"])
    assert len(stores) == units // num_warps // 32


@pytest.mark.parametrize(
    "cut", [(64, 64, 64, 16, False), (64, 64, 64, 16, True), (1, 0, 1024, 16, False)]
)
def test_what_digests_keeps_all_in_registers(cut: tuple[int, ...], tmp_path: Path) -> None:
    from nixl_kv.verify import gpu as gpu_digests  # noqa: PLC0415 - Triton

    types = {"numbers": "*i64", "first_row": "i32", "first_tile": "i32", "num_tiles": "i32"}
    kernel = compiled(gpu_digests._digest, types, cut, 4 if cut[1] == gpu_digests.LOOPED else 2)
    assert resources(kernel, tmp_path)["STACK"] == 0
