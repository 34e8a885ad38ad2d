"""The console script `nixl-kv`.

Exit status of `plan`: 0 if decode can read prefill, 1 if it cannot, 2 if the question makes no
sense; of `status`: 0 if all ranks answered, 1 if some did not, 2 if the engine did not; of `drain`:
0 if all was finished, 1 if not in time, 2 if the engine did not answer; of `set-weights`: 0, or 2
if the label was not set; of `keygen`: 0, or 2 if no key was written.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from nixl_kv.cli import comparison_report, draining, model_config, running, status_report
from nixl_kv.cli.comparison import Comparison, compare
from nixl_kv.cli.engines import Engine, engine_from_description, engine_from_numbers
from nixl_kv.cli.options import (
    EngineOptions,
    ModelOptions,
    OutputOptions,
    with_options_of_records,
)
from nixl_kv.config import weights_label
from nixl_kv.errors import ConfigError, IncompatiblePeer, printable
from nixl_kv.keys import write_key_file

CANNOT: Final = 1
NO_ANSWER: Final = 1
NOT_IN_TIME: Final = 1
NONSENSE: Final = 2

MAX_ERROR: Final = 10_000
"""Characters of an error message: the engine that was asked may have sent part of it."""

At: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where the engine is described. Default: as an engine with this environment.",
    ),
]
KeyFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="The engine's key. Default: NIXL_KV_KEY, else the key that this user's engines on "
        "this machine share."
    ),
]

Insecure: TypeAlias = Annotated[
    bool, typer.Option("--insecure", help="The engine has no key: it runs with insecure.")
]

app = typer.Typer(
    name="nixl-kv",
    help="Tools for nixl_kv, the KV-cache connector for vLLM.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def main() -> None:
    """Tools for nixl_kv, the KV-cache connector for vLLM."""


@app.command()
@with_options_of_records
def plan(model: ModelOptions, engines: EngineOptions, output: OutputOptions) -> None:
    """Show who reads what from whom, and in how many pieces.

    Two engines are given by numbers, or run and are asked. Nothing is transferred.
    """
    with _errors_exit():
        prefill, decode = _engines(model, engines)
        comparison = compare(decode, prefill, output.tokens)
        if output.json:
            record = comparison_report.comparison_as_json(comparison, prefill, decode)
            typer.echo(json.dumps(record, indent=2))
        else:
            comparison_report.print_comparison(comparison, prefill, decode)
        if output.svg and comparison.pairs:
            _draw(output.svg, comparison, prefill, decode)
    if comparison.mismatches:
        raise typer.Exit(CANNOT)


@app.command()
def status(
    at: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Where the engine is described, as it logs at start."
        ),
    ],
    key_file: KeyFile = None,
    request: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Also tell what happened to the requests whose id contains this."
        ),
    ] = None,
    *,
    insecure: Insecure = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all fields.")] = False,
) -> None:
    """Show what a running engine is doing, and what happened to a request.

    Prints the peers, links, offers and loads of each rank, and what each waits for.
    """
    with _errors_exit():
        keys = running.read_keys(key_file, insecure=insecure)
        description = running.describe_at(at, option="--at", keys=keys)
    answers = running.rank_statuses(description, keys, request or "")
    if as_json:
        record = status_report.status_as_json(description, answers)
        typer.echo(json.dumps(record, indent=2))
    else:
        status_report.print_status(description, answers, request)
    if any(isinstance(answer, Exception) for _, answer in answers):
        raise typer.Exit(NO_ANSWER)


@app.command()
def drain(
    at: At = None,
    key_file: KeyFile = None,
    timeout: Annotated[
        float, typer.Option(min=0, metavar="S", help="How long to wait, in seconds.")
    ] = 60,
    *,
    insecure: Insecure = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Let a draining engine offer again, and do not wait.")
    ] = False,
) -> None:
    """Let an engine finish what it has begun, before it is stopped.

    It offers nothing that arrives from now on; what it has offered, or will, is read or runs out.
    """
    with _errors_exit():
        where = at or running.own_address(os.environ)
        keys = running.read_keys(key_file, insecure=insecure)
        if undo:
            draining.undo(where, keys)
            typer.echo("the engine offers again")
            return
        left = draining.drain(where, keys, timeout, typer.echo)
    if left:
        typer.echo(f"not drained within {timeout:g} s", err=True)
        raise typer.Exit(NOT_IN_TIME)
    typer.echo("drained")


@app.command()
def set_weights(
    label: Annotated[str, typer.Argument(help="Such as the trainer's step.")],
    at: At = None,
    key_file: KeyFile = None,
) -> None:
    """Tell a running engine that its weights are others, and how they are labelled.

    Decode reads KV only from a prefill engine whose weights have the same label.
    """
    with _errors_exit():
        where = at or running.own_address(os.environ)
        weights = weights_label("LABEL", label)
        ask = partial(running.set_weights, weights=weights, keys=running.read_keys(key_file))
        former = running.ask_first(where, ask, option="--at")
    typer.echo(f"the weights of the engine at {where} are {label!r}; they were {former!r}")


@app.command()
def keygen(
    path: Annotated[Path, typer.Argument(help="A new file; never one that exists already.")],
) -> None:
    """Make the key that prefill and decode engines share."""
    with _errors_exit():
        keys = write_key_file(path)
    typer.echo(
        f"{path} has a new key, with the fingerprint {keys.fingerprint}. Whoever can read this "
        "file can do what an engine can.\n\n"
        "Next: copy it to the machine of every prefill and decode engine, over a channel that "
        "nobody reads, as a file of the user that runs the engine, with mode 0600 or 0400; and "
        "start each with\n\n"
        f'    "kv_connector_extra_config": {{"key_file": {json.dumps(str(path.absolute()))}}}\n\n'
        "Each engine logs the fingerprint of its key at the start."
    )


@contextlib.contextmanager
def _errors_exit() -> Iterator[None]:
    """Print an error, and end the program with its status."""
    try:
        yield
    except (ValueError, ConfigError, IncompatiblePeer) as error:
        typer.echo(f"error: {printable(str(error), MAX_ERROR)}", err=True)
        code = CANNOT if isinstance(error, IncompatiblePeer) else NONSENSE
        raise typer.Exit(code) from error


def _engines(model: ModelOptions, engines: EngineOptions) -> tuple[Engine, Engine]:
    """Prefill and decode."""
    numbers = engines.prefill, engines.decode
    addresses = engines.prefill_at, engines.decode_at
    if all(addresses) and not any(numbers):
        _check_no_model(model)
        keys = running.read_keys(engines.key_file, insecure=engines.insecure)
        prefill, decode = (
            running.describe_at(str(where), option=option, keys=keys)
            for where, option in zip(addresses, ("--prefill-at", "--decode-at"), strict=True)
        )
        return engine_from_description(prefill), engine_from_description(decode)
    if not all(numbers) or any(addresses):
        raise ValueError(
            "allowed: --prefill and --decode with a model's numbers, "
            "or --prefill-at and --decode-at"
        )
    shape, blocks = model_config.model_shape(model), engines.blocks
    return (
        engine_from_numbers(str(numbers[0]), shape, option="--prefill", blocks=blocks),
        engine_from_numbers(str(numbers[1]), shape, option="--decode", blocks=blocks),
    )


def _check_no_model(options: ModelOptions) -> None:
    """Running engines know their model."""
    given = [field.name for field in fields(options) if getattr(options, field.name) is not None]
    if given:
        option = given[0].replace("_", "-")
        raise ValueError(f"--{option} is given; allowed: no model's numbers with running engines")


def _draw(path: Path, comparison: Comparison, prefill: Engine, decode: Engine) -> None:
    """Write the picture."""
    try:
        from nixl_kv.cli import drawing  # noqa: PLC0415 - matplotlib: a second, and an extra

        path.write_text(drawing.draw(comparison, prefill, decode), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--svg {path}: {error}") from error
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--svg needs {error.name}: install the extra `plot`, pip install 'nixl_kv[plot]'"
        ) from error
