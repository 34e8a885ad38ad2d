"""Requests while engines are treated badly: how each ended, and many clients at once."""

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import httpx
from typing_extensions import Self

from harness.cluster.answers import AT_A_TIME, Question
from harness.cluster.client import Answer, Client
from harness.cluster.prompts import random_prompt
from harness.cluster.waiting import wait_or_fail

_SEEDS = itertools.count(700_000)
LONGEST_ERROR = 200
CLIENT_TIMEOUT_S = 600.0
"""Beside busy processes, engines have stood still for more than 60 s here."""
STUCK_S = CLIENT_TIMEOUT_S + 60.0
"""After this time each request has ended, perhaps with an error."""
AFTER_AN_ERROR_S = 2.0
"""A client that got an error pauses before its next request."""
SHORT = range(1, 24)
"""The lengths of the answers of a load, in tokens."""


@dataclass(frozen=True)
class Ended:
    """How a request ended: with an answer, with an error, or with neither if its client left."""

    seconds: float
    answer: Answer | None = None
    error: str = ""

    def kind(self, question: Question) -> str:
        """`right`, `wrong` with the answer, or the error."""
        if self.answer is None:
            return self.error or "left"
        is_right = question.compare(self.answer) != "other"
        return "right" if is_right else f"wrong: {self.answer.text[:LONGEST_ERROR]!r}"


def ask(complete: Callable[[], Answer | None]) -> Ended:
    """Make one request. An error is noted and not raised."""
    begin = time.monotonic()
    answer, error = None, ""
    try:
        answer = complete()
    except (RuntimeError, httpx.HTTPError) as raised:
        error = f"{type(raised).__name__}: {raised}"[:LONGEST_ERROR]
    if answer is not None and answer.finish_reason == "abort":
        answer, error = None, "finish_reason: abort"
    return Ended(time.monotonic() - begin, answer, error)


def request_of(seed: int, lengths: range = SHORT) -> tuple[str, int]:
    """A prompt and the number of tokens to generate."""
    chooser = random.Random(f"request {seed}")  # noqa: S311 - the same each time
    return random_prompt(chooser.randrange(20, 600), seed), chooser.choice(lengths)


class Server(Protocol):
    """An engine or a router."""

    url: str


_Server = TypeVar("_Server", bound=Server)


class Rotation(Generic[_Server]):
    """The servers that new requests go to, in turns."""

    def __init__(self, servers: Sequence[_Server]) -> None:
        self.servers = list(servers)
        self._numbers = itertools.count()
        self._under_way: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def next(self) -> Iterator[Client]:
        """The server whose turn it is, until its answer is here."""
        with self._lock:
            server = self.servers[next(self._numbers) % len(self.servers)]
            self._under_way[server.url] += 1
        try:
            with Client(server.url, timeout_s=CLIENT_TIMEOUT_S) as client:
                yield client
        finally:
            with self._lock:
                self._under_way[server.url] -= 1

    def remove(self, server: _Server) -> None:
        """New requests go to the others."""
        with self._lock:
            self.servers.remove(server)

    def is_idle(self, server: _Server) -> bool:
        with self._lock:
            return not self._under_way[server.url]


class Load:
    """Clients in threads. Each makes one request after the other until the block ends."""

    def __init__(
        self,
        complete: Callable[[str, int], Answer | None],
        clients: int,
        lengths: range = SHORT,
    ) -> None:
        """The answers have these `lengths`."""
        self.ended: dict[int, Ended] = {}
        """The ends of requests, by their seeds."""
        self._complete = complete
        self._lengths = lengths
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._clients = [self._pool.submit(self._run) for _ in range(clients)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()

    def wait(self, num_more: int) -> None:
        """Until that many more requests have ended."""
        wanted = len(self.ended) + num_more
        wait_or_fail(lambda: len(self.ended) >= wanted, STUCK_S, "no request ends")

    def _run(self) -> None:
        while not self._is_over.is_set():
            seed = next(_SEEDS)
            ended = self.ended[seed] = ask(
                partial(self._complete, *request_of(seed, self._lengths))
            )
            if ended.error:
                self._is_over.wait(AFTER_AN_ERROR_S)


def judge(
    single: Client, requests: Mapping[int, Ended], lengths: range = SHORT
) -> list[tuple[Question, Ended]]:
    """A single engine's answer to each request of a load, beside how it ended."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        questions = pool.map(lambda seed: Question.of(single, *request_of(seed, lengths)), requests)
        return list(zip(questions, requests.values(), strict=True))


def kinds(requests: Iterable[tuple[Question, Ended]]) -> Counter[str]:
    """How many ended right, in which wrong answers, and in which errors."""
    return Counter(ended.kind(question) for question, ended in requests)
