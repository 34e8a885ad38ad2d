"""Lets vLLM serve DeepSeek-V4 on CPU: Triton's interpreter, and repairs of vLLM.

Python imports this file at its start where PYTHONPATH names its folder. TRITON_INTERPRET must be 1.
"""

import importlib.abc
import importlib.machinery
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parent
TRITON: Final = FOLDER.parent / "triton_on_cpu/sitecustomize.py"
REPAIRS: Final[Mapping[str, Callable[[ModuleType], None]]] = runpy.run_path(
    str(FOLDER / "repairs.py")
)["REPAIRS"]


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules, and repairs each once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in REPAIRS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader: Any = spec.loader if spec else None
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                REPAIRS[fullname](module)

            loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
runpy.run_path(str(TRITON))
