"""The whole check: imports, hooks, vLLM's calls of them, and what is read of vLLM's objects."""

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lab.contract.classes import Classes, Function, Member, decorators
from lab.contract.reads import Reads, imports_of
from lab.contract.signatures import signature_of, why_narrower, why_unfit
from lab.contract.source import OUTSIDE, Definition, Module, Packages, Read, module_name

CONNECTOR: Final = "nixl_kv.connector.connector.NixlKVConnector"
OURS: Final = "nixl_kv"
VLLM: Final = "vllm"

ASSUMED: Final[Mapping[str, str]] = {
    "blocks": "vllm.v1.core.kv_cache_manager.KVCacheBlocks",
    "kv_cache_manager": "vllm.v1.core.kv_cache_manager.KVCacheManager",
    "manager": "vllm.v1.core.kv_cache_manager.KVCacheManager",
    "media": "vllm.config.multimodal.MultiModalConfig",
    "request": "vllm.v1.request.Request",
    "spec": "vllm.v1.kv_cache_interface.AttentionSpec",
    "speculative": "vllm.config.speculative.SpeculativeConfig",
}
"""What parameters are that the connector's code calls Any, by their names."""

RECEIVERS: Final = frozenset(
    (
        "c",
        "connector",
        "connector_cls",
        "get_kv_transfer_group",
        "kv_connector",
        "kv_transfer_group",
    )
)
"""The last names of what vLLM calls hooks of: connectors, or what holds one."""

CALLS: Final = re.compile(r"connector\w*[.(]|kv_transfer_group(\(\))?\.")
"""What stands in a file that calls hooks."""

OTHERS: Final = re.compile(
    r"vllm/distributed/(ec_transfer|aux_output_connector)/"
    r"|vllm/distributed/kv_transfer/kv_connector/v1/(?!multi_connector\.py)"
    r"|/ec_connector"
)
"""Files that call hooks of other connectors alone."""


@dataclass
class Report:
    """What was found."""

    breaks: list[str] = field(default_factory=list)
    """Where the connector does not fit, in words."""

    lacks: set[str] = field(default_factory=set)
    """What the connector has for other versions, and can do without in this one."""

    counts: Counter[str] = field(default_factory=Counter)
    """How much was looked at."""


def check(ours: tuple[Read, Sequence[str]], theirs: tuple[Read, Sequence[str]]) -> Report:
    """Whether the connector fits vLLM.

    Args:
        ours: gives the files of this package; and the paths of those that speak with vLLM.
        theirs: the same of vLLM; all its paths.
    """
    packages = Packages({OURS: ours[0], VLLM: theirs[0]})
    classes = Classes(packages, ASSUMED)
    report = Report()
    for path in ours[1]:
        module = packages.module(module_name(path))
        if module is not None:
            _check_imports(packages, module, report)
            _check_classes(classes, module, report)
            _check_reads(classes, module, report)
    connector = packages.find(CONNECTOR)
    if connector is None:
        report.breaks.append(f"there is no {CONNECTOR}")
        return report
    _check_hooks(classes, connector, report)
    for path in theirs[1]:
        text = theirs[0](path) or ""
        if CALLS.search(text) and not OTHERS.search(path):
            _check_calls(classes, connector, Module(module_name(path), path, text), report)
    return report


def _check_imports(packages: Packages, module: Module, report: Report) -> None:
    """Each name that is imported from vLLM is there."""
    for node, name, is_optional in imports_of(module, VLLM):
        report.counts["names imported"] += 1
        target = module.target(node)
        if packages.resolve_import(module, node, name) is None:
            if is_optional:
                report.lacks.add(f"{target}.{name}")
            else:
                report.breaks.append(f"{module.path}:{node.lineno}: {target} has no {name}")


def _check_classes(classes: Classes, module: Module, report: Report) -> None:
    """Methods in place of vLLM's accept what vLLM's accept; none is left abstract."""
    for node in module.tree.body:
        owner = Definition(module, node)
        if isinstance(node, ast.ClassDef) and any(_is_vllms(each) for each in classes.order(owner)):
            for name, member in _members_of_vllm(classes, owner):
                _check_override(classes, owner, name, member, report)


