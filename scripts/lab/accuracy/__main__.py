"""Are the answers right when prefill and decode are apart? lm-eval against a router tells.

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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import httpx

from pd.accuracy_eval import Job
from pd.accuracy_machine import detect
from pd.accuracy_models import HuggingFace, Subject, subjects
from pd.accuracy_report import Outcome, print_outcome, write_json
from pd.accuracy_run import clear, run_pair, run_single
from pd.accuracy_settings import USAGE, SettingError, Settings, parse
from pd.cluster import end_on_signals, say_on_stderr
from pd.processes import end_children

BAD_SETTING = 2
NEEDED: Final = ("vllm", "lm_eval", "vllm_router")
TROUBLES: Final = (RuntimeError, httpx.HTTPError, OSError, ValueError, LookupError)
"""What an engine, a router or lm-eval can do wrong; the next model runs all the same."""


def run_subject(job: Job) -> Outcome:
    """The pair, then the single engine if wanted; trouble is part of the outcome."""
    begin = time.monotonic()
    pair = single = None
    trouble = ""
    try:
        clear(job.log_dir)
        pair = run_pair(job)
        single = run_single(job) if job.settings.single else None
    except TROUBLES as error:
        kind = "" if isinstance(error, RuntimeError) else type(error).__name__  # ours say enough
        said = ": ".join(filter(None, [kind, str(error)]))
        say_on_stderr(said)
        trouble = said.split("\n")[0]
    seconds = time.monotonic() - begin
    return Outcome(job.subject, job.settings, pair, single, trouble, seconds)


def run_all(found: Sequence[Subject], settings: Settings, log_dir: Path) -> int:
    """All models, one after another; the exit status."""
    outcomes: list[Outcome] = []
    for number, subject in enumerate(found):
        folder = log_dir / f"{number}-{subject.name.replace('/', '--')}"
        say_on_stderr(f"== {subject.name} ({subject.task}), {shape(settings)}")
        outcomes.append(run_subject(Job(subject, settings, folder)))
        print_outcome(outcomes[-1])
        if settings.json_path is not None:
            write_json(settings.json_path, outcomes)
    return int(any(outcome.verdict for outcome in outcomes))


def shape(settings: Settings) -> str:
    """The two sides in a few words."""
    sides = {"prefill": settings.prefill, "decode": settings.decode}
    words = [
        f"{side.instances} {name} TP{side.tensor_parallel} block {side.block_size}"
        + (f" {side.layout}" if side.layout else "")
        for name, side in sides.items()
    ]
    backend = [settings.attention_backend] if settings.attention_backend else []
    return ", ".join([*words, *backend, f"on {settings.machine.device}"])


def say_instead(found: Sequence[Subject]) -> None:
    """Nobody shall take one model's result for another's."""
    for subject in found:
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
        found = subjects(settings, HuggingFace(os.environ))
        say_instead(found)
        log_dir = settings.log_dir or Path(tempfile.mkdtemp(prefix="nixl-kv-accuracy-"))
        return run_all(found, settings, log_dir.resolve())
    except SettingError as error:
        print(error, file=sys.stderr)
        return BAD_SETTING
    except KeyboardInterrupt:
        print("interrupted: everything is ended", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        end_children(os.getpid())  # a signal may come between a child's start and our knowing it
        if log_dir is not None:
            say_on_stderr(f"logs in {log_dir}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
