"""The console script `nixl-kv`: commands, options and exit statuses.

| command       | 0                           | 1                          | 2                    |
|---------------|-----------------------------|----------------------------|----------------------|
| `plan`        | decode can read prefill     | it cannot                  | bad option, no answer |
| `status`      | all ranks answered          | some ranks did not         | bad option, no answer |
| `trace`       | all ranks answered          | some ranks did not         | bad option, no answer |
| `drain`       | the engine has finished     | it has not, in time        | bad option, no answer |
| `set-weights` | the label is set            |                            | it is not set        |
| `keygen`      | the key is written          |                            | it is not written    |
"""

import contextlib
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from nixl_kv.cli import client, compare, trace
from nixl_kv.cli import status as status_report
from nixl_kv.config import weights_label
from nixl_kv.errors import ConfigError, IncompatiblePeer, printable
from nixl_kv.keys import write_key_file

FAILED: Final = 1
BAD_INPUT: Final = 2

MAX_ERROR: Final = 10_000
"""Characters of an error message, parts of which the engine may have sent."""

AT_HELP: Final = "The address of the engine's directory, which the engine logs at start."

At: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help=f"{AT_HELP} Default: the address of an engine with the same environment variables.",
    ),
]
KeyFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="The file with the engine's key. Default: the key in NIXL_KV_KEY, else the key that "
        "all engines of this user on this host share."
    ),
]
Insecure: TypeAlias = Annotated[
    bool, typer.Option("--insecure", help="The engine runs with `insecure` and has no key.")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")]

app = typer.Typer(name="nixl-kv", no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Tools for nixl_kv, the KV-cache connector for vLLM."""


@app.command()
def plan(
    prefill_at: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The address of the prefill engine.")
    ],
    decode_at: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The address of the decode engine.")
    ],
    key_file: KeyFile = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="The length of the example prompt. Default: up to 16384."),
    ] = None,
    *,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Check that two running engines fit, and count the descriptors of a transfer.

    Shows which decode rank reads which prefill rank. Nothing is transferred.
    """
    with _errors_exit():
        keys = client.read_keys(key_file, insecure=insecure)
        prefill = client.describe_at(prefill_at, keys, option="--prefill-at")
        decode = client.describe_at(decode_at, keys, option="--decode-at")
        comparison = compare.compare(decode, prefill, tokens)
    if as_json:
        typer.echo(json.dumps(comparison, indent=2))
    else:
        compare.print_comparison(comparison)
    if comparison["mismatches"]:
        raise typer.Exit(FAILED)


@app.command()
def status(
    at: Annotated[str, typer.Option(metavar="HOST:PORT", help=AT_HELP)],
    key_file: KeyFile = None,
    request: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Show the events of all requests whose id contains this."),
    ] = None,
    *,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of a running engine, and the history of a request.

    Lists the peers, links, offers and loads of each rank, and what each of them waits for.
    """
    with _errors_exit():
        keys = client.read_keys(key_file, insecure=insecure)
        description = client.describe_at(at, keys)
    answers = client.rank_statuses(description, keys, request or "")
    if as_json:
        typer.echo(json.dumps(status_report.status_as_json(description, answers), indent=2))
    else:
        status_report.print_status(description, answers, request)
    if any(isinstance(answer, Exception) for _, answer in answers):
        raise typer.Exit(FAILED)


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
        bool, typer.Option("--undo", help="Let a draining engine offer again; do not wait.")
    ] = False,
) -> None:
    """Let an engine finish its transfers before you stop it.

    The engine offers no request that arrives from now on. It keeps earlier offers until decode has
    read them or they expire.
    """
    with _errors_exit():
        where = at or client.own_address(os.environ)
        keys = client.read_keys(key_file, insecure=insecure)
        if undo:
            client.ask_first(where, partial(client.ask_to_drain, keys=keys, undo=True))
            typer.echo("the engine offers again")
            return
        is_done = client.drain(where, keys, timeout, typer.echo)
    if not is_done:
        typer.echo(f"not drained within {timeout:g} s", err=True)
        raise typer.Exit(FAILED)
    typer.echo("drained")


@app.command()
def set_weights(
    label: Annotated[str, typer.Argument(help="The new label, such as the trainer's step.")],
    at: At = None,
    key_file: KeyFile = None,
) -> None:
    """Change the weights label of a running engine, after you have changed its weights.

    Decode reads KV only from a prefill engine with the same label.
    """
    with _errors_exit():
        where = at or client.own_address(os.environ)
        weights = weights_label("LABEL", label)
        ask = partial(client.set_weights, weights=weights, keys=client.read_keys(key_file))
        former = client.ask_first(where, ask)
    typer.echo(f"the weights label of the engine at {where} is {label!r}; it was {former!r}")


@app.command()
def keygen(
    path: Annotated[Path, typer.Argument(help="A new file. An existing file is an error.")],
) -> None:
    """Generate the key that all prefill and decode engines share."""
    with _errors_exit():
        keys = write_key_file(path)
    typer.echo(
        f"{path} contains a new key with the fingerprint {keys.fingerprint}. Anyone who can read "
        "this file can act as an engine.\n\n"
        "Next, copy the file over an encrypted channel to the host of every prefill and decode "
        "engine. The user that runs the engine must own it, with mode 0600 or 0400. Start each "
        "engine with\n\n"
        f'    "kv_connector_extra_config": {{"key_file": {json.dumps(str(path.absolute()))}}}\n\n'
        "Each engine logs the fingerprint of its key at start."
    )


@contextlib.contextmanager
def _errors_exit() -> Iterator[None]:
    """Print an error to stderr, and exit with its status."""
    try:
        yield
    except (ValueError, ConfigError, IncompatiblePeer) as error:
        typer.echo(f"error: {printable(str(error), MAX_ERROR)}", err=True)
        raise typer.Exit(FAILED if isinstance(error, IncompatiblePeer) else BAD_INPUT) from error


app.command()(_errors_exit()(trace.trace))
