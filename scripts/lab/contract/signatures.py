"""What a function accepts, and whether a call fits."""

import ast
import inspect
from typing import Any, Final

POSITIONAL: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def signature_of(
    function: ast.FunctionDef | ast.AsyncFunctionDef, *, is_bound: bool
) -> inspect.Signature:
    """Of a function; bound: without the first parameter."""
    given = function.args
    ordered = [*given.posonlyargs, *given.args]
    with_default = len(ordered) - len(given.defaults)
    parameters = [
        inspect.Parameter(
            each.arg,
            POSITIONAL[number >= len(given.posonlyargs)],
            default=None if number >= with_default else inspect.Parameter.empty,
        )
        for number, each in enumerate(ordered)
    ][is_bound:]
    if given.vararg is not None:
        parameters.append(inspect.Parameter(given.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    parameters += [
        inspect.Parameter(
            each.arg,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is None else None,
        )
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg is not None:
        parameters.append(inspect.Parameter(given.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def why_unfit(signature: inspect.Signature, call: ast.Call) -> str:
    """What is wrong with the arguments of a call, in words; empty if nothing is.

    Of a call with `*` or `**` only what is written out is looked at.
    """
    positional = [each for each in call.args if not isinstance(each, ast.Starred)]
    keywords = {each.arg: None for each in call.keywords if each.arg is not None}
    is_whole = len(positional) == len(call.args) and len(keywords) == len(call.keywords)
    return _error(signature, positional, keywords, is_whole=is_whole)


def why_narrower(ours: inspect.Signature, base: inspect.Signature) -> str:
    """Which call that a base class's method accepts ours does not, in words; empty: none.

    Tried are all arguments by position, all by name, and only those that must be given.
    """
    named = [each for each in base.parameters.values() if each.kind in POSITIONAL]
    keyword_only = {
        each.name: None
        for each in base.parameters.values()
        if each.kind is inspect.Parameter.KEYWORD_ONLY
    }
    required = [each for each in named if each.default is inspect.Parameter.empty]
    required_by_name = {
        name: None
        for name in keyword_only
        if base.parameters[name].default is inspect.Parameter.empty
    }
    by_name = dict.fromkeys(
        each.name for each in named if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    )
    only_by_position = [each for each in named if each.name not in by_name]
    for positional, keywords in (
        (named, keyword_only),
        (only_by_position, by_name | keyword_only),
        (required, required_by_name),
    ):
        error = _error(ours, positional, keywords, is_whole=True)
        if error:
            return error
    kinds = {each.kind for each in ours.parameters.values()}
    for each in base.parameters.values():
        is_any = each.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if is_any and each.kind not in kinds:
            return f"takes no further arguments (*{each.name} there)"
    return ""


def _error(
    signature: inspect.Signature, positional: list[Any], keywords: dict[Any, Any], *, is_whole: bool
) -> str:
    try:
        (signature.bind if is_whole else signature.bind_partial)(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return ""
