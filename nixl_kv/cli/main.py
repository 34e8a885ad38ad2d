"""The console script `nixl-kv`: commands, options and exit statuses.

| command       | 0                           | 1                          | 2                    |
|---------------|-----------------------------|----------------------------|----------------------|
| `doctor`      | all checks passed           | there are warnings         | errors, or bad option |
| `ready`       | the engine serves           | it does not                | bad option           |
| `plan`        | decode can read prefill, or a ratio | it cannot          | bad option, no answer |
| `status`      | all ranks answered          | some ranks did not         | bad option, no answer |
| `drain`       | the engine has finished     | it has not, in time        | bad option, no answer |
| `set-weights` | the label is set            |                            | it is not set        |
| `keygen`      | the key is written          |                            | it is not written    |
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

import nixl_kv
from nixl_kv.cli import client, compare
from nixl_kv.cli import ratio as ratios
from nixl_kv.cli import status as status_report
from nixl_kv.cli.doctor.command import doctor
from nixl_kv.cli.options import AT_HELP, FAILED, AsJson, At, Insecure, KeyFile, errors_exit, fail
from nixl_kv.cli.tables import duration_text, open_console
from nixl_kv.config import weights_label
from nixl_kv.keys import ToolsKeys, write_key_file, write_tools_key_file
from nixl_kv.transport.zmq import public_key

# `nixl-kv ready` reports that an engine does not answer. Kubernetes gives a probe one second by
# default.
READY_TIMEOUT_S: Final = 0.8

app = typer.Typer(name="nixl-kv", pretty_exceptions_enable=False)
app.command()(doctor)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version, and exit.")
    ] = False,
) -> None:
    """Tools for nixl_kv, the KV-cache connector for vLLM."""
    if version:
        typer.echo(f"nixl-kv {nixl_kv.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def plan(  # noqa: PLR0913 - options
    *,
    prefill_at: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The address of the prefill engine.")
    ] = None,
    decode_at: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The address of the decode engine.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second, of all engines.")] = None,
    prompt: Annotated[float | None, typer.Option(help="Tokens of a prompt, on average.")] = None,
    answer: Annotated[float | None, typer.Option(help="Tokens of an answer, on average.")] = None,
    prefill_tokens: Annotated[
        float | None,
        typer.Option(help="Tokens per second that one prefill engine computes, measured."),
    ] = None,
    decode_streams: Annotated[
        float | None,
        typer.Option(help="Answers that one decode engine generates at once, measured."),
    ] = None,
    gap_ms: Annotated[
        float | None,
        typer.Option(help="The mean gap between two tokens that these answers may have."),
    ] = None,
    key_file: KeyFile = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Check that a decode engine can read a prefill engine, or count the engines that a load needs.

    With --prefill-at and --decode-at, shows which decode rank reads which prefill rank, or what
    differs. Nothing is transferred. With --rate, asks no engine, and shows the ratio of prefill and
    decode engines with the reason.
    """
    addresses = {"--prefill-at": prefill_at, "--decode-at": decode_at}
    load = {
        "--rate": rate,
        "--prompt": prompt,
        "--answer": answer,
        "--prefill-tokens": prefill_tokens,
        "--decode-streams": decode_streams,
        "--gap-ms": gap_ms,
    }
    with errors_exit():
        if any(value is not None for value in load.values()):
            if given := [name for name, value in addresses.items() if value is not None]:
                raise ValueError(f"{given[0]} is given; allowed: not with the options of a load")
            _plan_ratio(load, as_json=as_json)
            return
        if prefill_at is None or decode_at is None:
            missing = ", ".join(name for name, value in addresses.items() if value is None)
            raise ValueError(
                f"missing: {missing}; give --prefill-at and --decode-at to compare two engines, or "
                f"{', '.join(load)} to find out how many engines a load needs"
            )
        keys = client.read_keys(key_file, insecure=insecure)
        prefill = client.engine_at(prefill_at, keys, option="--prefill-at", has_ranks=False)
        decode = client.engine_at(decode_at, keys, option="--decode-at", has_ranks=False)
        comparison = compare.judge(decode, prefill)
    if as_json:
        typer.echo(json.dumps(comparison, indent=2))
    else:
        compare.print_comparison(comparison)
    if comparison["mismatches"]:
        raise typer.Exit(FAILED)


def _plan_ratio(load: Mapping[str, float | None], *, as_json: bool) -> None:
    ratio = ratios.ratio_from(load)
    if as_json:
        typer.echo(json.dumps(ratios.as_json(ratio), indent=2))
    else:
        ratios.print_ratio(ratio)