def _check_override(
    classes: Classes, owner: Definition, name: str, base: Member, report: Report
) -> None:
    ours = classes.member(owner, name)
    if ours is None or not isinstance(base.node, Function):
        return
    if ours.node is base.node:
        if "abstractmethod" in decorators(base.node):
            report.breaks.append(f"{owner.where}: {name} of {_where(base)} is left abstract")
        return
    if not isinstance(ours.node, Function):
        return
    report.counts["methods in place of vLLM's"] += 1
    kinds = [
        set(decorators(each)) & {"classmethod", "staticmethod", "property"}
        for each in (ours.node, base.node)
    ]
    reason = (
        f"is a {' and '.join(sorted(kinds[1])) or 'method'} there"
        if kinds[0] != kinds[1]
        else why_narrower(_bound_signature(ours), _bound_signature(base))
    )
    if reason:
        report.breaks.append(f"{_where(ours)}: {name}, at {_where(base)}: {reason}")


def _check_reads(classes: Classes, module: Module, report: Report) -> None:
    """What is read of vLLM's objects is there, and what is called of them takes the arguments."""

    def note(node: ast.AST, words: str) -> None:
        report.breaks.append(f"{module.path}:{getattr(node, 'lineno', 0)}: {words}")

    reads = Reads(classes, module, VLLM, note)
    reads.visit(module.tree)
    report.counts["attributes read"] += reads.num_attributes
    report.counts["calls of vLLM"] += reads.num_calls


def _check_hooks(classes: Classes, connector: Definition, report: Report) -> None:
    """Each hook of the connector is one that vLLM has."""
    theirs = {name for name, _ in _members_of_vllm(classes, connector)}
    for each in classes.order(connector):
        body = each.node.body if isinstance(each.node, ast.ClassDef) else []
        for node in body if not _is_vllms(each) else []:
            if isinstance(node, Function) and not node.name.startswith("_"):
                report.counts["hooks"] += 1
                if node.name not in theirs:
                    report.lacks.add(node.name)


def _check_calls(classes: Classes, connector: Definition, module: Module, report: Report) -> None:
    """Every call of a hook in vLLM's code fits the connector's signature."""
    for node in ast.walk(module.tree):
        name = _hook_called(node)
        if not name or not isinstance(node, ast.Call):
            continue
        member = classes.member(connector, name)
        if member is None or not isinstance(member.node, Function) or member.is_property:
            continue
        report.counts["calls of hooks"] += 1
        reason = why_unfit(_bound_signature(member), node)
        if reason:
            words = f"{name} is called with other arguments than {_where(member)} takes"
            report.breaks.append(f"{module.path}:{node.lineno}: {words}: {reason}")


def _hook_called(node: ast.AST) -> str:
    """Its name, if this is a call of a method of a connector; empty if not."""
    match node:
        case ast.Call(func=ast.Attribute(value=receiver, attr=name)):
            inner = receiver.func if isinstance(receiver, ast.Call) else receiver
            match inner:
                case ast.Name(id=last) | ast.Attribute(attr=last):
                    return name if last in RECEIVERS else ""
        case ast.Call(func=ast.Name(id="connector_cls")):
            return "__init__"
    return ""


def _members_of_vllm(classes: Classes, owner: Definition) -> Iterator[tuple[str, Member]]:
    """The first definition of each method in the classes of vLLM that a class is made from."""
    seen: set[str] = set()
    for each in classes.order(owner):
        body = each.node.body if _is_vllms(each) and isinstance(each.node, ast.ClassDef) else []
        for node in body:
            if isinstance(node, Function) and node.name not in seen:
                seen.add(node.name)
                yield node.name, Member(each, node)


def _bound_signature(member: Member) -> inspect.Signature:
    node = member.node
    is_bound = "staticmethod" not in decorators(node)
    return signature_of(node, is_bound=is_bound)  # type: ignore[arg-type]


def _is_vllms(definition: Definition) -> bool:
    return definition is not OUTSIDE and definition.module.name.split(".")[0] == VLLM


def _where(member: Member) -> str:
    return Definition(member.owner.module, member.node).where
