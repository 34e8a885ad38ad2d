"""The GPUs that this process sees."""

import os
from typing import Final

import pytest
import torch

NUM_GPUS: Final = torch.cuda.device_count()


def needs_gpus(count: int) -> list[pytest.MarkDecorator]:
    """The marks of a module whose tests need as many."""
    reason = "needs a CUDA GPU" if count == 1 else f"needs {count} CUDA GPUs"
    return [pytest.mark.gpu, pytest.mark.skipif(count > NUM_GPUS, reason=reason)]


def visible(*numbers: int) -> dict[str, str]:
    """The environment of a child process that sees these of them alone."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(each) for each in range(max(numbers) + 1)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[each] for each in numbers)}
