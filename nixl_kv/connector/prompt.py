"""What the two halves of the scheduler need to know of a request of vLLM's, as a record of ours."""

from collections.abc import Sequence
from dataclasses import dataclass

from nixl_kv.ids import Nonce, RequestId
from nixl_kv.protocol.ticket import context_hash


@dataclass(frozen=True)
class Prompt:
    """A request's prompt, and what else its KV depends on (see `context_hash`)."""

    request: RequestId
    num_tokens: int
    token_ids: Sequence[int] | None  # None where it came as embeddings
    extras: tuple[bytes, ...] = ()

    def context(self, nonce: Nonce) -> str:
        """The hash that a ticket with this nonce has."""
        return context_hash(nonce, self.token_ids, self.extras)
