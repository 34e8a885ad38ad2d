"""vLLM's scheduler on prefill, around the real `PrefillScheduler`."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

from nixl_kv.config import ANYWHERE, Config
from nixl_kv.connector.holds import Paging, PromptBlocks
from nixl_kv.connector.prefill import Address, PrefillScheduler
from nixl_kv.connector.pressure import Pressure
from nixl_kv.connector.trust import Trust
from nixl_kv.protocol import events
from sim.book import Book
from sim.making import made
from sim.memory import TOKENS, Memory, Prompt
from sim.sides import Side
from sim.standins import statuses
from sim.violations import Violation
from sim.vllm import Forward, Request

CHUNK: Final = 6  # tokens of a prompt per step


def trust() -> Trust:
    """No keys, no limits."""
    return Trust.of(Config(insecure=True, peers=ANYWHERE))


@dataclass
class _Step:
    new: list[Request] = field(default_factory=list)
    again: list[Request] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    forwards: list[Forward] = field(default_factory=list)

    @property
    def scheduled(self) -> list[Request]:
        return [*self.new, *self.again]


class PrefillSide(Side):
    """See the module's head. `tickets` are what the router was given."""

    def __init__(
        self, book: Book, memories: list[Memory], address: Address, *, share: float
    ) -> None:
        """Begin without requests."""
        super().__init__(book, memories)
        count = memories[0].blocks
        self.scheduler = made(PrefillScheduler, pressure=Pressure(count, share), trust=trust())
        self.scheduler.address = address
        self.scheduler.blocks = PromptBlocks(book, [Paging(0, TOKENS, 0)])
        self.tickets: list[tuple[dict[str, Any], Prompt]] = []
        self._preempted: list[str] = []
        self._begun: set[str] = set()
        self._step = _Step()

    def add(self, request: Request) -> None:
        """A request whose answer shall be decoded elsewhere."""
        request.kv_transfer_params = {"do_remote_decode": True, "do_remote_prefill": False}
        self.requests[request.request_id] = request
        self.scheduler.arrived(request)

    def preempt(self, request: Request) -> None:
        """Take a request's blocks; it begins anew."""
        self.book.free(request.request_id)
        request.num_computed_tokens = 0
        request.status = statuses().PREEMPTED
        self._preempted.append(request.request_id)

    def schedule(self) -> tuple[list[events.Command], list[Forward]]:
        """A chunk of every prompt that has room."""
        self._step = step = _Step()
        for request in self.living():
            self._add_to(step, request)
        holding = [r for r in self.living() if self.book.table(r.request_id)]
        if not step.scheduled and len(holding) > 1:
            self.preempt(holding[-1])  # they hold each other up
        preempted, self._preempted = self._preempted, []
        before = {r.request_id: r.num_computed_tokens for r in step.scheduled}
        output = SimpleNamespace(
            preempted_req_ids=set(preempted),
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r.request_id, num_computed_tokens=r.num_computed_tokens)
                for r in step.new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r in step.again],
                num_computed_tokens=[r.num_computed_tokens for r in step.again],
            ),
            num_scheduled_tokens=step.tokens,
        )
        self.scheduler.scheduled(output)
        for request in step.scheduled:
            name = request.request_id
            request.num_computed_tokens = before[name] + step.tokens[name]
        return self.scheduler.take(), step.forwards

    def update(self) -> None:
        """A request that has its whole answer ends; routers ask for one token."""
        for request in self._step.scheduled:
            if not request.finished and request.num_computed_tokens == _end(request):
                self.finish(request, statuses().FINISHED_LENGTH_CAPPED)
        self._step = _Step()

    def finish(self, request: Request, status: Any) -> None:
        """Its blocks stay if its ticket goes out."""
        request.status = status
        table = self.book.get_block_ids(request.request_id)
        keep, params = self.scheduler.finished(request, table)
        if keep:
            if params is None:
                raise Violation("no ticket", request.request_id)
            self.tickets.append((params, request.prompt))
        else:
            self.release(request)

    def expects(self, kind: str, request: str) -> bool:
        """An offer ends after its ticket went out."""
        known = self.requests.get(request)
        return kind == "sending" and known is not None and known.finished

    def reported(self, received: Iterable[str], failed: set[str], sent: Iterable[str]) -> None:
        """Offers that ended give their blocks back."""
        del received, failed
        sent = list(sent)
        self.scheduler.release(sent)
        for request in sent:
            self.release(self.requests[request])

    def _add_to(self, step: _Step, request: Request) -> None:
        computed = request.num_computed_tokens
        count = min(CHUNK, _end(request) - computed)
        if not self.book.allocate(request.request_id, computed + count):
            return
        request.status = statuses().RUNNING
        (step.again if request.request_id in self._begun else step.new).append(request)
        self._begun.add(request.request_id)
        step.tokens[request.request_id] = count
        table = self.book.table(request.request_id)
        tokens = range(computed, min(computed + count, request.num_prompt_tokens))
        step.forwards.append(Forward(request.prompt, table, tokens))


def _end(request: Request) -> int:
    """All tokens but the answer's last are computed."""
    return request.num_prompt_tokens + request.steps_left - 1
