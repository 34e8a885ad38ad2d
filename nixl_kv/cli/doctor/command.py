"""The command `nixl-kv doctor`: runs all checks, and prints each group when it is done."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from nixl_kv.cli.client import endpoints_at
from nixl_kv.cli.doctor import engines, host, report
from nixl_kv.cli.doctor.report import Group
from nixl_kv.cli.options import AsJson, Insecure, KeyFile, errors_exit
from nixl_kv.cli.tables import open_console


def doctor(
    at: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="This host's engine, if it runs."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="An engine to reach from here. May be repeated."),
    ] = None,
    key_file: KeyFile = None,
    *,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Check the limits of this shell, the key, and the engines that this host must reach.

    Run it on any host or in any pod, before engines start or while they run. It changes nothing.
    Each decode engine among those given reads 64 KiB from each prefill engine. It exits with 0,
    with 1 for warnings, or with 2 for errors.
    """
    with errors_exit():
        if at is not None:
            endpoints_at(at, option="--at")
    console, done = open_console(), []
    for group in _groups(at, peer or [], key_file, insecure=insecure):
        done.append(group)
        if not as_json:
            report.print_group(console, group)
    if as_json:
        typer.echo(json.dumps(report.as_json(done), indent=2))
    else:
        report.print_summary(console, done)
    if code := report.exit_status(done):
        raise typer.Exit(code)


def _groups(
    at: str | None, peers: list[str], key_file: Path | None, *, insecure: bool
) -> Iterator[Group]:
    """Each group of checks, as soon as it is done."""
    yield report.run("this shell", lambda: host.check_limits(os.environ))
    keys, check = engines.check_key(key_file, insecure=insecure)
    yield "key", [check]
    own, found = None, []
    if at is not None:
        own, checks = engines.check_engine(at, "--at", keys)
        yield f"engine {at}", checks
    for peer in peers:
        engine, checks = engines.check_engine(peer, "--peer", keys)
        found += [] if engine is None else [engine]
        yield f"peer {peer}", checks
    if own or found:
        yield report.run("engines together", lambda: engines.check_together(own, found, keys))
