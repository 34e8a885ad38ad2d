"""Options that several commands have, and how commands end."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, NoReturn, TypeAlias

import typer

from nixl_kv.errors import ConfigError, IncompatiblePeer, printable

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


def fail(line: str) -> NoReturn:
    typer.echo(printable(line, MAX_ERROR), err=True)
    raise typer.Exit(FAILED)


@contextlib.contextmanager
def errors_exit() -> Iterator[None]:
    """Print an error to stderr, and exit with its status."""
    try:
        yield
    except (ValueError, ConfigError, IncompatiblePeer) as error:
        typer.echo(f"error: {printable(str(error), MAX_ERROR)}", err=True)
        raise typer.Exit(FAILED if isinstance(error, IncompatiblePeer) else BAD_INPUT) from error
