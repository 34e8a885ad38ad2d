#!/usr/bin/env python3
"""Check the limits of the code: how large a piece may be, and what it may not contain.

A limit that hurts is a design question; there is no way to switch one off for a line.

What is counted:

    file        lines, all of them
    class       lines, all of them; methods (distinct names, properties too); attributes
    attribute   each distinct ``self.x`` that the class stores, and each annotated field of its
                body, ClassVars aside. The fields of a record do not count: a frozen dataclass or
                msgspec Struct, a NamedTuple, TypedDict or Protocol is data or a promise, not state.
    function    lines from ``def`` on, less those of docstrings
    complexity  1 + if, elif, conditional expression, for, while, except, each further operand of
                and/or, each if of a comprehension, each guard, each case but a bare ``case _``;
                a nested function is counted for itself
    nesting     if, for, while, try, with, match; elif, except and case add none
    arguments   ``*args`` and ``**kwargs`` as one each, self and cls not at all;
                those that may be passed by position have a limit of their own

What is forbidden: relative imports, import cycles (imports in functions and below TYPE_CHECKING
count), module-level mutable state, ``global``, ``assert`` in the package, and catching everything
outside BROAD_EXCEPT. A table is no state if it is a filled literal annotated Final, Mapping or
Sequence; nor is ``__all__``.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

PACKAGE = "nixl_kv"
CHECKED = (PACKAGE, "scripts")

FILE_LINES = 350
CLASS_LINES = 200
CLASS_METHODS = 15
CLASS_ATTRIBUTES = 10
FUNCTION_LINES = 40
COMPLEXITY = 8
NESTING = 3
ARGUMENTS = 6
POSITIONAL = 3

# Where an unknown error must stop: the top of the transfer thread, and the plugin.
BROAD_EXCEPT = frozenset({"nixl_kv/connector/thread.py", "nixl_kv/connector/plugin.py"})
EVERYTHING = frozenset({"Exception", "BaseException"})

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.ClassDef)
# By name: TryStar is younger than the oldest Python that we run on.
BLOCKS = frozenset(
    {"If", "For", "AsyncFor", "While", "Try", "TryStar", "With", "AsyncWith", "Match"}
)
BRANCHES = frozenset({"If", "IfExp", "For", "AsyncFor", "While", "ExceptHandler"})

FILLED_LITERALS = (ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_BUILTINS = frozenset({"list", "dict", "set", "bytearray"})
MUTABLE_MODULES = frozenset({"collections", "contextvars", "queue", "threading", "weakref"})
CONSTANT_ANNOTATIONS = frozenset({"Final", "Mapping", "Sequence"})

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Finding = tuple[int, str]


class Violation(NamedTuple):
    """One thing to change."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        """Write it so that editors and terminals can jump there."""
        return f"{self.path}:{self.line}: {self.message}"


def check_source(source: str, path: str) -> list[Violation]:
    """Check one file; ``path`` is relative to the repository, with forward slashes."""
    tree = ast.parse(source, path)
    size = ("lines", len(source.splitlines()), FILE_LINES)
    findings = [*_over(1, "file", size), *_module_state(tree)]
    records = _records(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            findings += _class_limits(node, is_record=node.name in records)
        elif isinstance(node, FUNCTIONS):
            findings += _function_limits(node)
        findings += _forbidden(node, path)
    return [Violation(path, line, message) for line, message in sorted(findings)]


def check_cycles(sources: Mapping[str, str]) -> list[Violation]:
    """Find the first import cycle among files, given as path to source."""
    stems = {path: path.removesuffix(".py").removesuffix("/__init__") for path in sources}
    modules = {stem.replace("/", "."): path for path, stem in stems.items()}
    imports = {name: _own_imports(sources[path], modules) for name, path in modules.items()}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        cycle = error.args[1][::-1]
        line = imports[cycle[0]][cycle[1]]
        return [Violation(modules[cycle[0]], line, f"import cycle {' -> '.join(cycle)}")]
    return []


def _over(line: int, name: str, *sizes: tuple[str, int, int]) -> Iterator[Finding]:
    for what, value, limit in sizes:
        if value > limit:
            yield line, f"{what} of {name} ({value} > {limit})"


def _class_limits(node: ast.ClassDef, *, is_record: bool) -> Iterator[Finding]:
    methods = {child.name for child in node.body if isinstance(child, FUNCTIONS)}
    attributes = _stored_on_self(node) | (set() if is_record else _annotated_fields(node))
    return _over(
        node.lineno,
        node.name,
        ("lines", _length(node), CLASS_LINES),
        ("methods", len(methods), CLASS_METHODS),
        ("attributes", len(attributes), CLASS_ATTRIBUTES),
    )


def _function_limits(node: FunctionNode) -> Iterator[Finding]:
    arguments, positional = _arguments(node)
    return _over(
        node.lineno,
        node.name,
        ("lines", _length(node) - _docstring_lines(node), FUNCTION_LINES),
        ("complexity", 1 + sum(map(_branches, _own_nodes(node))), COMPLEXITY),
        ("nesting", _nesting(node), NESTING),
        ("arguments", arguments, ARGUMENTS),
        ("positional arguments", positional, POSITIONAL),
    )


def _length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _docstring_lines(node: FunctionNode) -> int:
    scopes = [scope for scope in ast.walk(node) if isinstance(scope, SCOPES)]
    return sum(_length(scope.body[0]) for scope in scopes if ast.get_docstring(scope) is not None)


def _arguments(node: FunctionNode) -> tuple[int, int]:
    """Return how many arguments there are, and how many of them may be passed by position."""
    spec = node.args
    positional = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
    if positional and positional[0] in {"self", "cls"}:
        positional = positional[1:]
    variadic = (spec.vararg is not None) + (spec.kwarg is not None)
    return len(positional) + len(spec.kwonlyargs) + variadic, len(positional)


def _own_nodes(node: ast.AST, stop: tuple[type[ast.AST], ...] = SCOPES) -> Iterator[ast.AST]:
    """Walk below a node without entering what is counted for itself."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, stop):
            yield child
            yield from _own_nodes(child, stop)


