"""Modules of packages, read and parsed, never imported; and what their names stand for."""

import ast
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, TypeAlias

Read: TypeAlias = Callable[[str], str | None]
"""Gives the text of a file by its path, such as 'vllm/config/vllm.py', or None."""


class Module:
    """One file. `bindings` are the names that it has once imported, by the statement of each."""

    def __init__(self, name: str, path: str, text: str) -> None:
        """Parse it."""
        self.name = name
        self.path = path
        self.tree = ast.parse(text)
        self.bindings: dict[str, ast.AST] = {}
        for bound, node in _bound(self.tree.body):
            self.bindings.setdefault(bound, node)

    def __repr__(self) -> str:
        """Its name."""
        return f"<Module {self.name}>"

    @cached_property
    def local_imports(self) -> dict[str, ast.ImportFrom]:
        """What is imported from elsewhere, also within functions."""
        return {
            each.asname or each.name: node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom)
            for each in node.names
        }

    def target(self, node: ast.ImportFrom) -> str:
        """The full name of the module that `from ... import` names here."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        if self.path.endswith("/__init__.py"):
            parts.append("")
        return ".".join([*parts[: -node.level], *filter(None, [node.module])])


@dataclass(frozen=True)
class Definition:
    """What a name stands for: a statement of a module, or all of it."""

    module: Module
    node: ast.AST

    def __hash__(self) -> int:
        return hash((self.module.name, id(self.node)))

    @property
    def where(self) -> str:
        """Such as 'vllm/config/vllm.py:12'."""
        return f"{self.module.path}:{getattr(self.node, 'lineno', 1)}"


class Packages:
    """Some packages, by the name of each."""

    def __init__(self, readers: Mapping[str, Read]) -> None:
        """`readers` give the files of each package."""
        self._readers = readers
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """By its full name; None if there is none."""
        if name not in self._modules:
            self._modules[name] = self._load(name)
        return self._modules[name]

    def find(self, full_name: str) -> Definition | None:
        """Such as 'vllm.config.VllmConfig'; None if it is not there."""
        module_name, _, name = full_name.rpartition(".")
        module = self.module(module_name)
        return None if module is None else self.resolve(module, name)

    def resolve(self, module: Module, name: str) -> Definition | None:
        """What a name of a module stands for, however often it was imported; None: not there."""
        node = module.bindings.get(name)
        if isinstance(node, ast.ImportFrom):
            return self._imported(module, node, name)
        if isinstance(node, ast.Import):
            return OUTSIDE
        if node is not None:
            return Definition(module, node)
        submodule = self.module(f"{module.name}.{name}")
        if submodule is not None:
            return Definition(submodule, submodule.tree)
        return self._from_stars(module, name)

    def resolve_import(self, module: Module, node: ast.ImportFrom, name: str) -> Definition | None:
        """What a statement brings in under a name of the module that it names."""
        target = module.target(node)
        if target.partition(".")[0] not in self._readers:
            return OUTSIDE
        source = self.module(target)
        return None if source is None else self.resolve(source, name)

    def _imported(self, module: Module, node: ast.ImportFrom, bound: str) -> Definition | None:
        name = next(each.name for each in node.names if bound in (each.asname, each.name))
        if module.target(node) == module.name:  # a package that imports its own submodule
            submodule = self.module(f"{module.name}.{name}")
            return None if submodule is None else Definition(submodule, submodule.tree)
        return self.resolve_import(module, node, name)

    def _from_stars(self, module: Module, name: str) -> Definition | None:
        for node in module.tree.body:
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                found = self.resolve_import(module, node, name)
                if found not in (None, OUTSIDE):
                    return found
        return None

    def _load(self, name: str) -> Module | None:
        reader = self._readers.get(name.partition(".")[0])
        stem = name.replace(".", "/")
        for path in (f"{stem}.py", f"{stem}/__init__.py") if reader is not None else ():
            text = reader(path) if reader is not None else None
            if text is not None:
                return Module(name, path, text)
        return None


def in_folder(folder: Path, package: str) -> tuple[Read, list[str]]:
    """A package whose folder lies in this one, and the paths of all its modules."""

    def read(path: str) -> str | None:
        file = folder / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    files = (folder / package).rglob("*.py")
    return read, sorted(path.relative_to(folder).as_posix() for path in files)


def in_wheel(wheel: Path) -> tuple[Read, list[str]]:
    """What a wheel holds, and the paths of all its modules."""
    archive = zipfile.ZipFile(wheel)
    names = {name for name in archive.namelist() if name.endswith(".py")}

    def read(path: str) -> str | None:
        return archive.read(path).decode() if path in names else None

    return read, sorted(names)


def in_texts(texts: Mapping[str, str]) -> tuple[Read, list[str]]:
    """Texts by their paths."""
    return texts.get, sorted(texts)


def module_name(path: str) -> str:
    """Of a file."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _bound(statements: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """What each statement binds, also within conditions."""
    for node in statements:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
            case ast.Import() | ast.ImportFrom():
                yield from (
                    (each.asname or each.name.partition(".")[0], node) for each in node.names
                )
            case ast.Assign(targets=targets):
                names = (each for target in targets for each in ast.walk(target))
                yield from ((each.id, node) for each in names if isinstance(each, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                yield from _bound(_blocks(node))


def _blocks(node: ast.stmt) -> list[ast.stmt]:
    """All statements that a statement holds."""
    found: list[ast.stmt] = []
    for field in ("body", "orelse", "finalbody"):
        found += getattr(node, field, [])
    for handler in getattr(node, "handlers", []):
        found += handler.body
    return found


OUTSIDE: Final = Definition(Module("", "", ""), ast.Pass())
"""Stands for everything of packages that are not looked at."""
