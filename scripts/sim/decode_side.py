"""vLLM's scheduler on decode, around the real `DecodeScheduler`."""

from collections.abc import Callable, Iterable
from typing import Any

from nixl_kv.connector.decode import DecodeScheduler
from nixl_kv.errors import RemoteProtocolError
from nixl_kv.protocol import events
from sim.book import Book
from sim.making import made
from sim.memory import TOKENS, Memory
from sim.prefill_side import trust
from sim.sides import Side
from sim.standins import statuses
from sim.violations import Violation
from sim.vllm import Forward, Request

ANSWER = 2
"""Steps that a request runs for once its prompt is there."""


class DecodeSide(Side):
    """See the module's head."""

    def __init__(
        self, book: Book, memories: list[Memory], clock: Callable[[], float], *, verify: float = 0
    ) -> None:
        """Begin without requests."""
        super().__init__(book, memories)
        self.scheduler = made(
            DecodeScheduler, entry_sizes=[TOKENS], trust=trust(), clock=clock, verify=verify
        )
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._running: list[Request] = []
        self.refused = 0

    def add(self, request: Request) -> None:
        """A request with a ticket; one that does not hold means to compute."""
        self.requests[request.request_id] = request
        try:
            self.scheduler.arrived(request, request.kv_transfer_params)
        except RemoteProtocolError:
            self.refused += 1

    def preempt(self, request: Request) -> None:
        """Take the blocks of a request that runs; it is computed again later."""
        if request.status is statuses().RUNNING:
            self.book.free(request.request_id)
            request.status, request.num_computed_tokens = statuses().PREEMPTED, 0
            request.local = 0

    def schedule(self) -> tuple[list[events.Command], list[Forward]]:
        """Go on with what runs, park what loads, and begin what has room."""
        self._running, forwards = [], []
        for request in self.living():
            if request.status is statuses().WAITING_FOR_REMOTE_KVS:
                self._unpark(request)
            if request.status in (statuses().WAITING, statuses().PREEMPTED):
                self._admit(request)
            if request.status is statuses().RUNNING:
                forwards += self._run(request)
        return self.scheduler.take(), forwards

    def update(self) -> None:
        """What has its whole answer ends."""
        for request in self._running:
            request.steps_left -= 1
            if request.steps_left <= 0 and not request.finished:
                self._check(request, range(request.num_prompt_tokens))
                self.finish(request, statuses().FINISHED_LENGTH_CAPPED)

    def finish(self, request: Request, status: Any) -> None:
        """The blocks of one that loads stay until that is over."""
        loading = request.status is statuses().WAITING_FOR_REMOTE_KVS
        loading = loading and request.request_id not in self._received
        self._received.discard(request.request_id)
        self._failed.discard(request.request_id)
        request.status = status
        self.scheduler.finished(request)
        if not loading:
            self.release(request)

    def expects(self, kind: str, request: str) -> bool:
        """A load ends while its request is parked, or over before its time."""
        known = self.requests.get(request)
        parked = known is not None and (
            known.finished or known.status is statuses().WAITING_FOR_REMOTE_KVS
        )
        return kind == "recving" and parked

    def reported(self, received: Iterable[str], failed: set[str], sent: Iterable[str]) -> None:
        """Loads are through on all ranks."""
        del sent
        for name in received:
            request = self.requests[name]
            if request.finished:
                self.release(request)
                continue
            self._received.add(name)
            if name in failed:
                self._failed.add(name)
                request.num_computed_tokens = 0

    def _unpark(self, request: Request) -> None:
        name = request.request_id
        if name not in self._received:
            return
        self._received.remove(name)
        request.status = statuses().WAITING
        if name in self._failed:
            self._failed.remove(name)
            self.book.free(name)
            request.local = 0
        else:
            self._check(request, range(request.num_computed_tokens))

    def _admit(self, request: Request) -> None:
        """Find out what is to be loaded, and give it blocks."""
        load, parks = 0, False
        if request.num_computed_tokens == 0:
            load, parks = self.scheduler.matched(request, request.local)
        computed = max(request.num_computed_tokens, request.local)
        wanted = computed + load if parks else request.num_prompt_tokens + 1
        first = not self.book.table(request.request_id)
        if not self.book.allocate(request.request_id, wanted):
            if not self._running:  # what has been loaded is given up rather than waited for
                self.book.free(request.request_id)
                request.num_computed_tokens = request.local = 0
            return
        table = self.book.table(request.request_id)
        if first and request.local:
            self._write(request, range(request.local))  # what its own cache has of it
        self.scheduler.allocated(request, [table], load)
        request.num_computed_tokens = computed + load
        request.status = statuses().WAITING_FOR_REMOTE_KVS if parks else statuses().RUNNING

    def _run(self, request: Request) -> list[Forward]:
        self._running.append(request)
        tokens = range(request.num_computed_tokens, request.num_prompt_tokens)
        request.num_computed_tokens = request.num_prompt_tokens
        return [Forward(request.prompt, self.book.table(request.request_id), tokens)]

    def _write(self, request: Request, tokens: range) -> None:
        for memory in self.memories:
            memory.write(request.prompt, self.book.table(request.request_id), tokens)

    def _check(self, request: Request, tokens: range) -> None:
        """Every token that vLLM believes in has its own bytes."""
        table = self.book.table(request.request_id)
        for rank, memory in enumerate(self.memories):
            wrong = memory.wrong(request.prompt, table, tokens)
            if wrong:
                told = f"{request.request_id}, rank {rank}: tokens {wrong}"
                raise Violation("wrong bytes", told)
