"""Requests that a fault may hit, and what came of each."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Literal

import httpx

from pd.asking import TIES, WANT_TICKET, likeness
from pd.client import Answer, Client
from pd.faults_deck import Question

TIE: Final = TIES["float32"]
SAID: Final = 200  # characters of an error that are kept
Ticket = Mapping[str, object]
Outcome = Literal["right", "error", "wrong", "late", "left"]


class NoTicketError(RuntimeError):
    """The prefill engine answered without one."""


@dataclass(frozen=True)
class Ended:
    """How a request ended: `late` when its client lost patience, `left` when it just hung up."""

    kind: Outcome
    seconds: float
    said: str = ""


def ask(question: Question, complete: Callable[[], Answer]) -> Ended:
    """One request: its answer is compared, its error is noted, and nothing is raised."""
    begin = time.monotonic()
    try:
        answer = complete()
    except httpx.TimeoutException as error:
        return Ended("late", time.monotonic() - begin, type(error).__name__)
    except (RuntimeError, httpx.HTTPError) as error:
        said = f"{type(error).__name__}: {error}"[:SAID]
        return Ended("error", time.monotonic() - begin, said)
    if answer.finish_reason == "abort":
        return Ended("error", time.monotonic() - begin, "finish_reason: abort")
    kind: Outcome = "right" if is_right(question, answer) else "wrong"
    said = "" if kind == "right" else f"{answer.text[:SAID]!r}"
    return Ended(kind, time.monotonic() - begin, said)


def is_right(question: Question, answer: Answer) -> bool:
    """Whether this is what a single engine says, up to a tie that rounding decides."""
    if len(answer.tokens) != question.tokens:
        return False
    return likeness(question.expected, answer, TIE) != "other"


class PrefillClient(Client):
    """A client of the prefill engine, as a router is one."""

    def offer(self, question: Question, max_tokens: int = 1) -> Ticket:
        """A ticket; with more tokens than one, prefill goes on to generate before it gives it.

        Raises:
            NoTicketError: if there is none.
        """
        body = self._body(question.prompt, max_tokens, {"kv_transfer_params": WANT_TICKET})
        reply = self._http.post("/v1/completions", json=body)
        reply.raise_for_status()
        ticket: Ticket | None = reply.json().get("kv_transfer_params")
        if ticket is None:
            raise NoTicketError(f"{self.url}: no ticket")
        return ticket


class Crowd:
    """Several clients at once."""

    def __init__(self, size: int) -> None:
        """Nobody asks yet."""
        self._pool = ThreadPoolExecutor(size)
        self._waiting: list[Future[Ended]] = []

    def send(self, question: Question, complete: Callable[[], Answer]) -> Future[Ended]:
        """Begin one request."""
        future = self._pool.submit(ask, question, complete)
        self._waiting.append(future)
        return future

    def results(self) -> Sequence[Ended]:
        """Wait for all that was sent since the last call."""
        waiting, self._waiting = self._waiting, []
        return [future.result() for future in waiting]

    def close(self) -> None:
        """Wait for all threads."""
        self._pool.shutdown()
