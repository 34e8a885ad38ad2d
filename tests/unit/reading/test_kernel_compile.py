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
