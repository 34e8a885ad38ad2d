"""The scheduler's side of prefill: which requests are offered, and with which ticket."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from nixl_kv.connector.translate import context_extras
from nixl_kv.geometry import blocks
from nixl_kv.ids import Incarnation, Nonce, RequestId, new_nonce
from nixl_kv.protocol import events
from nixl_kv.protocol.ticket import Ticket, context_hash

logger = logging.getLogger(__name__)

Tables: TypeAlias = tuple[list[int], ...]
"""A request's block table, for each group that is transferred."""


@dataclass(frozen=True)
class Address:
    """What every ticket of this life of the engine says."""

    engine: str
    incarnation: Incarnation
    host: str
    port: int


@dataclass
class _Offered:
    request: Request
    nonce: Nonce
    context: str
    tables: tuple[bytes, ...] = ()  # as prepared; empty until the prompt's last step


class PrefillScheduler:
    """Makes offers. `entry_sizes` are the tokens per block table entry, for each group."""

    def __init__(self, entry_sizes: Sequence[int]) -> None:
        """Begin with nothing on offer; `address` and `block_tables` are set before any request."""
        self._entry_sizes = entry_sizes
        self._offered: dict[RequestId, _Offered] = {}
        self._commands: list[events.Command] = []
        self.address: Address | None = None
        self.block_tables: Callable[[RequestId], Tables] | None = None

    def arrived(self, request: Request) -> None:
        """A request asks to be decoded elsewhere. Its nonce is made now; nobody knows it yet."""
        nonce = new_nonce()
        context = context_hash(nonce, request.prompt_token_ids, context_extras(request))
        self._offered[RequestId(request.request_id)] = _Offered(request, nonce, context)

    def scheduled(self, output: SchedulerOutput) -> None:
        """Tell the workers of the requests whose prompt this step completes, with their blocks."""
        for new in output.scheduled_new_reqs:
            self._prepare(output, new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._prepare(output, request, computed)

    def finished(
        self, request: Request, tables: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over: pin its blocks and hand out its ticket, or withdraw the offer.

        Args:
            request: of vLLM.
            tables: its block table, for each group that is transferred.
        """
        offered = self._offered.pop(RequestId(request.request_id), None)
        if offered is None:
            return False, None
        address, obstacle = self.address, self._obstacle(offered, tables)
        if address is None or obstacle is not None:
            logger.info("request %s is not offered: %s", request.request_id, obstacle)
            self._commands.append(events.Withdraw(offered.nonce))
            return False, None
        self._commands.append(events.Offer(offered.nonce, RequestId(request.request_id)))
        ticket = Ticket(
            remote_engine_id=address.engine,
            remote_host=address.host,
            remote_port=address.port,
            incarnation=address.incarnation,
            nonce=offered.nonce,
            num_tokens=request.num_prompt_tokens,
            context=offered.context,
        )
        return True, ticket.params()

    def take(self) -> list[events.Command]:
        """The commands for the next step."""
        commands, self._commands = self._commands, []
        return commands

    def _prepare(self, output: SchedulerOutput, request_id: str, computed: int) -> None:
        offered = self._offered.get(RequestId(request_id))
        if offered is None:
            return
        prompt = offered.request.num_prompt_tokens
        completes = computed < prompt <= computed + output.num_scheduled_tokens[request_id]
        if not completes or self.block_tables is None:
            return
        tables = self.block_tables(RequestId(request_id))
        offered.tables = self._prompt_tables(tables, prompt)
        self._commands.append(
            events.Prepare(
                offered.nonce, RequestId(request_id), offered.context, prompt, offered.tables
            )
        )

    def _prompt_tables(self, tables: Sequence[Sequence[int]], prompt: int) -> tuple[bytes, ...]:
        """The entries that hold the prompt, in the wire's form."""
        return tuple(
            blocks.to_bytes(blocks.block_ids(table[: len(blocks.entries(0, prompt, size))]))
            for table, size in zip(tables, self._entry_sizes, strict=True)
        )

    def _obstacle(self, offered: _Offered, tables: Sequence[Sequence[int]]) -> str | None:
        """Why a finished request cannot be offered."""
        request = offered.request
        if self.address is None:
            return "this engine is not described yet"
        if request.status not in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        ):
            return f"it ended as {request.status}"
        if request.num_computed_tokens < request.num_prompt_tokens or not offered.tables:
            return f"{request.num_computed_tokens} of {request.num_prompt_tokens} tokens computed"
        if self._prompt_tables(tables, request.num_prompt_tokens) != offered.tables:
            return "its blocks changed since its prompt was computed"
        return None
