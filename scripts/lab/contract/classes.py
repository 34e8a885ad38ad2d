"""What classes have, and of which class values are, as far as annotations and assignments tell."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from lab.contract.source import OUTSIDE, Definition, Module, Packages

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Shape: TypeAlias = Literal["one", "many", "class", "super"]

CLOSED_BASES: Final = frozenset(
    ("object", "ABC", "Enum", "IntEnum", "str", "int", "Generic", "Protocol", "Exception")
)
"""Of other packages: these bring no attributes that anyone asks for."""

WRAPPERS: Final = frozenset(("Optional", "Annotated", "ClassVar", "SkipValidation", "Final"))
CONTAINERS: Final = frozenset(
    ("list", "tuple", "set", "frozenset", "Sequence", "Iterable", "Iterator", "Collection")
)
ENUM_MEMBERS: Final = frozenset(("name", "value"))


@dataclass(frozen=True)
class Type:
    """An instance of a class, many in a container, the class itself, or what `super` gives."""

    owner: Definition
    shape: Shape = "one"


@dataclass(frozen=True)
class Member:
    """Where a class, or one that it is made from, has an attribute."""

    owner: Definition
    node: ast.AST

    @property
    def is_property(self) -> bool:
        """Whether reading it calls it."""
        return any("property" in text for text in decorators(self.node))


class Classes:
    """Looks things up in classes of some packages."""

    def __init__(self, packages: Packages, assumed: Mapping[str, str]) -> None:
        """`assumed` are full names of classes, by the name of a parameter annotated as Any."""
        self.packages = packages
        self._assumed = assumed
        self._under_way: set[ast.AST] = set()  # an attribute may be made from itself

    def order(self, owner: Definition) -> Iterator[Definition]:
        """A class and those that it is made from, in the order of look-up; OUTSIDE for unknown."""
        yield owner
        bases = owner.node.bases if isinstance(owner.node, ast.ClassDef) else []
        for base in bases:
            found = self._definition(owner.module, base)
            if found is not None and isinstance(found.node, ast.ClassDef):
                yield from self.order(found)
            elif _last_name(base) not in CLOSED_BASES:
                yield OUTSIDE

    def member(self, owner: Definition, name: str, *, skip: int = 0) -> Member | None:
        """The first that has the attribute, `skip` classes left out; None if there is none."""
        for each in list(self.order(owner))[skip:]:
            for bound, node in _attributes(each.node):
                if bound == name:
                    return Member(each, node)
        return None

    def is_open(self, owner: Definition) -> bool:
        """Whether the class may have attributes that its source does not show."""
        return any(
            each is OUTSIDE or any(name == "__getattr__" for name, _ in _attributes(each.node))
            for each in self.order(owner)
        )

    def annotated(
        self, module: Module, node: ast.AST | None, owner: Type | None = None
    ) -> Type | None:
        """What an annotation stands for."""
        match node:
            case ast.Constant(value=str() as text):
                return self.annotated(module, ast.parse(text, mode="eval").body, owner)
            case ast.Name(id="Self"):
                return owner
            case ast.Name() | ast.Attribute():
                found = self._definition(module, node)
                is_class = found is not None and isinstance(found.node, ast.ClassDef)
                return Type(found) if is_class and found is not None else None
            case ast.BinOp(op=ast.BitOr(), left=left, right=right):
                sides = [self.annotated(module, each, owner) for each in (left, right)]
                known = [each for each in sides if each is not None]
                return known[0] if len(known) == 1 else None
            case ast.Subscript(value=value, slice=inner):
                return self._parametrised(module, _last_name(value), inner, owner)
        return None

    def parameters(self, module: Module, function: Function) -> dict[str, Type]:
        """The types of a function's parameters, where they are known."""
        given = function.args
        found: dict[str, Type] = {}
        for each in (*given.posonlyargs, *given.args, *given.kwonlyargs):
            kind = self.annotated(module, each.annotation)
            if kind is None and _last_name(each.annotation) == "Any":
                kind = self.assumed(each.arg)
            if kind is not None:
                found[each.arg] = kind
        return found

    def assumed(self, name: str) -> Type | None:
        """What a parameter of this name is, where the code calls it Any."""
        full_name = self._assumed.get(name)
        found = None if full_name is None else self.packages.find(full_name)
        return None if found is None else Type(found)

    def type_of_member(self, member: Member) -> Type | None:
        """Of what reading the attribute gives; of a method, of nothing."""
        if member.node in self._under_way:
            return None
        self._under_way.add(member.node)
        try:
            return self._type_of_member(member)
        finally:
            self._under_way.remove(member.node)

    def type_of(
        self, module: Module, node: ast.AST | None, names: Mapping[str, Type]
    ) -> Type | None:
        """Of an expression, where `names` are known."""
        match node:
            case ast.Name(id=name):
                return names.get(name) or self._global(module, name)
            case ast.Attribute(value=value, attr=name):
                kind = self.type_of(module, value, names)
                member = self.member_of(kind, name)
                return None if member is None else self.type_of_member(member)
            case ast.Call():
                return self._type_of_call(module, node, names)
            case ast.Subscript(value=value, slice=index):
                kind = self.type_of(module, value, names)
                return kind if isinstance(index, ast.Slice) else one_of(kind)
            case ast.IfExp(body=body, orelse=orelse):
                return self.type_of(module, body, names) or self.type_of(module, orelse, names)
            case ast.BoolOp(values=values):
                kinds = (self.type_of(module, each, names) for each in values)
                return next((kind for kind in kinds if kind is not None), None)
        return None

    def member_of(self, kind: Type | None, name: str) -> Member | None:
        """An attribute of a value."""
        if kind is None or kind.shape == "many":
            return None
        return self.member(kind.owner, name, skip=int(kind.shape == "super"))

    def function_of(
        self, module: Module, node: ast.AST, names: Mapping[str, Type]
    ) -> tuple[Definition, bool] | None:
        """The function or class that is called, and whether it is bound to its first parameter."""
        if isinstance(node, ast.Name):
            found = self._definition(module, node)
            is_known = found is not None and isinstance(found.node, Function | ast.ClassDef)
            return (found, False) if is_known and found is not None else None
        if not isinstance(node, ast.Attribute):
            return None
        kind = self.type_of(module, node.value, names)
        member = self.member_of(kind, node.attr)
        if kind is None or member is None or not isinstance(member.node, Function):
            return None
        static, by_class = ("staticmethod" in decorators(member.node)), kind.shape == "class"
        is_bound = not static and (not by_class or "classmethod" in decorators(member.node))
        return Definition(member.owner.module, member.node), is_bound

    def _type_of_call(
        self, module: Module, node: ast.Call, names: Mapping[str, Type]
    ) -> Type | None:
        match node:
            case ast.Call(func=ast.Name(id="super"), args=[]):
                return names.get("super")
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=name), *_]):
                member = self.member_of(self.type_of(module, value, names), str(name))
                return None if member is None else self.type_of_member(member)
            case ast.Call(func=ast.Name(id="list" | "tuple" | "sorted" | "reversed"), args=[value]):
                return self.type_of(module, value, names)
        found = self.function_of(module, node.func, names)
        if found is None:
            return None
        if isinstance(found[0].node, ast.ClassDef):
            return Type(found[0])
        is_method = isinstance(node.func, ast.Attribute)
        owner = self.type_of(module, node.func.value, names) if is_method else None  # type: ignore[attr-defined]
        return self.annotated(found[0].module, found[0].node.returns, owner)  # type: ignore[attr-defined]

    def _type_of_member(self, member: Member) -> Type | None:
        module, owner = member.owner.module, Type(member.owner)
        match member.node:
            case ast.AnnAssign(annotation=annotation):
                return self.annotated(module, annotation, owner)
            case ast.FunctionDef(returns=returns):
                return self.annotated(module, returns, owner) if member.is_property else None
            case ast.Assign(value=value, targets=[ast.Attribute()]):
                names: dict[str, Type] = {"self": owner}
                for function in _functions(member.owner.node):
                    if any(each is member.node for each in ast.walk(function)):
                        names |= self.parameters(module, function)
                return self.type_of(module, value, names)
            case ast.Assign(value=value):
                return self.type_of(module, value, {})
        return None

    def _parametrised(
        self, module: Module, name: str, inner: ast.AST, owner: Type | None
    ) -> Type | None:
        first = inner.elts[0] if isinstance(inner, ast.Tuple) and inner.elts else inner
        kind = self.annotated(module, first, owner)
        if kind is None or name in WRAPPERS:
            return kind
        if name in CONTAINERS:
            return Type(kind.owner, "many")
        return Type(kind.owner, "class") if name == "type" else None

    def _global(self, module: Module, name: str) -> Type | None:
        found = self._definition(module, ast.Name(id=name))
        if found is None:
            return None
        if isinstance(found.node, ast.ClassDef):
            return Type(found, "class")
        if isinstance(found.node, ast.AnnAssign):
            return self.annotated(found.module, found.node.annotation)
        return None

    def _definition(self, module: Module, node: ast.AST) -> Definition | None:
        match node:
            case ast.Subscript(value=value):
                return self._definition(module, value)
            case ast.Name(id=name) if name in module.bindings:
                return self.packages.resolve(module, name)
            case ast.Name(id=name) if name in module.local_imports:
                return self.packages.resolve_import(module, module.local_imports[name], name)
            case ast.Attribute(value=value, attr=name):
                outer = self._definition(module, value)
                is_module = outer is not None and isinstance(outer.node, ast.Module)
                return self.packages.resolve(outer.module, name) if is_module and outer else None
        return None


def one_of(kind: Type | None) -> Type | None:
    """What a container holds."""
    return Type(kind.owner) if kind is not None and kind.shape == "many" else None


def decorators(node: ast.AST) -> list[str]:
    """The last names of a function's or class's decorators."""
    found = (
        each.func if isinstance(each, ast.Call) else each
        for each in getattr(node, "decorator_list", [])
    )
    return [_last_name(each) for each in found]


def _attributes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What the body of a class binds, and what its methods set on `self`."""
    for each in node.body if isinstance(node, ast.ClassDef) else []:
        match each:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, each
            case ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name, each
            case ast.Assign(targets=targets):
                yield from ((name.id, each) for name in targets if isinstance(name, ast.Name))
    for function in _functions(node):
        for inner in ast.walk(function):
            match inner:
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)]):
                    yield name, inner
                case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                    yield name, inner


def _functions(node: ast.AST) -> list[Function]:
    body = node.body if isinstance(node, ast.ClassDef) else []
    return [each for each in body if isinstance(each, Function)]


def _last_name(node: ast.AST | None) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value):
            return _last_name(value)
    return ""
