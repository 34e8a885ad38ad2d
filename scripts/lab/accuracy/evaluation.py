"""lm-eval as a child process, against an engine or a router that stands for several."""

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from harness.cluster.cluster import PROGRESS_S
from harness.cluster.engines import QUIET_ENV, apart
from harness.cluster.models.files import REPO, SPECIALS
from harness.cluster.processes import ManagedProcess, ProcessDiedError
from harness.cluster.router import past_proxies
from harness.cluster.waiting import wait_until
from lab.accuracy.models import Subject, Task
from lab.accuracy.settings import Settings
from lab.results import say_on_stderr

TASKS: Final = REPO / "configs" / "lm_eval"
METRICS: Final[Mapping[Task, str]] = {
    "gsm8k": "exact_match,strict-match",
    "recall": "exact_match,none",
}
EOS: Final = SPECIALS[1]
FEW_SHOTS_IN_CHAT: Final = "5"
REQUEST_TIMEOUT_S: Final = 600
EVALUATION_TIMEOUT_S: Final = 4 * 3600.0
POLL_S: Final = 0.5
PROGRESS_LINES: Final = 100
PROGRESS: Final = re.compile(r"Requesting API:\s+(\d+)%")
FAILURES: Final = (re.compile(r"API request failed"), re.compile(r"Exception:.*retrying"))
"""Of one failed request lm-eval writes one of these, or both."""


@dataclass(frozen=True)
class Job:
    """One model under the settings, and where its logs go."""

    subject: Subject
    settings: Settings
    log_dir: Path


@dataclass(frozen=True)
class Score:
    """How the answers were."""

    accuracy: float
    """The share of items whose answer is right."""
    items: int
    answers: Mapping[str, str]
    """By the item's number and its filter."""
    errors: int
    """Requests that failed, and were sent again."""
    seconds: float


class Evaluation(ManagedProcess):
    """One run of lm-eval."""

    def __init__(self, name: str, url: str, job: Job) -> None:
        """What it finds out goes to a folder beside its log."""
        super().__init__(name, job.log_dir / f"{name}.log")
        self.url = url
        self.job = job
        self.output = job.log_dir / name

    def run(self, asked: Sequence[ManagedProcess]) -> Score:
        """Start it and wait for its end; ended whatever happens.

        Raises:
            ProcessDiedError: if it fails, or one of those that it asks has died.
        """
        say_on_stderr(f"{self.name}: {self.job.subject.task} against {self.url}")
        begin = time.monotonic()
        try:
            env = environment(self.job.subject)
            self.launch(self.command(), env, apart(self.log_path.parent))
            self._wait(asked)
            return self.score(time.monotonic() - begin)
        finally:
            self.stop()

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
        }
        if subject.task == "recall":
            module = "lab.accuracy.lm_eval_cli"
            arguments |= {"tokenizer_backend": None, "eos_string": EOS}
        else:
            module = "lm_eval"
            arguments |= {"tokenizer_backend": "huggingface", "tokenizer": subject.path}
        command = [sys.executable, "-m", module, "run"]
        command += ["--model", kind or "local-completions", "--model_args", json.dumps(arguments)]
        command += ["--tasks", subject.task, "--include_path", str(TASKS)]
        command += ["--output_path", str(self.output), "--log_samples"]
        if subject.chat:
            command += ["--apply_chat_template", "--num_fewshot", FEW_SHOTS_IN_CHAT]
        if settings.limit is not None:
            command += ["--limit", str(settings.limit)]
        return command

    def score(self, seconds: float) -> Score:
        """What it has left in files and in its log."""
        task = self.job.subject.task
        results = json.loads(self._newest("results_*.json"))
        lines = [json.loads(line) for line in self._newest("samples_*.jsonl").split("\n") if line]
        log = self.log_text()
        return Score(
            accuracy=float(results["results"][task][METRICS[task]]),
            items=len({line["doc_id"] for line in lines}),
            answers={f"{one['doc_id']} {one.get('filter')}": one["resps"][0][0] for one in lines},
            errors=max(len(failure.findall(log)) for failure in FAILURES),
            seconds=seconds,
        )

    def _wait(self, asked: Sequence[ManagedProcess]) -> None:
        last_said = 0.0

        def has_ended() -> bool:
            for process in asked:
                process.check_alive()
            return self.exit_code() is not None

        def on_wait(passed: float) -> None:
            nonlocal last_said
            if passed - last_said >= PROGRESS_S:
                last_said = passed
                percents = PROGRESS.findall(self.tail(PROGRESS_LINES))
                say_on_stderr(
                    f"  {passed:3.0f} s: {percents[-1] if percents else 0} % of the items"
                )

        if not wait_until(has_ended, EVALUATION_TIMEOUT_S, on_wait=on_wait, interval_s=POLL_S):
            raise ProcessDiedError(f"{self.name} has not ended in {EVALUATION_TIMEOUT_S:.0f} s")
        if self.exit_code() != 0:
            self.check_alive()

    def _newest(self, pattern: str) -> str:
        paths = sorted(self.output.rglob(pattern))
        if not paths:
            raise ProcessDiedError(f"lm-eval left no {pattern} in {self.output}")
        return paths[-1].read_text(encoding="utf-8")


def environment(subject: Subject) -> dict[str, str]:
    """No hub but for who may ask it, and no proxy for our own engines."""
    env = os.environ | QUIET_ENV | past_proxies(os.environ) | {"OPENAI_API_KEY": "EMPTY"}
    offline = "0" if subject.online else "1"
    env |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), offline)
    scripts = [str(REPO / "scripts"), str(REPO / "tests"), os.environ.get("PYTHONPATH")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, scripts))
    if subject.heldout is not None:
        env["RECALL_HELDOUT"] = str(subject.heldout)
    return env
