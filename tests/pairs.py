"""A prefill and a decode rank in one process: the real threads, sockets and machines."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np
from caches import Cache
from nixl_kv.connector.agents import Agents
from nixl_kv.connector.dataplane import DataPlane
from nixl_kv.connector.engine import Machinery
from nixl_kv.connector.publisher import Publisher
from nixl_kv.connector.registering import register
from nixl_kv.connector.results import LoadResult, Result
from nixl_kv.connector.sources import Household, Identity
from nixl_kv.connector.thread import TransferThread
from nixl_kv.protocol.offers import Offers
from nixl_kv.protocol.receiver import Receiver
from nixl_kv.protocol.requests import Requests
from nixl_kv.protocol.sender import Sender
from nixl_kv.transport.control import Control

from nixl_kv.geometry import blocks
from nixl_kv.geometry.ranks import Shape
from nixl_kv.ids import (
    EngineId,
    Incarnation,
    Nonce,
    Rank,
    RequestId,
    engine_incarnation,
    new_claim,
    new_incarnation,
    new_nonce,
)
from nixl_kv.protocol import events, messages, ticket
from nixl_kv.transport.base import Transport
from nixl_kv.transport.slots import SlotPage

HOST = "127.0.0.1"
MODEL = {"served_model_name": "tiny", "num_hidden_layers": "3"}


@dataclasses.dataclass(frozen=True)
class Times:
    offer_ttl_s: float = 5.0
    lease_s: float = 2.0
    timeout_s: float = 5.0


class Side:
    """One rank of one engine, as its worker and its scheduler would drive it."""

    def __init__(
        self,
        engine: str,
        cache: Cache,
        make_transport: Callable[[], Transport],
        *,
        times: Times | None = None,
        model: dict[str, str] | None = None,
        rank: int = 0,
    ) -> None:
        self.engine = EngineId(engine)
        self.cache = cache
        self.rank = Rank(rank)
        self.times = times or Times()
        self.model = model or MODEL
        self.incarnation = new_incarnation()
        self.thread = TransferThread(lambda: self._build(make_transport))
        self.machinery = self.thread.start()
        self.results: list[Result] = []
        self.publisher: Publisher | None = None

    def _build(self, make_transport: Callable[[], Transport]) -> Machinery:
        transport, control, slots = make_transport(), Control(), SlotPage(64)
        layout = self.cache.layout()
        household = Household.alone(layout, Identity(self.model, self.rank))
        agents = Agents(make_transport, household)
        agents.open()
        register(transport, layout, slots)
        port = control.listen(f"tcp://{HOST}", 0)
        reader = messages.Reader(self.engine, self.incarnation, self.rank)
        described = messages.RankDescription(
            self.incarnation,
            ticket.endpoint(HOST, port),
            transport.metadata(),
            messages.Slots(slots.address, slots.count),
            layout,
        )
        times = self.times
        offers = Offers(num_slots=64, offer_ttl_s=times.offer_ttl_s, lease_s=times.lease_s)
        requests = Requests(reader, timeout_s=times.timeout_s, renew_interval_s=times.lease_s / 5)
        return Machinery(
            control,
            DataPlane(agents, household),
            transport,
            slots,
            Sender(self.incarnation, offers),
            Receiver(reader, requests),
            messages.encode_rank(described),
        )

    @property
    def described(self) -> messages.RankDescription:
        return messages.decode_rank(self.machinery.description)

    def publish(self, siblings: Sequence["Side"] = ()) -> None:
        """Describe this engine, of which this rank is the first, if not the only one."""
        ranks = tuple(side.described for side in (siblings or (self,)))
        self.life = engine_incarnation([Incarnation(rank.incarnation) for rank in ranks])
        self.publisher = Publisher(HOST, 0)
        self.publisher.publish(
            messages.Description(
                messages.WIRE_VERSION,
                self.life,
                self.engine,
                self.model,
                Shape(len(ranks), 1),
                ranks,
            )
        )

    @property
    def endpoint(self) -> str:
        return self.described.endpoint

    def offer(
        self,
        request: str,
        table: Sequence[int],
        num_tokens: int,
        *,
        siblings: Sequence["Side"] = (),
    ) -> ticket.Ticket:
        """What prefill's scheduler and workers do for a finished request."""
        assert self.publisher is not None
        nonce, context = new_nonce(), "0" * 32
        tables = (blocks.to_bytes(blocks.block_ids(table)),)
        for side in siblings or (self,):
            side.thread.submit(
                [
                    events.Prepare(nonce, RequestId(request), context, num_tokens, tables),
                    events.Offer(nonce, RequestId(request)),
                ]
            )
        return ticket.Ticket(
            remote_engine_id=self.engine,
            remote_host=HOST,
            remote_port=self.publisher.port,
            incarnation=self.life,
            nonce=Nonce(nonce),
            num_tokens=num_tokens,
            context=context,
        )

    def fetch(self, request: str, offered: ticket.Ticket) -> None:
        self.thread.submit([events.Fetch(RequestId(request), offered, new_claim())])

    def meet(self, siblings: Sequence["Side"]) -> None:
        """What the first step of decode's scheduler tells each worker."""
        layouts = tuple(side.described.layout for side in siblings)
        self.thread.submit([events.Siblings(layouts)])

    def load(
        self,
        request: str,
        table: Sequence[int],
        *,
        first: int = 0,
        end: int | None = None,
        verify: bool = False,
    ) -> None:
        """Fill the blocks of this table, which begins with the entry number `first`."""
        ids = (blocks.to_bytes(blocks.block_ids(table)),)
        size = self.cache.sizes.tokens
        end = end or (first + len(table)) * size
        load = events.Load(RequestId(request), first * size, end, ids, verify)
        self.thread.submit([load])

    def drop(self, request: str) -> None:
        self.thread.submit([events.Drop(RequestId(request))])

    def wait(self, condition: Callable[[list[Result]], bool], timeout_s: float = 10.0) -> None:
        """Until the results so far fulfil the condition."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.results += self.thread.take()
            if condition(self.results):
                return
            assert time.monotonic() < deadline, f"{self.engine}: only {self.results}"
            time.sleep(0.002)

    def wait_loaded(self, request: str, timeout_s: float = 10.0) -> events.Loaded:
        self.wait(lambda results: request in loaded(results), timeout_s)
        return loaded(self.results)[request]

    def outcome(self, request: str, timeout_s: float = 10.0) -> str | None:
        """Why a load failed; None for a good one."""
        failure = self.wait_loaded(request, timeout_s).failure
        return None if failure is None else str(failure)

    def wait_sent(self, request: str, timeout_s: float = 10.0) -> events.Sent:
        self.wait(lambda results: request in sent(results), timeout_s)
        return sent(self.results)[request]

    def close(self) -> None:
        self.thread.stop()
        if self.publisher is not None:
            self.publisher.stop()
        self.machinery.receiver.requests.validate()
        self.machinery.sender.offers.validate()


def loaded(results: list[Result]) -> dict[str, events.Loaded]:
    found = [r.loaded for r in results if isinstance(r, LoadResult)]
    by_request = {r.request: r for r in found}
    assert len(found) == len(by_request), "a request was reported twice"
    return dict(by_request)


def sent(results: list[Result]) -> dict[str, events.Sent]:
    found = [r for r in results if isinstance(r, events.Sent)]
    by_request = {r.request: r for r in found}
    assert len(found) == len(by_request), "an offer was reported twice"
    return dict(by_request)


def filled(cache: Cache, seed: int) -> Cache:
    cache.fill(np.random.default_rng(seed))
    return cache


Pair = Callable[..., tuple[Side, Side]]
"""The fixture that makes a prefill and a decode side."""
