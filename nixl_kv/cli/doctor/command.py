"""The command `nixl-kv doctor`: runs all checks, and prints each group when it is done."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from nixl_kv.cli.client import endpoints_at
from nixl_kv.cli.doctor import engines, host, report, settings
from nixl_kv.cli.doctor.report import Check, Group, skipped
from nixl_kv.cli.options import AsJson, Insecure, KeyFile, errors_exit
from nixl_kv.cli.tables import open_console
from nixl_kv.config import HOST_VARIABLE, PORT_VARIABLE, Config

NO_ADDRESS: Final = (
    f"neither --config nor {HOST_VARIABLE} or {PORT_VARIABLE} says how an engine of this host is "
    "reached"
)


@dataclass(frozen=True)
class Options:
    setup: settings.Setup
    peers: tuple[str, ...] = ()
    at: str | None = None  # the engine of this host, which runs
    key_file: Path | None = None
    insecure: bool = False
    self_test: bool = False


def doctor(  # noqa: PLR0913 - options
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
    self_test: Annotated[
        bool,
        typer.Option("--self-test", help="Two processes here read 64 MiB from each other."),
    ] = False,
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
    options = Options(setup, tuple(peer or ()), at, key_file, insecure, self_test)
    console, done = open_console(), []
    for group in groups(options):
        done.append(group)
        if not as_json:
            report.print_group(console, group)
    if as_json:
        typer.echo(json.dumps(report.as_json(done), indent=2))
    else:
        report.print_summary(console, done)
    if code := report.exit_status(done):
        raise typer.Exit(code)


def groups(options: Options) -> Iterator[Group]:
    """Each group of checks, as soon as it is done."""
    setup, environ = options.setup, os.environ
    gpus = host.find_gpus()
    yield report.run("versions", host.check_versions)
    yield report.run("limits", host.check_limits)
    yield report.run("transports", lambda: host.check_transports(environ))
    yield report.run("GPUs", lambda: host.check_gpus(gpus))
    read = settings.read_config(setup, environ)
    config = read if isinstance(read, Config) else None
    yield report.run("settings", lambda: settings.check_settings(setup, read, environ))
    keys, checks = settings.check_key(config, options.key_file, insecure=options.insecure)
    yield "key", checks
    is_given = setup.is_given or any(environ.get(name) for name in (HOST_VARIABLE, PORT_VARIABLE))
    if config is not None and options.at is None:
        if is_given or not options.peers:
            yield report.run(
                "address", lambda: settings.check_address(config, keys, options.peers, setup)
            )
        else:
            yield "address", [skipped("host and port", NO_ADDRESS)]
    found: list[engines.Engine] = []
    asked = [("--at", options.at)] if options.at is not None else []
    for option, where in (*asked, *(("--peer", peer) for peer in options.peers)):
        engine, checks = engines.check_engine(where, option, keys, config if is_given else None)
        found += [] if engine is None else [engine]
        yield f"{'engine' if option == '--at' else 'peer'} {where}", checks
    if found:
        yield report.run("engines together", lambda: _together(found))
    if options.self_test:
        from nixl_kv.cli.doctor.self_test import check_reads  # noqa: PLC0415 - seldom wanted

        num_gpus = len(gpus.names) if gpus else 0
        yield report.run("self-test", lambda: check_reads(config or Config(), num_gpus))


def _together(found: list[engines.Engine]) -> Iterator[Check]:
    yield from engines.check_reverse(found)
    yield from engines.check_pairs(found)
