"""Are the answers right when prefill and decode are apart? lm-eval against a router says.

Starts prefill and decode engines and vllm-router, runs lm-eval against the router, compares with
the accuracy that the model is known to have, and ends everything. The exit status is 0 only if the
accuracy is within the tolerance and every prompt's KV was loaded over NIXL; 1 if not; 2 for a knob
with a value that is not allowed. Where no accuracy is known, it is printed and compared with
nothing. The knobs are environment variables: docs/accuracy.md has them.
"""

import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from harness.cluster.processes import end_on_signals, kill_descendants
from lab.accuracy.evaluation import Job
from lab.accuracy.hub import HuggingFace
from lab.accuracy.machine import detect
from lab.accuracy.models import Subject, subjects
from lab.accuracy.run import run
from lab.accuracy.settings import USAGE, SettingError, Settings, parse
from lab.results import Results, say_on_stderr

BAD_SETTING: Final = 2
NEEDED: Final = ("vllm", "lm_eval", "vllm_router")


def run_all(evaluated: Sequence[Subject], settings: Settings, log_dir: Path) -> int:
    """All models, one after another; the exit status."""
    results = Results(f"accuracy, {settings}", "models are good", settings.json_path)
    if settings.json_path is not None:
        settings.json_path.parent.mkdir(parents=True, exist_ok=True)
    status = 1
    try:
        for number, subject in enumerate(evaluated):
            folder = log_dir / f"{number}-{subject.name.replace('/', '--')}"
            say_on_stderr(f"== {subject.name} ({subject.task}), {settings}")
            outcome = run(Job(subject, settings, folder))
            outcome.print_details()
            results.add(outcome)
    finally:
        if results.all:
            status = results.print(len(evaluated))
    return status


def say_instead(evaluated: Sequence[Subject]) -> None:
    """Nobody shall take one model's result for another's."""
    for subject in evaluated:
        if subject.instead_of:
            say_on_stderr(
                f"MODEL_NAMES={subject.instead_of}: no hub is reachable and no copy is here; "
                f"the bundled model {subject.name} runs INSTEAD, and what is expected of the other "
                "one and VLLM_SERVE_EXTRA_ARGS do not count"
            )


def check_installed() -> None:
    """Before minutes have gone into engines.

    Raises:
        SettingError: if the interpreter lacks something.
    """
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            raise SettingError(name, None, f"{sys.executable} lacks it; scripts/install has it")


def main(arguments: Sequence[str]) -> int:
    """Run; the exit status."""
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\n{USAGE}")
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where & has it ignored
    end_on_signals()
    log_dir: Path | None = None
    try:
        settings = parse(arguments, os.environ, detect(os.environ))
        check_installed()
        evaluated = subjects(settings, HuggingFace(os.environ))
        say_instead(evaluated)
        log_dir = settings.log_dir or Path(tempfile.mkdtemp(prefix="nixl-kv-accuracy-"))
        return run_all(evaluated, settings, log_dir.resolve())
    except SettingError as error:
        print(error, file=sys.stderr)
        return BAD_SETTING
    except KeyboardInterrupt:
        print("interrupted: everything is ended", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        kill_descendants(os.getpid())  # a signal may come between a child's start and our record
        if log_dir is not None:
            say_on_stderr(f"logs in {log_dir}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
