"""The console script `nixl-kv`.

Exit status of `plan`: 0 if decode can read prefill, 1 if it cannot, 2 if the question makes no
sense; of `keygen`: 0, or 2 if no key was written.
"""

import json
from pathlib import Path
from typing import Annotated, Final

import typer

from nixl_kv.cli import engines, models, picture, tables
from nixl_kv.cli.figures import Comparison, compare
from nixl_kv.cli.options import EngineOptions, ModelOptions, OutputOptions, takes_records
from nixl_kv.errors import ConfigError, IncompatiblePeer
from nixl_kv.keys import write_key_file

CANNOT: Final = 1
NONSENSE: Final = 2

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
@takes_records
def plan(model: ModelOptions, two: EngineOptions, output: OutputOptions) -> None:
    """Show who reads what from whom, and in how many pieces.

    Two engines are given by numbers, or run and are asked. Nothing is transferred.
    """
    try:
        found = _answer(model, two, output)
    except (ValueError, IncompatiblePeer) as error:
        typer.echo(f"error: {error}", err=True)
        refused = isinstance(error, IncompatiblePeer)
        raise typer.Exit(CANNOT if refused else NONSENSE) from error
    if found.mismatches:
        raise typer.Exit(CANNOT)


@app.command()
def keygen(
    path: Annotated[Path, typer.Argument(help="A new file; never one that exists already.")],
) -> None:
    """Make the key that prefill and decode engines share."""
    try:
        keys = write_key_file(path)
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(NONSENSE) from error
    typer.echo(
        f"{path} has a new key, with the fingerprint {keys.fingerprint}. Whoever can read this "
        "file can do what an engine can.\n\n"
        "Next: copy it to the machine of every prefill and decode engine, over a channel that "
        "nobody reads, as a file of the user that runs the engine, with mode 0600 or 0400; and "
        "start each with\n\n"
        f'    "kv_connector_extra_config": {{"key_file": {json.dumps(str(path.absolute()))}}}\n\n'
        "Each engine logs the fingerprint of its key at the start."
    )


def _answer(model: ModelOptions, two: EngineOptions, output: OutputOptions) -> Comparison:
    """Print it, and draw it if that is asked for."""
    prefill, decode = _engines(model, two)
    found = compare(decode, prefill, output.tokens)
    if output.json:
        typer.echo(json.dumps(tables.as_json(found, prefill, decode), indent=2))
    else:
        tables.print_comparison(found, prefill, decode)
    if output.svg and found.links:
        try:
            output.svg.write_text(picture.draw(found, prefill, decode), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--svg {output.svg}: {error}") from error
    return found


def _engines(model: ModelOptions, two: EngineOptions) -> tuple[engines.Engine, engines.Engine]:
    """Prefill and decode."""
    if engines.running(two):
        engines.check_no_model(model)
        return (
            engines.asked(str(two.prefill_at), option="--prefill-at", key_file=two.key_file),
            engines.asked(str(two.decode_at), option="--decode-at", key_file=two.key_file),
        )
    shape = models.model_shape(model)
    return (
        engines.planned(str(two.prefill), shape, option="--prefill", blocks=two.blocks),
        engines.planned(str(two.decode), shape, option="--decode", blocks=two.blocks),
    )
