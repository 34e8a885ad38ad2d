"""Checks the connector against releases of vLLM, which are fetched and not installed.

scripts/lab/run.sh lab.contract                  # the vLLM of this environment
scripts/lab/run.sh lab.contract 0.33.0 0.34.0    # as published in the package index
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lab.contract.check import Report, check
from lab.contract.index import NoWheelError, fetch_wheel
from lab.contract.source import Read, in_folder, in_wheel

REPO = Path(__file__).resolve().parents[3]


def ours() -> tuple[Read, list[str]]:
    """This package, and the files of it that speak with vLLM."""
    read, paths = in_folder(REPO, "nixl_kv")
    return read, [path for path in paths if path.startswith("nixl_kv/connector/")]


def check_installed() -> Report:
    """The vLLM of this environment. Imports nothing of it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("there is no vllm in this environment")
    folder = Path(spec.origin).parent
    read, paths = in_folder(folder.parent, folder.name)
    return check(ours(), (read, paths))


def check_published(version: str) -> Report:
    """A release of the package `vllm`.

    Raises:
        NoWheelError: if pip cannot fetch it.
    """
    with tempfile.TemporaryDirectory() as folder:
        return check(ours(), in_wheel(fetch_wheel(f"vllm=={version}", Path(folder))))


def show(name: str, report: Report) -> None:
    """One line of what was looked at, then all that was found."""
    counts = ", ".join(f"{count} {what}" for what, count in sorted(report.counts.items()))
    print(f"{name}: {counts}")
    if report.lacks:
        print(f"  does not have, and need not: {', '.join(sorted(report.lacks))}")
    for words in report.breaks:
        print(f"  BREAKS {words}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("versions", nargs="*", help="such as 0.33.0; none: what is installed")
    versions = parser.parse_args(arguments).versions
    reports: dict[str, Report] = {}
    try:
        for version in versions:
            reports[f"vllm {version}"] = check_published(version)
    except NoWheelError as error:
        print(error, file=sys.stderr)
        return 2
    if not versions:
        reports["vllm as installed"] = check_installed()
    for name, report in reports.items():
        show(name, report)
    good = sum(not report.breaks for report in reports.values())
    print(f"{good} of {len(reports)} fit")
    return int(good < len(reports))


if __name__ == "__main__":
    sys.exit(main())
