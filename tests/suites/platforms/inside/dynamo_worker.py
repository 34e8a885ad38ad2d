"""Dynamo's worker of vLLM, on a machine without torchvision; run by an environment that has Dynamo.

Dynamo imports what is for images, which wants torchvision, of which there is no build for vLLM's
CPU build. So while that is imported, something stands in for it.
"""

import importlib
import importlib.machinery
import runpy
import sys
from typing import Final
from unittest import mock

from transformers.utils.import_utils import is_torchvision_available

NAMES: Final = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)
WANTS_IT: Final = "transformers.models.qwen2_vl.image_processing_qwen2_vl"


def import_without_torchvision() -> None:
    """What is imported here is never called for text."""
    if is_torchvision_available():  # asked once: the answer is kept
        return
    for name in NAMES:
        spec = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = mock.MagicMock(__name__=name, __spec__=spec)
    importlib.import_module(WANTS_IT)
    for name in NAMES:
        del sys.modules[name]


if __name__ == "__main__":
    import_without_torchvision()
    runpy.run_module("dynamo.vllm", run_name="__main__")