def _branches(node: ast.AST) -> int:
    match node:
        case ast.BoolOp(values=values):
            return len(values) - 1
        case ast.comprehension(ifs=ifs):
            return len(ifs)
        case ast.match_case(pattern=ast.MatchAs(pattern=None, name=None), guard=None):
            return 0
        case ast.match_case(guard=guard):
            return 1 + (guard is not None)
    return int(type(node).__name__ in BRANCHES)


def _nesting(node: ast.AST) -> int:
    """Return the deepest stack of blocks below a node."""
    depths = [0]
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, SCOPES):
            deeper = type(child).__name__ in BLOCKS and not _is_elif(node, child)
            depths.append(deeper + _nesting(child))
    return max(depths)


def _is_elif(parent: ast.AST, child: ast.AST) -> bool:
    """Tell ``elif`` from an ``if`` below ``else``: the tree is the same, the column is not."""
    if isinstance(parent, ast.If) and isinstance(child, ast.If):
        return parent.col_offset == child.col_offset
    return False


def _stored_on_self(node: ast.ClassDef) -> set[str]:
    inside = _own_nodes(node, stop=(ast.ClassDef,))
    attributes = [child for child in inside if isinstance(child, ast.Attribute)]
    stored = [child for child in attributes if isinstance(child.ctx, ast.Store)]
    return {child.attr for child in stored if _dotted(child.value) == "self"}


def _annotated_fields(node: ast.ClassDef) -> set[str]:
    fields = [child for child in node.body if isinstance(child, ast.AnnAssign)]
    return {_dotted(field.target) for field in fields if _last(field.annotation) != "ClassVar"}


