"""Run the accuracy launcher over a matrix of shapes, and print a table.

Cases come from configs/sweep.yaml. Those that need what this machine has not are skipped, with a
word why. The exit status is 0 only if a case ran, and none failed. The environment reaches the
launcher (MODEL_NAMES, VERIFY, NUM_CONCURRENT, ...), but for the knobs that make a case.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pd.accuracy_machine import Machine, detect
from pd.accuracy_models import REPO
from pd.accuracy_settings import SettingError, parse, place
from pd.cluster import end_on_signals, say_on_stderr
from pd.processes import ManagedProcess, end_children, stop_all
from pd.sweep_cases import Case, chosen, load
from pd.sweep_report import Row, print_rows, rows, write_json

CONFIG: Final = REPO / "configs" / "sweep.yaml"
LAUNCHER: Final = REPO / "scripts" / "run_accuracy_test.sh"
GRACE_S = 60.0  # the launcher ends its engines in this time
POLL_S = 0.5
BAD_SETTING = 2


def run_case(case: Case, flags: Sequence[str], log_dir: Path) -> list[Row]:
    """One run of the launcher, ended whatever happens."""
    result = log_dir / f"{case.name}.json"
    process = ManagedProcess(case.name, log_dir / f"{case.name}.log")
    for old in (result, process.log_path):  # of an earlier sweep
        old.unlink(missing_ok=True)
    say_on_stderr(f"{case.name}: {case.about}; log in {process.log_path}")
    begin = time.monotonic()
    folders = ["--json", str(result), "--log-dir", str(log_dir / case.name)]
    try:
        process.launch(["bash", str(LAUNCHER), *flags, *folders], case.environment(os.environ))
        while process.is_running():
            time.sleep(POLL_S)
    finally:
        stop_all([process], grace_s=GRACE_S)
    seconds = time.monotonic() - begin
    found = rows(case, result, exit_code=process.exit_code(), seconds=seconds)
    for row in found:
        say_on_stderr(f"  {row.verdict} ({row.seconds:.0f} s)")
    return found


def run_all(cases: Sequence[Case], machine: Machine, options: argparse.Namespace) -> int:
    """All cases; the table is printed also if a signal ends it. The exit status."""
    log_dir = (options.log_dir or Path(tempfile.mkdtemp(prefix="nixl-kv-sweep-"))).resolve()
    log_dir.mkdir(parents=True, exist_ok=True)
    found: list[Row] = []
    try:
        for case in cases:
            lacking = case.missing(machine)
            if lacking:
                found.append(Row(case, lacking, skipped=True))
            else:
                found += run_case(case, launcher_flags(options), log_dir)
    finally:
        print_rows(found)
        write_json(log_dir / "sweep.json", found)
        say_on_stderr(f"logs in {log_dir}")
    ran = [row for row in found if not row.skipped]
    failed = sum(row.failed for row in ran)
    print(f"{len(ran) - failed} ok, {failed} failed, {len(found) - len(ran)} skipped")
    return 0 if ran and not failed else 1


def launcher_flags(options: argparse.Namespace) -> list[str]:
    """Those that it shares with the sweep."""
    limit = [] if options.limit is None else ["--limit", str(options.limit)]
    return [*(["--single"] if options.single else []), *limit]


def check(cases: Sequence[Case], machine: Machine, flags: Sequence[str]) -> None:
    """Refuse the whole sweep for a case whose knobs or flags the launcher would refuse later."""
    for case in cases:
        if not case.missing(machine):
            try:
                parse(flags, case.environment(os.environ), machine)
            except SettingError as error:
                raise SettingError(case.name, None, str(error)) from error


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=CONFIG, help="default: configs/sweep.yaml")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="some cases")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--single", action="store_true", help="also one engine without connector")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N items")
    parser.add_argument("--log-dir", metavar="DIR", help="default: a new folder")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run; the exit status."""
    options = parse_arguments(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_on_signals()
    try:
        options.log_dir = place("--log-dir", options.log_dir, folder=True)
        cases = chosen(load(options.config), options.only)
        machine = detect(os.environ)
        if options.list:
            for case in cases:
                lacking = case.missing(machine)
                print(f"{case.name:20} {case.about}{f' ({lacking})' if lacking else ''}")
            return 0
        check(cases, machine, launcher_flags(options))
        return run_all(cases, machine, options)
    except SettingError as error:
        print(error, file=sys.stderr)
        return BAD_SETTING
    except KeyboardInterrupt:
        print("interrupted: everything is ended", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        end_children(os.getpid())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
