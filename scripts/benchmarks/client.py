"""vLLM's own client, `vllm bench serve`, in a process that imports it once."""

import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec
import numpy as np
from typing_extensions import Self

from benchmarks.points import Point, Shape, histogram
from harness.cluster.engines import MODEL_NAME, QUIET_ENV

POLL_S: Final = 0.5


class Result(msgspec.Struct):
    """The client's file (--save-detailed); times in seconds, one for each request."""

    duration: float
    completed: int
    total_input_tokens: int
    total_output_tokens: int
    request_goodput: float | None
    output_lens: list[int]
    start_times: list[float]
    ttfts: list[float]
    itls: list[list[float]]
    errors: list[str]

    @property
    def seconds(self) -> float:
        return self.duration

    @property
    def prompt_tokens(self) -> int:
        return self.total_input_tokens

    @property
    def good(self) -> int:
        """Requests within --goodput, by the client."""
        return round((self.request_goodput or 0) * self.duration)

    def answered(self) -> list[int]:
        """The requests that did not fail. A failed one has no tokens."""
        return [n for n, length in enumerate(self.output_lens) if length and not self.errors[n]]

    def point(self, **about: Any) -> Point:
        """The requests in our terms."""
        answered = self.answered()
        gaps = [self.itls[n] for n in answered]
        lengths = [self.output_lens[n] for n in answered]
        means = [sum(some) / max(1, k - 1) for some, k in zip(gaps, lengths, strict=True)]
        return Point(
            **about,
            seconds=round(self.duration, 3),
            tokens=self.total_output_tokens,
            failed=len(self.output_lens) - len(answered),
            ttft=tuple(round(self.ttfts[n] * 1e3, 1) for n in answered),
            mean_gap=tuple(round(mean * 1e3, 2) for mean in means),
            longest_gap=tuple(round(max(some, default=0.0) * 1e3, 1) for some in gaps),
            gaps=histogram(itertools.chain(*gaps)),
        )

    def common_gap_ms(self) -> float | None:
        """The mean gap while all answers were generated; None if they never were at once."""
        firsts = np.array(self.start_times) + self.ttfts
        times = [first + np.cumsum(gaps) for first, gaps in zip(firsts, self.itls, strict=True)]
        begin, end = max(firsts), min(each[-1] if len(each) else 0.0 for each in times)
        tokens = sum(int(((each > begin) & (each <= end)).sum()) for each in times)
        # Fewer would say more about how tokens came in bursts than about steps.
        return float(end - begin) * 1e3 * len(times) / tokens if tokens > 2 * len(times) else None


class Client:
    """Answers of engines and routers, by one process, which prints to a log."""

    def __init__(self, model: Path, log_dir: Path) -> None:
        self._model = model
        # A fork would inherit this process's threads.
        context = multiprocessing.get_context("spawn")
        self._pool = context.Pool(1, _prepare, (str(log_dir / "client.log"),))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.terminate()
        self._pool.join()

    def ask(
        self,
        url: str,
        shape: Shape,
        count: int,
        extra: Sequence[str],
        *,
        while_waiting: Callable[[], None],
        give_up: float,
    ) -> Result:
        """Send this number of requests; `extra` are further options of the client.

        `while_waiting` may raise what shall end the wait, which ends at the monotonic time
        `give_up` at the latest.

        Raises:
            TimeoutError: the answers did not come in time.
            Exception: the client's own.
        """
        command = ["--backend", "openai", "--base-url", url, "--model", MODEL_NAME]
        command += ["--tokenizer", str(self._model), "--dataset-name", "random"]
        command += ["--random-input-len", str(shape.prompt)]
        command += ["--random-output-len", str(shape.answer), "--ignore-eos"]
        command += ["--num-prompts", str(count), "--temperature", "0", "--disable-tqdm"]
        command += ["--percentile-metrics", "ttft,itl,tpot", "--save-result", "--save-detailed"]
        asked = self._pool.apply_async(_ask, ([*command, *extra],))
        while not asked.ready():
            asked.wait(POLL_S)
            while_waiting()
            if time.monotonic() > give_up:
                raise TimeoutError(f"{url}: no answers to {count} requests in time")
        return msgspec.json.decode(asked.get(), type=Result)


def _prepare(log_path: str) -> None:
    """In the new process: import the client while engines start."""
    os.environ.update(QUIET_ENV, NO_PROXY="*", no_proxy="*")
    log = Path(log_path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - stays open
    sys.stdout = sys.stderr = log
    import vllm.benchmarks.serve  # noqa: F401, PLC0415 - takes seconds


def _ask(arguments: Sequence[str]) -> bytes:
    """The content of the file that the client writes."""
    from vllm.benchmarks.serve import add_cli_args, main  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        options = ["--result-dir", folder, "--result-filename", path.name]
        try:
            main(parser.parse_args([*arguments, *options]))
        except SystemExit as error:  # would end the process and leave the caller waiting
            raise RuntimeError(f"vLLM's client ended with status {error.code}") from error
        return path.read_bytes()
