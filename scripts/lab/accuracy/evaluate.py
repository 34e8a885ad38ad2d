"""lm-eval as a child process, against an engine or a router that stands for several."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pd.accuracy_models import REPO, Subject
from pd.accuracy_settings import Settings
from pd.cluster import PROGRESS_S, say_on_stderr
from pd.engines import QUIET_ENV, apart, past_proxies
from pd.processes import ManagedProcess, ProcessDiedError
from pd.waiting import wait_until

TASKS: Final = REPO / "configs" / "lm_eval"
METRICS: Final[Mapping[str, str]] = {
    "gsm8k": "exact_match,strict-match",
    "recall": "exact_match,none",
}
FEW_SHOTS_IN_CHAT = "5"
REQUEST_TIMEOUT_S = 600
EVALUATION_TIMEOUT_S = 4 * 3600.0
POLL_S = 0.5
PROGRESS_LINES = 100
PROGRESS = re.compile(r"Requesting API:\s+(\d+)%")
TROUBLES: Final = (re.compile(r"API request failed"), re.compile(r"Exception:.*retrying"))
"""Of one failure lm-eval writes one of these, or both."""


@dataclass(frozen=True)
class Score:
    """How the answers were: of so many items which share is right, and what was said to each."""

    accuracy: float
    items: int
    answers: Mapping[str, str]  # by the item's number and its filter
    errors: int  # requests that failed, and were sent again
    seconds: float


@dataclass(frozen=True)
class Job:
    """One model under the settings, and where its logs go."""

    subject: Subject
    settings: Settings
    log_dir: Path


class Evaluation(ManagedProcess):
    """One run of lm-eval."""

    def __init__(self, name: str, url: str, job: Job) -> None:
        """What it finds out goes to a folder beside its log."""
        super().__init__(name, job.log_dir / f"{name}.log")
        self.url = url
        self.job = job
        self.output = job.log_dir / name

    def start(self) -> None:
        """Launch it."""
        env = environment(self.job.subject)
        self.launch(self.command(), env, apart(self.log_path.parent))

    def command(self) -> list[str]:
        """The command line."""
        subject, settings = self.job.subject, self.job.settings
        kind, path = ("local-chat-completions", "chat/") if subject.chat else ("", "")
        arguments = {
            "model": subject.name,
            "base_url": f"{self.url}/v1/{path}completions",
            "num_concurrent": settings.concurrent,
            "timeout": REQUEST_TIMEOUT_S,
            "tokenized_requests": False,
            "tokenizer_backend": "huggingface",
            "tokenizer": subject.path,
        }
        command = [sys.executable, "-m", "lm_eval", "run"]
        command += ["--model", kind or "local-completions", "--model_args", json.dumps(arguments)]
        command += ["--tasks", subject.task, "--include_path", str(TASKS)]
        command += ["--output_path", str(self.output), "--log_samples"]
        if subject.chat:
            command += ["--apply_chat_template", "--num_fewshot", FEW_SHOTS_IN_CHAT]
        if settings.limit is not None:
            command += ["--limit", str(settings.limit)]
        return command

    def wait(self, check: Callable[[], None], timeout_s: float = EVALUATION_TIMEOUT_S) -> float:
        """Until it has ended; `check` raises if what it asks has died. The seconds."""
        begin = last_said = time.monotonic()

        def ended() -> bool:
            check()
            return self.exit_code() is not None

        def on_wait(passed: float) -> None:
            nonlocal last_said
            if time.monotonic() - last_said >= PROGRESS_S:
                last_said = time.monotonic()
                done = PROGRESS.findall(self.tail(PROGRESS_LINES))
                say_on_stderr(f"  {passed:3.0f} s: {done[-1] if done else 0} % of the items")

        if not wait_until(ended, timeout_s, on_wait=on_wait, interval_s=POLL_S):
            raise ProcessDiedError(f"{self.name} has not ended after {timeout_s:.0f} s")
        if self.exit_code() != 0:
            self.check_alive()
        return time.monotonic() - begin

    def score(self, seconds: float) -> Score:
        """What it has found out."""
        task = self.job.subject.task
        results = json.loads(_newest(self.output, "results_*.json").read_text(encoding="utf-8"))
        samples = _newest(self.output, "samples_*.jsonl").read_text(encoding="utf-8")
        log = self.log_path.read_text(encoding="utf-8", errors="replace")
        lines = [json.loads(line) for line in samples.split("\n") if line]
        answers = {f"{line['doc_id']} {line.get('filter')}": line["resps"][0][0] for line in lines}
        return Score(
            accuracy=float(results["results"][task][METRICS[task]]),
            items=len({line["doc_id"] for line in lines}),
            answers=answers,
            errors=max(len(trouble.findall(log)) for trouble in TROUBLES),
            seconds=seconds,
        )


def evaluate(name: str, url: str, job: Job, *, check: Callable[[], None]) -> Score:
    """Run the job's task against a URL and wait for it; ended whatever happens."""
    evaluation = Evaluation(name, url, job)
    say_on_stderr(f"{name}: {job.subject.task} against {url}")
    try:
        evaluation.start()
        return evaluation.score(evaluation.wait(check))
    finally:
        evaluation.stop()


def environment(subject: Subject) -> dict[str, str]:
    """No hub but for who may ask it, and no proxy for our own engines."""
    env = os.environ | QUIET_ENV | past_proxies(os.environ) | {"OPENAI_API_KEY": "EMPTY"}
    offline = "0" if subject.online else "1"
    env |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), offline)
    if subject.heldout is not None:
        env["RECALL_HELDOUT"] = str(subject.heldout)
    return env


def _newest(folder: Path, pattern: str) -> Path:
    found = sorted(folder.rglob(pattern))
    if not found:
        raise ProcessDiedError(f"lm-eval left no {pattern} in {folder}")
    return found[-1]
