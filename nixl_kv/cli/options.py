"""The options of `nixl-kv plan`, as records.

The command has a few records as parameters; typer wants one parameter for each option.
`with_options_of_records` turns the one into the other: each field of each record is an option.
"""

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from typer import Option

Command: TypeAlias = Callable[..., None]

_model: Final = functools.partial(Option, rich_help_panel="The model")
_engines: Final = functools.partial(Option, rich_help_panel="The engines")
_output: Final = functools.partial(Option, rich_help_panel="The answer")


@dataclass(frozen=True)
class ModelOptions:
    """A model's KV cache: a configuration, or its numbers; numbers that are given win."""

    model_config: Annotated[
        Path | None, _model(help="A Hugging Face config.json, or its folder.")
    ] = None
    layers: Annotated[int | None, _model(min=1, help="Layers that have a KV cache.")] = None
    kv_heads: Annotated[int | None, _model(min=1, help="KV heads of each layer.")] = None
    head_size: Annotated[int | None, _model(min=1, help="Elements of K, and of V, of a head.")] = (
        None
    )
    latent: Annotated[
        int | None,
        _model(min=1, help="Elements of a latent cache's one head, in place of heads (MLA)."),
    ] = None
    dtype: Annotated[
        str | None, _model(help="Of the cache: float32, bfloat16, float16, fp8, int8.")
    ] = None
    state_dtype: Annotated[
        str | None, _model(help="Of temporal states, as --mamba-ssm-cache-dtype says it.")
    ] = None
    window: Annotated[int | None, _model(min=1, help="Tokens that sliding layers look back.")] = (
        None
    )
    sliding: Annotated[
        str | None, _model(help="How many layers slide to each that does not, such as 5:1.")
    ] = None


@dataclass(frozen=True)
class EngineOptions:
    """Two engines: how each is cut, or where each runs."""

    prefill: Annotated[
        str | None,
        _engines(
            metavar="NUMBERS",
            help="How prefill is cut: tp=1,pp=1,block=16,layout=LBHNC,blocks=30000,"
            "per-entry=1,memory=VRAM,dcp=1,interleave=0; what is left out is as here.",
        ),
    ] = None
    decode: Annotated[str | None, _engines(metavar="NUMBERS", help="The same of decode.")] = None
    prefill_at: Annotated[
        str | None, _engines(metavar="HOST:PORT", help="Ask a running engine instead.")
    ] = None
    decode_at: Annotated[str | None, _engines(metavar="HOST:PORT", help="The same of decode.")] = (
        None
    )
    key_file: Annotated[
        Path | None,
        _engines(
            help="The key of the engines that are asked. Default: NIXL_KV_KEY, else the key that "
            "this user's engines on this machine share."
        ),
    ] = None
    insecure: Annotated[
        bool, _engines("--insecure", help="The engines that are asked have no key.")
    ] = False
    blocks: Annotated[
        int,
        _engines(min=1, help="Blocks of each rank's cache, where the engine's numbers have none."),
    ] = 30_000


@dataclass(frozen=True)
class OutputOptions:
    """What is printed or drawn, and how."""

    tokens: Annotated[
        int | None,
        _output(
            min=1,
            help="Tokens of the prompt that descriptors are counted for. "
            "Default: 16384, or what the caches have room for.",
        ),
    ] = None
    svg: Annotated[
        Path | None,
        _output(help="Draw it into this file; needs the extra plot: pip install nixl_kv\\[plot]."),
    ] = None
    json: Annotated[bool, _output("--json", help="Print JSON, with all figures as numbers.")] = (
        False
    )


def with_options_of_records(command: Command) -> Command:
    """A function that typer can read, which calls the command with its records."""
    records = typing.get_type_hints(command)
    del records["return"]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(
            **{
                name: record(**{field.name: values[field.name] for field in fields(record)})
                for name, record in records.items()
            }
        )

    parameters = [p for record in records.values() for p in _parameters(record)]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    setattr(run, "__signature__", inspect.Signature(parameters))  # noqa: B010 - mypy knows no such
    return run


def _parameters(record: type) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(record, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(record)
    ]
