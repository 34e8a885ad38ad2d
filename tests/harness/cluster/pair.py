"""A prefill and a decode engine, as clients and routers see them."""

from typing_extensions import Self

from harness.cluster.client import TIMEOUT_S, Answer, Client, Prompt, Ticket
from harness.cluster.engines import Engine
from harness.cluster.router import Router


class Pair:
    """Connections to both engines, and to the router before them if there is one."""

    def __init__(
        self,
        prefill: Engine,
        decode: Engine,
        router: Router | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.router = router
        self.to_prefill = Client(prefill.url, timeout_s=timeout_s)
        self.to_decode = Client(decode.url, timeout_s=timeout_s)
        self._to_router = Client(router.url, timeout_s=timeout_s) if router else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The engines go on."""
        for client in (self.to_prefill, self.to_decode, self._to_router):
            if client is not None:
                client.close()

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.prefill, self.decode

    @property
    def to_router(self) -> Client:
        assert self._to_router is not None, "these engines have no router"
        return self._to_router

    def complete(self, prompt: Prompt, max_tokens: int = 16, **extra: object) -> Answer:
        """Ask as a router does: prefill first, then decode with prefill's ticket as it is."""
        return self.decode_with(self.to_prefill.ticket(prompt), prompt, max_tokens, **extra)

    def decode_with(
        self, ticket: Ticket, prompt: Prompt, max_tokens: int = 16, **extra: object
    ) -> Answer:
        """Ask decode alone, with a ticket that prefill gave before."""
        return self.to_decode.complete(prompt, max_tokens, kv_transfer_params=ticket, **extra)
