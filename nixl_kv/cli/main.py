"""The console script `nixl-kv`.

Exit status: 0 if decode can read prefill, 1 if it cannot, 2 if the question makes no sense.
"""

import json
from typing import Final

import typer

from nixl_kv.cli import engines, models, picture, tables
from nixl_kv.cli.figures import Comparison, compare
from nixl_kv.cli.options import EngineOptions, ModelOptions, OutputOptions, takes_records
from nixl_kv.errors import IncompatiblePeer

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
            engines.asked(str(two.prefill_at), option="--prefill-at"),
            engines.asked(str(two.decode_at), option="--decode-at"),
        )
    shape = models.model_shape(model)
    return (
        engines.planned(str(two.prefill), shape, option="--prefill", blocks=two.blocks),
        engines.planned(str(two.decode), shape, option="--decode", blocks=two.blocks),
    )