@app.command()
def status(
    at: Annotated[str, typer.Option(metavar="HOST:PORT", help=AT_HELP)],
    key_file: KeyFile = None,
    request: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Show the events of all requests whose id contains this."),
    ] = None,
    watch: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Show it again and again, until Ctrl-C."),
    ] = None,
    *,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of a running engine, its failures, and the history of a request.

    Lists the peers, links, offers and loads of each rank, what each of them waits for, and the
    loads that failed in the last five minutes by peer and reason.
    """
    with errors_exit():
        keys = client.read_keys(key_file, insecure=insecure)
        client.endpoints_at(at, option="--at")
    with contextlib.suppress(KeyboardInterrupt):  # the way to end --watch
        while watch is not None:
            open_console().clear()
            typer.echo(f"every {duration_text(watch)}, {status_report.time_text(time.time())}")
            with contextlib.suppress(typer.Exit), errors_exit():
                _show_status(at, keys, request, as_json=as_json)
            time.sleep(watch)
    if watch is None:
        with errors_exit():
            has_all = _show_status(at, keys, request, as_json=as_json)
        if not has_all:
            raise typer.Exit(FAILED)


def _show_status(at: str, keys: client.AnyKeys, request: str | None, *, as_json: bool) -> bool:
    """Whether all ranks answered."""
    answer = client.engine_at(at, keys, request or "")
    if as_json:
        typer.echo(json.dumps(status_report.status_as_json(answer), indent=2))
    else:
        status_report.print_status(open_console(), answer, request)
    return not any(isinstance(status, Exception) for _, status in answer.ranks)


@app.command()
def ready(
    at: At = None,
    key_file: KeyFile = None,
    *,
    insecure: Insecure = False,
) -> None:
    """Exit with 0 if an engine is described and does not drain, for a readiness probe.

    Otherwise prints why, and exits with 1. The engine has 0.8 s to answer.
    """
    with errors_exit():
        where = at or client.own_address(os.environ)
        keys = client.read_keys(key_file, insecure=insecure)
        ask = partial(client.engine_status, keys=keys, timeout_s=READY_TIMEOUT_S)
        try:
            answer = client.ask_first(where, ask)
        except client.NoAnswer as error:
            fail(f"not ready: {error}")
    engine, draining_s = answer.facts.get("engine"), answer.facts.get("draining_s")
    if engine is None:
        fail("not ready: the engine is still starting")
    if isinstance(draining_s, float):
        fail(
            f"not ready: engine {engine} has been draining for {duration_text(draining_s)}; "
            "`nixl-kv drain --undo` ends this"
        )
    typer.echo(f"ready: engine {engine}, {answer.totals.get('ranks')} ranks")


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
    with errors_exit():
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
    with errors_exit():
        where = at or client.own_address(os.environ)
        weights = weights_label("LABEL", label)
        ask = partial(client.set_weights, weights=weights, keys=client.read_keys(key_file))
        former = client.ask_first(where, ask)
    typer.echo(f"the weights label of the engine at {where} is {label!r}; it was {former!r}")


@app.command()
def keygen(
    path: Annotated[Path, typer.Argument(help="A new file. An existing file is an error.")],
    key_file: KeyFile = None,
    *,
    tools: Annotated[
        bool,
        typer.Option(
            "--tools",
            help="Derive a second key from the engines' key (--key-file), for hosts that only ask: "
            "it allows status, ready, doctor and plan.",
        ),
    ] = False,
) -> None:
    """Generate the key that all prefill and decode engines share, or a key for tools."""
    if tools:
        _keygen_tools(path, key_file)
        return
    with errors_exit():
        if key_file is not None:
            raise ValueError("--key-file is given; allowed: only with --tools")
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


def _keygen_tools(path: Path, key_file: Path | None) -> None:
    with errors_exit():
        keys = client.read_keys(key_file)
        if keys is None or isinstance(keys, ToolsKeys):
            found = "no key was found" if keys is None else "the key is one for tools already"
            raise ValueError(
                f"--tools: {found}; allowed: the engines' key, in --key-file or NIXL_KV_KEY"
            )
        write_tools_key_file(path, keys, public_key(keys.server))
    typer.echo(
        f"{path} contains the tools' key of the engines with the fingerprint {keys.fingerprint}. "
        "It allows `nixl-kv status`, `ready`, `doctor` and `plan`, with --key-file or in "
        "NIXL_KV_KEY. It reads no KV, and the engines' key cannot be computed from it. `nixl-kv "
        "drain` and `set-weights` need the engines' key."
    )
