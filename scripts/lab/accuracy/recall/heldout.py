"""Write held-out prompts and their answers as JSON lines: what an evaluation harness reads."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lab.accuracy.recall.task import Item, prompts

LENGTHS: Final = (100, 400, 800, 1500)  # tokens


def mixed(count: int, seed: int, lengths: Sequence[int] = LENGTHS) -> list[Item]:
    """So many prompts, each length as often as the others; raises ValueError if that cannot be."""
    each, left = divmod(count, len(lengths))
    if left:
        raise ValueError(f"count={count}: a multiple of {len(lengths)}")
    return [item for tokens in lengths for item in prompts(each, tokens=tokens, seed=seed)]


def read(path: Path) -> list[Item]:
    """Read what write() wrote."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Item(**json.loads(line)) for line in lines]


def write(path: Path, items: Sequence[Item]) -> None:
    """One line for each prompt, with its answer."""
    lines = [json.dumps(item._asdict()) + "\n" for item in items]
    path.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """Write the file, from the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/lab/run.sh lab.accuracy.recall.heldout", description=__doc__
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=200, help="default 200")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    options = parser.parse_args()
    write(options.file, mixed(options.count, options.seed))
    print(options.file)


if __name__ == "__main__":
    main()
