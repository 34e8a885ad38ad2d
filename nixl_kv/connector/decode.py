"""The scheduler's side of decode: which requests load KV, and into which blocks."""

import logging
import random
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vllm.v1.request import Request

from nixl_kv.connector.translate import context_extras
from nixl_kv.connector.trust import Trust
from nixl_kv.errors import RemoteProtocolError
from nixl_kv.geometry import blocks
from nixl_kv.ids import Nonce, RequestId, new_claim
from nixl_kv.protocol import events
from nixl_kv.protocol.ticket import Ticket, context_hash

logger = logging.getLogger(__name__)

REMEMBER_S: Final = 600.0
"""How long a used nonce is remembered here. Later than that prefill denies it anyway."""


@dataclass
class _Incoming:
    """A request with a ticket that holds."""

    ticket: Ticket
    local: int = 0  # tokens that vLLM found in its own cache, by its last question
    loading: bool = False


class DecodeScheduler:
    """Decides loads. `entry_sizes` are the tokens per block table entry, per group."""

    def __init__(self, entry_sizes: Sequence[int], trust: Trust, *, verify: float = 0.0) -> None:
        """Begin with nothing to load. `verify` is the share of loads that are verified."""
        self._verify = verify
        self._entry_sizes = entry_sizes
        self._trust = trust
        self._incoming: dict[RequestId, _Incoming] = {}
        self._used: OrderedDict[Nonce, float] = OrderedDict()
        self._commands: list[events.Command] = []

    def arrived(self, request: Request, params: object) -> None:
        """A request brings a ticket: ask for its blocks at once, so that they wait for it.

        Raises:
            RemoteProtocolError: if the ticket does not hold; the request is computed here.
        """
        ticket = Ticket.parse(params)
        self._trust.check(ticket)  # before anything is connected to where it leads
        request_id = RequestId(request.request_id)
        if getattr(request, "abort_immediately", False):
            # Refused by the frontend, with another prompt in its place: only release the offer.
            self._commands += [events.Fetch(request_id, ticket, new_claim())]
            self._commands += [events.Drop(request_id)]
            return
        self._check(request, ticket)
        self._used[Nonce(ticket.nonce)] = time.monotonic()
        self._incoming[request_id] = _Incoming(ticket)
        self._commands.append(events.Fetch(request_id, ticket, new_claim()))

    def matched(self, request: Request, local: int) -> tuple[int, bool]:
        """How many tokens to load beyond the `local` ones. May be asked often, changes nothing.

        At most all but the last of the prompt: that one is computed here, for its logits.
        """
        incoming = self._incoming.get(RequestId(request.request_id))
        if incoming is None or incoming.loading:
            return 0, False
        incoming.local = local
        load = min(incoming.ticket.num_tokens, request.num_prompt_tokens - 1) - local
        return (load, True) if load > 0 else (0, False)

    def allocated(self, request: Request, tables: Sequence[Sequence[int]], load: int) -> None:
        """The request has blocks. Only its first allocation decides: load, or release prefill.

        Args:
            request: of vLLM.
            tables: its whole block table, for each group that is transferred.
            load: the tokens to be loaded, 0 for none.
        """
        request_id = RequestId(request.request_id)
        incoming = self._incoming.get(request_id)
        if incoming is None or incoming.loading:
            return
        if load == 0:
            self._release(request_id)
            return
        incoming.loading = True
        begin, end = incoming.local, incoming.local + load
        spans = [blocks.entries(begin, load, size) for size in self._entry_sizes]
        wanted = [
            blocks.to_bytes(blocks.block_ids(table[span.start : span.stop]))
            for table, span in zip(tables, spans, strict=True)
        ]
        verify = random.random() < self._verify  # noqa: S311 - one decision for all ranks
        self._commands.append(events.Load(request_id, begin, end, tuple(wanted), verify))

    def finished(self, request: Request) -> None:
        """A request is over, perhaps before it loaded, or while it does."""
        request_id = RequestId(request.request_id)
        if request_id in self._incoming:
            self._release(request_id)

    def take(self) -> list[events.Command]:
        """The commands for the next step."""
        commands, self._commands = self._commands, []
        return commands

    def _release(self, request_id: RequestId) -> None:
        """A drop of what was loaded and reported long ago does nothing."""
        del self._incoming[request_id]
        self._commands.append(events.Drop(request_id))

    def _check(self, request: Request, ticket: Ticket) -> None:
        """A ticket is good for one request, and for its own prompt."""
        nonce = Nonce(ticket.nonce)
        self._forget_used()
        if nonce in self._used:
            raise RemoteProtocolError("kv_transfer_params: nonce was used before")
        if ticket.num_tokens > request.num_prompt_tokens:
            raise RemoteProtocolError(
                f"kv_transfer_params: num_tokens is {ticket.num_tokens}; "
                f"allowed: up to the prompt's {request.num_prompt_tokens}"
            )
        context = context_hash(nonce, request.prompt_token_ids, context_extras(request))
        if context != ticket.context:
            raise RemoteProtocolError("kv_transfer_params: context is another prompt's")

    def _forget_used(self) -> None:
        now = time.monotonic()
        while self._used and next(iter(self._used.values())) + REMEMBER_S < now:
            self._used.popitem(last=False)
