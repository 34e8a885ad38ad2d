"""Dynamo's worker of vLLM, on a machine without torchvision; an environment with Dynamo runs it.

Dynamo imports vLLM's code for images, which imports torchvision. PyPI has no build of that for
vLLM's CPU build, so mocks replace it while it is imported. No text needs it.
"""

import importlib
import importlib.machinery
import runpy
import sys
from unittest import mock

from transformers.utils.import_utils import is_torchvision_available

NAMES = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)

if __name__ == "__main__":  # vLLM's processes import this file, too
    if not is_torchvision_available():  # it remembers this answer
        for name in NAMES:
            spec = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = mock.MagicMock(__name__=name, __spec__=spec)
        importlib.import_module("transformers.models.qwen2_vl.image_processing_qwen2_vl")
        for name in NAMES:
            del sys.modules[name]
    runpy.run_module("dynamo.vllm", run_name="__main__")