def _records(tree: ast.Module) -> set[str]:
    """Return the classes whose fields are data, also those made from one of the same file."""
    records = {"NamedTuple", "Protocol", "TypedDict"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            parents = {_last(base) for base in node.bases}
            records |= {node.name} if _is_frozen(node) or records & parents else set()
    return records


def _is_frozen(node: ast.ClassDef) -> bool:
    """Look for ``frozen=True`` in the class line (msgspec) and in the decorators (dataclass)."""
    calls = [decorator for decorator in node.decorator_list if isinstance(decorator, ast.Call)]
    keywords = [*node.keywords, *(keyword for call in calls for keyword in call.keywords)]
    return "frozen=True" in map(ast.unparse, keywords)


def _forbidden(node: ast.AST, path: str) -> Iterator[Finding]:
    match node:
        case ast.ImportFrom(level=level) if level:
            yield node.lineno, "relative import"
        case ast.Global(names=names):
            yield node.lineno, f"module-level state: global {', '.join(names)}"
        case ast.Assert() if path.startswith(f"{PACKAGE}/"):
            yield node.lineno, f"assert in {PACKAGE}"
        case ast.ExceptHandler() | ast.Call() if _catches_all(node, path):
            yield node.lineno, "catches every exception"


def _catches_all(node: ast.ExceptHandler | ast.Call, path: str) -> bool:
    """Say whether a handler, or a call of ``suppress``, stops errors that nobody thought of."""
    if path in BROAD_EXCEPT:
        return False
    if isinstance(node, ast.Call):
        kinds = node.args if _last(node.func) == "suppress" else []
    else:
        kinds = getattr(node.type, "elts", [node.type])
    return any(kind is None or _last(kind) in EVERYTHING for kind in kinds)


def _module_state(tree: ast.Module) -> Iterator[Finding]:
    origins = _origins(tree)
    for node in _own_nodes(tree):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        if _is_mutable(node.value, origins) and not _is_constant(node) and target != "__all__":
            yield node.lineno, f"module-level mutable state: {target}"


def _is_mutable(value: ast.expr, origins: Mapping[str, str]) -> bool:
    match value:
        case ast.Call(func=func):
            head, _, rest = _dotted(func).partition(".")
            name = ".".join(filter(None, (origins.get(head, head), rest)))
            return name in MUTABLE_BUILTINS or name.rpartition(".")[0] in MUTABLE_MODULES
        case ast.BinOp(left=left, right=right):
            return _is_mutable(left, origins) or _is_mutable(right, origins)
        case ast.Tuple(elts=elts):
            return any(_is_mutable(element, origins) for element in elts)
    return isinstance(value, (ast.List, ast.Dict, ast.Set, *FILLED_LITERALS))


def _is_constant(node: ast.Assign | ast.AnnAssign) -> bool:
    """Accept a table that says it is constant; an empty one is there to be filled."""
    if isinstance(node, ast.Assign) or _last(node.annotation) not in CONSTANT_ANNOTATIONS:
        return False
    match node.value:
        case ast.List(elts=items) | ast.Set(elts=items) | ast.Dict(values=items):
            return bool(items)
    return isinstance(node.value, FILLED_LITERALS)


def _origins(tree: ast.Module) -> dict[str, str]:
    """Map imported names to their origins, so that a renamed ``Lock`` is still threading's."""
    origins: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            origins |= {alias.asname or alias.name: prefix + alias.name for alias in node.names}
    return origins


def _dotted(node: ast.expr) -> str:
    """Write a name as the source has it, without subscripts; anything else is the empty string."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{_dotted(value)}.{attr}"
        case ast.Subscript(value=value):
            return _dotted(value)
    return ""


def _last(node: ast.expr) -> str:
    return _dotted(node).rpartition(".")[2]


def _own_imports(source: str, modules: Mapping[str, str]) -> dict[str, int]:
    """Map each of our modules that a source imports to the line; a parent package is no import."""
    lines: dict[str, int] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            lines |= {alias.name: node.lineno for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            deeper = [f"{node.module}.{alias.name}" for alias in node.names]
            lines |= {name if name in modules else f"{node.module}": node.lineno for name in deeper}
    return {name: line for name, line in lines.items() if name in modules}


def _is_python(path: Path) -> bool:
    if path.suffix or not path.is_file():
        return path.suffix == ".py"
    first, _, _ = path.read_bytes().partition(b"\n")
    return first.startswith(b"#!") and b"python" in first


def read_sources(root: Path) -> dict[str, str]:
    """Read the Python files of the checked folders, scripts without a suffix too."""
    paths = [path for folder in CHECKED for path in sorted((root / folder).rglob("*"))]
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in paths
        if _is_python(path)
    }


def main() -> int:
    """Check the repository that this script lies in."""
    sources = read_sources(Path(__file__).resolve().parent.parent)
    violations = [found for path, source in sources.items() for found in check_source(source, path)]
    violations += check_cycles(sources)
    for violation in violations:
        print(violation)
    print(f"limits: {len(sources)} files, {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
