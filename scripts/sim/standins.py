"""What nixl_kv imports of vLLM and torch, without them: they take seconds to import.

The scheduler sides and the reports use a handful of their names and none of their work. If vLLM is
imported already, it is used instead.
"""

import enum
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

STOOD_IN_FOR = frozenset({"vllm", "torch"})


class RequestStatus(enum.Enum):
    """Those of vLLM's that matter here."""

    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()


@dataclass
class KVConnectorTransferResults:
    """As vLLM's."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class _Module(ModuleType):
    """Has every name that is asked of it, as an empty class."""

    __path__: list[str] = []  # noqa: RUF012 - the import system wants this form

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds all modules of what is stood in for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] not in STOOD_IN_FOR:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _Module(spec.name)
        for kind in (RequestStatus, KVConnectorTransferResults):
            setattr(module, kind.__name__, kind)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def install() -> None:
    """To be called before anything of nixl_kv.connector is imported."""
    if "vllm" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


def statuses() -> Any:
    """The enumeration that nixl_kv sees."""
    return importlib.import_module("vllm.v1.request").RequestStatus
