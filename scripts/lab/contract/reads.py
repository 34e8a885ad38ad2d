"""What the connector's code takes from vLLM's objects: attributes, and calls with arguments."""

import ast
import inspect
from collections.abc import Callable, Iterator

from lab.contract.classes import (
    ENUM_MEMBERS,
    Classes,
    Function,
    Type,
    decorators,
    one_of,
)
from lab.contract.signatures import signature_of, why_unfit
from lab.contract.source import OUTSIDE, Definition, Module

Note = Callable[[ast.AST, str], None]


class Reads(ast.NodeVisitor):
    """Goes through one module; what it cannot know the class of, it leaves out."""

    def __init__(self, classes: Classes, module: Module, foreign: str, note: Note) -> None:
        """`foreign` is the package whose objects are looked at; `note` takes what does not fit."""
        self.num_attributes = 0
        self.num_calls = 0
        self._classes = classes
        self._module = module
        self._foreign = foreign
        self._note = note
        self._names: dict[str, Type] = {}
        self._owner: Type | None = None
        self._lambda_types: list[Type | None] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Its methods know `self`."""
        outer, self._owner = self._owner, Type(Definition(self._module, node))
        self.generic_visit(node)
        self._owner = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Its parameters have types."""
        outer, self._names = self._names, dict(self._names)
        if self._owner is not None and node.args.args and "staticmethod" not in decorators(node):
            self._names[node.args.args[0].arg] = self._owner
            self._names["super"] = Type(self._owner.owner, "super")
        self._names |= self._classes.parameters(self._module, node)
        self.generic_visit(node)
        self._names = outer

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Its parameters have the types of the annotation that it stands under."""
        outer, self._names = self._names, dict(self._names)
        for argument, kind in zip(node.args.args, self._lambda_types, strict=False):
            if kind is not None:
                self._names[argument.arg] = kind
        self.generic_visit(node)
        self._names = outer

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """A name with a type, or functions whose parameters have some."""
        outer, self._lambda_types = self._lambda_types, self._callable(node.annotation)
        self.generic_visit(node)
        self._lambda_types = outer
        self._bind(node.target, self._classes.annotated(self._module, node.annotation))

    def visit_Assign(self, node: ast.Assign) -> None:
        """Names get the type of the value, or each that of its own."""
        self.generic_visit(node)
        for target in node.targets:
            match target, node.value:
                case ast.Tuple(elts=names), ast.Tuple(elts=values):
                    for name, value in zip(names, values, strict=False):
                        self._bind(name, self._type(value))
                case _:
                    self._bind(target, self._type(node.value))

    def visit_If(self, node: ast.If) -> None:
        """Within `if isinstance(name, Class)` the name is of that class."""
        self.visit(node.test)
        outer = dict(self._names)
        match node.test:
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), kind]):
                found = self._classes.annotated(self._module, kind)
                if found is not None:
                    self._names[name] = found
        for each in node.body:
            self.visit(each)
        self._names = outer
        for each in node.orelse:
            self.visit(each)

    def visit_For(self, node: ast.For) -> None:
        """The name is one of many."""
        self._bind_each(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """See `visit_For`."""
        self._bind_each(node.target, node.iter)
        self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        """Of a comprehension first what it goes over."""
        for each in sorted(
            ast.iter_child_nodes(node), key=lambda each: not isinstance(each, ast.comprehension)
        ):
            self.visit(each)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """It has to be there, if the class is known and vLLM's."""
        self.generic_visit(node)
        kind = self._type(node.value)
        if kind is None or kind.shape == "many" or node.attr.startswith("__"):
            return
        owners = list(self._classes.order(kind.owner))
        if not any(each.module.name.startswith(self._foreign) for each in owners):
            return
        self.num_attributes += 1
        is_enum = any(each is not OUTSIDE and _is_enum(each.node) for each in owners)
        if (
            self._classes.member_of(kind, node.attr) is None
            and not self._classes.is_open(kind.owner)
            and not (is_enum and node.attr in ENUM_MEMBERS)
        ):
            self._note(node, f"{kind.owner.node.name} has no {node.attr}")  # type: ignore[attr-defined]

    def visit_Call(self, node: ast.Call) -> None:
        """The arguments have to fit, if the function is known and vLLM's."""
        self.generic_visit(node)
        found = self._classes.function_of(self._module, node.func, self._names)
        if found is None or not found[0].module.name.startswith(self._foreign):
            return
        definition, is_bound = found
        if isinstance(definition.node, ast.ClassDef):
            member = self._classes.member(definition, "__init__")
            if member is None or not isinstance(member.node, Function):
                return
            definition, is_bound = Definition(member.owner.module, member.node), True
        self.num_calls += 1
        function = definition.node
        signature = (
            signature_of(function, is_bound=is_bound)
            if isinstance(function, Function)
            else inspect.Signature()
        )
        reason = why_unfit(signature, node)
        if reason:
            self._note(node, f"{ast.unparse(node.func)} at {definition.where}: {reason}")

    def _type(self, node: ast.AST) -> Type | None:
        return self._classes.type_of(self._module, node, self._names)

    def _bind(self, target: ast.AST, kind: Type | None) -> None:
        if isinstance(target, ast.Name):
            self._names.pop(target.id, None)
            if kind is not None:
                self._names[target.id] = kind

    def _bind_each(self, target: ast.AST, source: ast.AST) -> None:
        match target, source:
            case ast.Tuple(elts=names), ast.Call(func=ast.Name(id="zip"), args=sources):
                for name, each in zip(names, sources, strict=False):
                    self._bind(name, one_of(self._type(each)))
            case _:
                self._bind(target, one_of(self._type(source)))

    def _callable(self, annotation: ast.AST) -> list[Type | None]:
        """What the parameters are, of the first Callable[[...], ...] in an annotation."""
        for node in ast.walk(annotation):
            match node:
                case ast.Subscript(
                    value=ast.Name(id="Callable"), slice=ast.Tuple(elts=[ast.List(elts=kinds), _])
                ):
                    return [self._classes.annotated(self._module, each) for each in kinds]
        return []


def _is_enum(node: ast.AST) -> bool:
    bases = node.bases if isinstance(node, ast.ClassDef) else []
    return any(isinstance(base, ast.Name) and "Enum" in base.id for base in bases)


def imports_of(module: Module, package: str) -> Iterator[tuple[ast.ImportFrom, str, bool]]:
    """Each name that is imported from a package; and whether the code can do without."""
    optional: set[ast.AST] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Try) and any(_forgives(each) for each in node.handlers):
            optional.update(each for part in node.body for each in ast.walk(part))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and module.target(node).split(".")[0] == package:
            yield from ((node, each.name, node in optional) for each in node.names)


def _forgives(handler: ast.ExceptHandler) -> bool:
    return handler.type is not None and "ImportError" in ast.unparse(handler.type)
