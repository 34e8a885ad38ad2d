#!/usr/bin/env python
"""Plant each mutant in a copy of this repository, and run the tests nearest to it.

    tests/mutants/run.py [--jobs N] [--only NAME ...] [--list] [--json FILE]

The same tests must pass without a mutant first. Then each mutant has to make one of its tests fail,
or to exceed the time limit. The exit status is 1 if another one survives, except those that the
list calls equivalent or that need engines; it is 2 if tests fail without a mutant.
"""

import argparse
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

# Run as a script, this folder is on the path, in which `mutants` is the list alone.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from mutants.mutants import ENDED, MUTANTS, REPO, Mutant, find, read_texts  # noqa: E402 - as above

# The slowest test files take 60 s on a busy machine with two cores, most of it to import vLLM.
LIMIT_S: Final = 300.0
PYTEST: Final = ("-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-m", "not slow")
FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)

PASSED, TESTS_FAILED = 0, 1  # exit statuses of pytest


@dataclass(frozen=True)
class Result:
    name: str
    verdict: str  # killed, survived, equivalent, needs engines, or error
    by: str  # the test that failed, or what happened instead
    seconds: float
    consequence: str


def copy_tree(to: Path) -> Path:
    """Copy all that tests may read, without git, environments, caches and compiled files."""
    skip = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "dist")
    return shutil.copytree(REPO, to, symlinks=True, ignore=skip)


def run_tests(tree: Path, paths: Sequence[str], limit_s: float | None) -> tuple[int | None, str]:
    """Pytest's exit status, or None after the time limit, and its output."""
    # A mutant may have the size of the original and be as old as it, so no compiled file must stay.
    environ = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *PYTEST, f"--basetemp={tree}.tmp", *paths]
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]
    return process.returncode, printed


@contextlib.contextmanager
def planted(mutant: Mutant, tree: Path) -> Iterator[None]:
    texts = read_texts(tree)
    path = find(mutant, texts)
    path.write_text(texts[path].replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        path.write_text(texts[path])


def try_mutant(mutant: Mutant, tree: Path) -> Result:
    began = time.monotonic()
    with planted(mutant, tree):
        status, printed = run_tests(tree, mutant.paths, LIMIT_S)
    failed = FAILED.search(printed)
    if status is None:
        verdict, by = "killed", f"the time limit of {LIMIT_S:g} s"
    elif status == TESTS_FAILED and failed is not None:
        verdict, by = "killed", failed[1]
    elif status == PASSED and mutant.equivalent:
        verdict, by = "equivalent", mutant.equivalent
    elif status == PASSED and mutant.needs:
        verdict, by = "needs engines", mutant.needs
    elif status == PASSED:
        verdict, by = "survived", ""
    else:  # for example, a test file that cannot be imported proves nothing
        verdict, by = "error", f"pytest's exit status is {status}: {printed[-500:]}"
    seconds = round(time.monotonic() - began, 1)
    return Result(mutant.name, verdict, by, seconds, mutant.consequence)


def run(mutants: Sequence[Mutant], jobs: int, folder: Path) -> Iterator[Result]:
    """The result of each mutant, in the order of the list."""
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for number in range(jobs):
        trees.put(copy_tree(folder / f"tree{number}"))

    def work(mutant: Mutant) -> Result:
        tree = trees.get()
        try:
            return try_mutant(mutant, tree)
        finally:
            trees.put(tree)

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(work, mutants)


def passes_unchanged(mutants: Sequence[Mutant], folder: Path) -> bool:
    """Whether the tests of these mutants pass without one."""
    paths = sorted({path for mutant in mutants for path in mutant.paths})
    status, printed = run_tests(copy_tree(folder / "unchanged"), paths, None)
    if status != PASSED:
        print(printed[-3000:])
        print(f"the tests fail without a mutant: pytest's exit status is {status}")
    return status == PASSED


def chosen(names: Sequence[str]) -> list[Mutant]:
    known = {mutant.name: mutant for mutant in MUTANTS}
    for name in names:
        if name not in known:
            raise SystemExit(f"no mutant is called {name!r}; --list shows the names")
    mutants, texts = [known[name] for name in names] or list(MUTANTS), read_texts(REPO)
    try:
        for mutant in mutants:
            find(mutant, texts)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    return mutants


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant mutants; each must make a test fail.")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    options = parser.parse_args()
    mutants = chosen(options.only)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name:18} {mutant.consequence}")
        for name, removal in ENDED.items():
            print(f"{name:18} ended: {removal}")
        return 0
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        if not passes_unchanged(mutants, Path(folder)):
            return 2
        for result in run(mutants, options.jobs, Path(folder)):
            print(f"{result.name:18} {result.verdict:13} {result.seconds:6.1f} s  {result.by}")
            sys.stdout.flush()
            results.append(result)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
    counts = Counter(result.verdict for result in results)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    for result in results:
        if result.verdict == "survived":
            print(f"{result.name} survived: {result.consequence}")
    return 1 if counts["survived"] or counts["error"] else 0


if __name__ == "__main__":
    sys.exit(main())
