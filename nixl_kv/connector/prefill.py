"""The scheduler's side of prefill: which requests are offered, and with which ticket."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from nixl_kv.connector.holds import NULL_BLOCK, PromptBlocks
from nixl_kv.connector.pressure import Pressure
from nixl_kv.connector.translate import context_extras
from nixl_kv.connector.trust import Trust
from nixl_kv.ids import Incarnation, Nonce, RequestId, new_nonce
from nixl_kv.protocol import events
from nixl_kv.protocol.ticket import Ticket, context_hash

logger = logging.getLogger(__name__)


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
    """Makes offers, from the blocks of vLLM's cache manager."""

    def __init__(self, pressure: Pressure, trust: Trust) -> None:
        """Begin with nothing on offer; `address` and `blocks` are set before any request."""
        self._pressure = pressure
        self._trust = trust
        self._offered: dict[RequestId, _Offered] = {}
        self._commands: list[events.Command] = []
        self.address: Address | None = None
        self.blocks: PromptBlocks | None = None

    def arrived(self, request: Request) -> None:
        """A request asks to be decoded elsewhere. Its nonce is made now; nobody knows it yet."""
        nonce = new_nonce()
        context = context_hash(nonce, request.prompt_token_ids, context_extras(request))
        self._offered[RequestId(request.request_id)] = _Offered(request, nonce, context)

    def scheduled(self, output: SchedulerOutput) -> None:
        """Tell the workers of the requests whose prompt this step completes, with their blocks."""
        self.release(output.preempted_req_ids or ())
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
            self.release([request.request_id])
            return False, None
        self._commands.append(events.Offer(offered.nonce, RequestId(request.request_id)))
        self._press(offered, tables)
        ticket = Ticket(
            remote_engine_id=address.engine,
            remote_host=address.host,
            remote_port=address.port,
            incarnation=address.incarnation,
            nonce=offered.nonce,
            num_tokens=request.num_prompt_tokens,
            context=offered.context,
        )
        return True, self._trust.seal(ticket).params()

    def release(self, requests: Iterable[str]) -> None:
        """Offers have ended, or their blocks were taken away: nothing is held for them."""
        requests = list(requests)
        self._pressure.ended(requests)
        if self.blocks is not None:
            self.blocks.release_all(requests)

    def take(self) -> list[events.Command]:
        """The commands for the next step."""
        commands, self._commands = self._commands, []
        return commands

    def _press(self, offered: _Offered, tables: Sequence[Sequence[int]]) -> None:
        """Another offer holds blocks: older ones may have to go."""
        held = {block for table in tables for block in table} - {NULL_BLOCK}
        self._pressure.offer(RequestId(offered.request.request_id), offered.nonce, held)
        self._commands += [events.Revoke(nonce) for nonce in self._pressure.revocable()]

    def _prepare(self, output: SchedulerOutput, request_id: str, computed: int) -> None:
        offered = self._offered.get(RequestId(request_id))
        if offered is None or self.blocks is None:
            return
        prompt = offered.request.num_prompt_tokens
        completes = computed < prompt <= computed + output.num_scheduled_tokens[request_id]
        self.blocks.hold(RequestId(request_id), prompt)
        if not completes:
            return
        offered.tables = self.blocks.tables(RequestId(request_id), prompt)
        self._commands.append(
            events.Prepare(
                offered.nonce, RequestId(request_id), offered.context, prompt, offered.tables
            )
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
        if self.blocks is None or self.blocks.changed(offered.tables, tables):
            return "its blocks changed since its prompt was computed"
        return None
