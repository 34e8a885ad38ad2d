"""Lets vLLM serve pictures without torchvision, of which no build fits vLLM's CPU build.

Python imports this file at its start if PYTHONPATH names its folder. vLLM and transformers import
torchvision beside their code for pictures, but Pillow decodes and resizes those of tiny models.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Final
from unittest import mock

ASKING: Final = ("_is_package_available", "is_torchvision_available")
"""Functions of transformers that must learn that torchvision is missing."""


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds mocks for torchvision. It is the last finder, so an installed torchvision wins."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] != "torchvision" or _is_asked_by(ASKING):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = mock.MagicMock(__name__=spec.name, __spec__=spec, __version__="0.0.0")
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """A mock has all names."""


def _is_asked_by(names: Sequence[str]) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name not in names:
        frame = frame.f_back
    return frame is not None


sys.meta_path.append(Finder())
