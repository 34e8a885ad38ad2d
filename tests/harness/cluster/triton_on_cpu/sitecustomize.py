"""Lets Triton's interpreter stand for a CPU backend, which the V2 model runner needs.

Python imports this file at its start where PYTHONPATH names its folder. TRITON_INTERPRET must be 1.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton.backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver


class CpuDriver(DriverBase):  # type: ignore[misc]
    """The device that vLLM and Triton see while kernels are interpreted."""

    def __init__(self) -> None:
        """There is nothing to load."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """All configurations of a kernel are equally good."""

        def run(kernel: Callable[[], Any], **_: Any) -> list[float]:
            kernel()
            return [0.0, 0.0, 0.0]

        return run

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:  # noqa: ARG002 - Triton's
        return 0

    def get_device_interface(self) -> Any:
        return torch.cpu


triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=CpuDriver)
driver.set_active(CpuDriver())
