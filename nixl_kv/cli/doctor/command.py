"""The command `nixl-kv doctor`: runs all checks, and prints each group when it is done."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from nixl_kv.cli.client import endpoints_at
from nixl_kv.cli.doctor import engines, host, report, settings
from nixl_kv.cli.doctor.report import Group, skipped
from nixl_kv.cli.options import AsJson, Insecure, KeyFile, errors_exit
from nixl_kv.cli.tables import open_console
from nixl_kv.config import HOST_VARIABLE, PORT_VARIABLE, Config

NO_ADDRESS: Final = (
    f"neither --config nor {HOST_VARIABLE} or {PORT_VARIABLE} says how an engine of this host is "
    "reached"
)


def doctor(
    at: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="This host's engine, if it runs."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="An engine to reach from here. May be repeated."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="The engine's --kv-transfer-config, or its kv_connector_extra_config alone.",
        ),
    ] = None,
    key_file: KeyFile = None,
    *,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Check this host, an engine's settings, and the engines that it must reach.

    Run it before an engine starts, or while engines run, on any host or in any pod. It starts
    nothing and changes nothing. It exits with 0, with 1 for warnings, or with 2 for errors.
    """
    with errors_exit():
        setup = settings.Setup.parse(config)
        if at is not None:
            endpoints_at(at, option="--at")
    console, done = open_console(), []
    for group in _groups(setup, at, peer or [], key_file, insecure=insecure):
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
    setup: settings.Setup,
    at: str | None,
    peers: list[str],
    key_file: Path | None,
    *,
    insecure: bool,
) -> Iterator[Group]:
    """Each group of checks, as soon as it is done."""
    environ = os.environ
    gpus = host.find_gpus()
    yield report.run("versions", host.check_versions)
    yield report.run("limits", host.check_limits)
    yield report.run("transports", lambda: host.check_transports(environ))
    yield "GPUs", [host.check_gpus(gpus)]
    read = settings.read_config(setup, environ)
    config = read if isinstance(read, Config) else None
    yield report.run("settings", lambda: settings.check_settings(setup, read, environ))
    keys, checks = settings.check_key(config, key_file, insecure=insecure)
    yield "key", checks
    is_given = setup.is_given or any(environ.get(name) for name in (HOST_VARIABLE, PORT_VARIABLE))
    if config is not None and at is None:
        if is_given or not peers:
            yield report.run(
                "address",
                lambda: settings.check_address(config, keys, peers, is_prefill=setup.is_prefill),
            )
        else:
            yield "address", [skipped("host and port", NO_ADDRESS)]
    own, found = None, []
    if at is not None:
        own, checks = engines.check_engine(at, "--at", keys, config)
        yield f"engine {at}", checks
    for peer in peers:
        engine, checks = engines.check_engine(peer, "--peer", keys, config if is_given else None)
        found += [] if engine is None else [engine]
        yield f"peer {peer}", checks
    if own or found:
        yield report.run("engines together", lambda: engines.check_together(own, found))
