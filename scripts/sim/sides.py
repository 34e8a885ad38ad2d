"""What vLLM's scheduler does for requests, on prefill and on decode: the part that both share."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from nixl_kv.protocol import events
from sim.book import Book
from sim.memory import TOKENS, Memory
from sim.standins import statuses
from sim.vllm import Forward, Request

OTHERS = "others"


class Side(ABC):
    """The requests of one life of an engine, and its book of blocks."""

    def __init__(self, book: Book, memories: list[Memory]) -> None:
        """Begin without requests."""
        self.book = book
        self.memories = memories
        self.requests: dict[str, Request] = {}

    def __repr__(self) -> str:
        """All requests and their states."""
        return ", ".join(f"{r.request_id} {r.status.name}" for r in self.requests.values())

    @abstractmethod
    def schedule(self) -> tuple[list[events.Command], list[Forward]]:
        """Begin a step: its commands, and what is computed."""

    @abstractmethod
    def update(self) -> None:
        """End a step: go on with what was computed."""

    @abstractmethod
    def expects(self, kind: str, request: str) -> bool:
        """Whether vLLM takes a report of a request: 'recving' or 'sending'."""

    @abstractmethod
    def reported(self, received: Iterable[str], failed: set[str], sent: Iterable[str]) -> None:
        """Loads and offers are through on all ranks."""

    @abstractmethod
    def finish(self, request: Request, status: Any) -> None:
        """A request is over, in the middle or at its end."""

    @abstractmethod
    def preempt(self, request: Request) -> None:
        """Take a request's blocks, as vLLM does when they are scarce."""

    def living(self) -> list[Request]:
        """The requests whose clients wait."""
        return [request for request in self.requests.values() if not request.finished]

    def abort(self, request: Request) -> None:
        """A client has left."""
        self.finish(request, statuses().FINISHED_ABORTED)

    def release(self, request: Request) -> None:
        """Give its blocks back, and forget it."""
        self.book.free(request.request_id)
        del self.requests[request.request_id]

    def occupy(self) -> None:
        """Others take all blocks that are free."""
        held = len(self.book.table(OTHERS))
        self.book.allocate(OTHERS, TOKENS * (held + self.book.block_pool.free))

    def vacate(self) -> None:
        """Others give theirs back."""
        self.book.free(OTHERS)
