"""Does KV move between engines of any shape? Each cell of configs/matrix.yaml is a pair of shapes.

Compares answers of tiny models with a single engine's, token by token. The exit status is 0 only
if something ran, and all of it is good.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from harness.cluster.answers import TIES
from harness.cluster.processes import end_on_signals, kill_descendants
from lab.results import Results, say_on_stderr
from suites.matrix import cells
from suites.matrix.answers import AnswersJudge, Place

BAD_SETTING: Final = 2


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="some cells, models, or model/cell; --list shows them",
    )
    parser.add_argument("--list", action="store_true", help="print the cells and stop")
    parser.add_argument("--config", type=Path, default=cells.CONFIG, help="of the cells")
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=list(TIES), help="default: float32 on CPU")
    parser.add_argument("--gpus", type=int, default=1, help="how many there are; default 1")
    parser.add_argument("--ranks", type=int, help="how many run at a time, at most")
    return parser.parse_args(arguments)


def run(judge: AnswersJudge, log_dir: Path) -> int:
    """Run all cells and print what came of them, also if a signal ends it; the exit status."""
    say_on_stderr(f"logs in {log_dir}")
    results = Results(judge.title, judge.what, log_dir / "results.json")
    status = 1
    try:
        judge.run(results)
    finally:
        status = results.print(max(len(judge.lines()), len(results.all)))
    return status


def main(arguments: Sequence[str]) -> int:
    """Run; the exit status."""
    options = parse_arguments(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_on_signals()
    log_dir = (options.log_dir or Path(tempfile.mkdtemp(prefix="nixl-kv-matrix-"))).resolve()
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        place = Place(options.device, options.dtype, options.gpus, options.ranks)
        judge = AnswersJudge(cells.load(options.config), place, options.only, log_dir)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return BAD_SETTING
    if options.list:
        print("\n".join(judge.lines()))
        return 0
    try:
        return run(judge, log_dir)
    except KeyboardInterrupt:
        print("interrupted: everything is ended", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        kill_descendants(os.getpid())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
