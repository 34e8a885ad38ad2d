"""Changes modules once they are imported, for the sitecustomize.py files beside this one.

Those run before the harness can be imported, so they run this file by its path.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

Changes = Mapping[str, Callable[[Any], None]]
"""The change of each module, by its name."""


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules to change."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            self._changes[fullname](module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def change(changes: Changes) -> None:
    """Change these modules from now on, before another finder finds them."""
    sys.meta_path.insert(0, Finder(changes))
