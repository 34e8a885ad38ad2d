"""Run the tests of nixl_kv/geometry on mutants: copies with one mistake each, to be noticed.

mutants.txt has them, each in three lines: the file and what the mistake means, the old text after
"- ", the new text after "+ ". Where the old text is not found exactly once, the code has moved on:
that is an error. Mistakes that change nothing which could be noticed do not belong there.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
MUTANTS: Final = ROOT / "scripts" / "mutants.txt"
COPIED: Final = ("nixl_kv", "tests", "pyproject.toml")
TESTS: Final = "tests/geometry"
EXAMPLES: Final = "60"
TIMEOUT_S: Final = 300
FIRST_FAILURE: Final = re.compile(
    r"^(?:FAILED|ERROR) (?:tests/geometry/)?(\S[^\n]*?)(?: - .*)?$", re.MULTILINE
)


class Mutant(NamedTuple):
    """One mistake."""

    file: str
    meaning: str
    old: str
    new: str

    def applied(self, root: Path) -> str:
        """The file's text with the mistake."""
        text = self.path(root).read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            sys.exit(f"{self.file}: {self.meaning}: found {count} times, not once: {self.old}")
        return text.replace(self.old, self.new)

    def path(self, root: Path) -> Path:
        """Where the file is in a copy of the project."""
        return root / "nixl_kv" / "geometry" / self.file


def mutants() -> Iterator[Mutant]:
    """Read the list."""
    for entry in MUTANTS.read_text(encoding="utf-8").strip().split("\n\n"):
        title, old, new = entry.split("\n")
        file, _, meaning = title.partition(": ")
        yield Mutant(file, meaning, old.removeprefix("- "), new.removeprefix("+ "))


def run(mutant: Mutant | None) -> str | None:
    """Run the tests on a copy. Returns the first one that failed, None if all passed."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, root / name, ignore=ignored)
            else:
                shutil.copy(source, root / name)
        if mutant is not None:
            mutant.path(root).write_text(mutant.applied(root), encoding="utf-8")
        return first_failure(root)


def first_failure(root: Path) -> str | None:
    """What pytest says of the copy, which it imports because it runs there."""
    flags = ("-x", "-q", "--hypothesis-profile=unshrunk", "-p", "no:cacheprovider")
    command = [sys.executable, "-B", "-m", "pytest", *flags, TESTS]
    environment = os.environ | {"NIXL_KV_EXAMPLES": EXAMPLES}
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    found = FIRST_FAILURE.search(done.stdout)
    if not found:
        sys.exit(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return found[1]


def main(words: list[str]) -> int:
    """Print a line for each mutant; without words, of all of them."""
    began = time.monotonic()
    chosen = [m for m in mutants() if not words or any(word in " ".join(m) for word in words)]
    for mutant in chosen:
        mutant.applied(ROOT)  # what is out of date is said before minutes have passed
    failed = run(None)
    if failed is not None:
        sys.exit(f"without a mutant, {failed} fails")
    survived = 0
    for mutant in chosen:
        caught = run(mutant)
        survived += caught is None
        print(f"{mutant.file}: {mutant.meaning}\n    {caught or 'SURVIVED'}", flush=True)
    seconds = time.monotonic() - began
    print(f"{len(chosen)} mutants, {survived} survived, {seconds:.0f} s")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
