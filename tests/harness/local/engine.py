"""An engine inside this process: a transfer engine for each rank, and the engine's directory.

It does what vLLM's scheduler and workers do for requests: offers, loads, and waiting for both.
Caches are the caller's: a layout for each rank.
"""

import inspect
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from harness.local.machines import by_name
from nixl_kv.config import Config
from nixl_kv.engine.directory import DirectoryServer, describe_engine
from nixl_kv.engine.engine import FEATURES, RankSpec, TransferEngine
from nixl_kv.engine.loop import Parts
from nixl_kv.engine.trust import Trust
from nixl_kv.feature import BuildFeature
from nixl_kv.geometry.layout import CacheLayout, Table
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.ids import Claim, EngineId, Nonce, Rank, RequestId, new_claim, new_nonce
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import Find, Found, RankDescription
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.reading.paths import Buffer, allocate
from nixl_kv.transport.base import ControlPlane, NoPorts, Ports, Transport

HOST: Final = "127.0.0.1"
MODEL: Final[Mapping[str, str]] = {"served_model_name": "tiny", "num_hidden_layers": "3"}
HAS_STAGED, HAS_VERIFY, HAS_CONVERSATIONS = (
    any(build.__module__ == name for build in FEATURES)
    for name in ("nixl_kv.reading.staged", "nixl_kv.verify", "nixl_kv.conversations.part")
)
"""Whether this tree has the feature."""
HOST_PATHS: Final = ("direct", "staged") if HAS_STAGED else ("direct",)
"""The ways to read host memory that this tree has."""
CONTEXT: Final = "0" * 32
"""The context hash of every prompt: this engine does not compute, so nothing depends on it."""

TIMEOUT_S: Final = 30.0
"""How long a wait for results may take, on a busy machine."""

NAP_S: Final = 0.001

Tables = Sequence[Sequence[int]]
"""A block table, or the end of one, for each cache group; -1 stands for no block."""


@dataclass
class LocalRank:
    """One rank: its transfer engine, and all results that it has given."""

    engine: TransferEngine
    description: RankDescription
    loads: dict[RequestId, events.LoadEnded] = field(default_factory=dict)
    offers: dict[RequestId, events.OfferEnd] = field(default_factory=dict)
    ready: set[RequestId] = field(default_factory=set)
    """Early loads that can use blocks."""
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def parts(self) -> Parts:
        """These belong to the transfer thread."""
        if self.engine.loop is None:
            raise RuntimeError("this rank has not started")
        return self.engine.loop.parts

    def poll(self) -> None:
        """Take all results; a request that is reported a second time is an error."""
        for result in self.engine.pop_results():
            match result:
                case events.LoadEnded():
                    assert result.request not in self.loads, f"load {result.request} ended twice"
                    self.loads[result.request] = result
                case events.OfferEnded():
                    assert result.request not in self.offers, f"offer {result.request} ended twice"
                    self.offers[result.request] = result.end
                case events.LoadReady():
                    self.ready.add(result.request)
                case events.NewLife():
                    self.description = result.description
                case events.Counts():
                    for name, amount in by_name(result).items():
                        self.counts[name] = self.counts.get(name, 0) + amount


Part = TypeVar("Part")


def features_with(**options: Any) -> tuple[BuildFeature, ...]:
    """All features of a rank; each gets those of the options that its `build` knows."""
    known = [(build, inspect.signature(build).parameters) for build in FEATURES]
    return tuple(
        partial(build, **{name: options[name] for name in options if name in parameters})
        for build, parameters in known
    )


def parts_of(parts: Parts, kind: type[Part]) -> list[Part]:
    """The parts of this kind that features have added to a rank; a role may have none."""
    return [
        part
        for feature in parts.features
        for part in (feature.prefill, feature.load, feature.worker, feature.step)
        if isinstance(part, kind)
    ]


def part_of(parts: Parts, kind: type[Part]) -> Part:
    (part,) = parts_of(parts, kind)
    return part


def _allocate(layout: CacheLayout, staging_bytes: int | None, length: int) -> Buffer:
    return allocate(staging_bytes or length, layout.memory, layout.device)


class LocalEngine:
    def __init__(
        self,
        name: str,
        layouts: Sequence[CacheLayout],
        make_transport: Callable[[], Transport],
        *,
        shape: ParallelShape | None = None,
        config: Config | None = None,
        roles: str = "prefill and decode",
        make_control: Callable[[], ControlPlane] | None = None,
        staging_bytes: int | None = None,
        num_ring_slots: int | None = None,
        only: Container[int] | None = None,
        ports: Ports | None = None,
        find: Callable[[Find], Found] | None = None,
    ) -> None:
        """Start all ranks, or `only` some, and describe them.

        Args:
            layouts: of the ranks' caches, in rank order.
            shape: by default as many tensor-parallel ranks.
            roles: with the words "prefill" and "decode", or one of them.
            make_control: called once for each rank, and for the directory.
            staging_bytes: of each rank, instead of those that are configured.
            num_ring_slots: of each staging ring, instead of those that its memory's kind has.
            ports: those of all transports.
            find: how its directory answers; see `DirectoryServer`.
        """
        self.name = EngineId(name)
        self.config = config or Config(host=HOST, lease_s=2.0)
        trust = Trust.of(self.config)
        make_control = make_control or trust.control
        self.ranks: list[LocalRank] = []
        for number, layout in enumerate(layouts):
            if only is not None and number not in only:
                continue
            spec = RankSpec(
                # As on nodes of their own, until they are told of each other.
                engine=EngineId(f"{name} on node {number}"),
                rank=Rank(number),
                layout=layout,
                model=MODEL,
                config=self.config,
                host=self.config.host,
                is_prefill="prefill" in roles,
                is_decode="decode" in roles,
                make_transport=make_transport,
                make_control=make_control,
                check_ticket=trust.check,
                ports=ports or NoPorts(),
                features=features_with(
                    make_memory=partial(_allocate, layout, staging_bytes),
                    num_slots=num_ring_slots,
                ),
            )
            engine = TransferEngine(spec)
            self.ranks.append(LocalRank(engine, engine.start()))
        self.description = describe_engine(
            self.name,
            MODEL,
            shape or ParallelShape(len(layouts), 1),
            [rank.description for rank in self.ranks],
        )
        self.directory = DirectoryServer(
            make_control(), self.config.host, 0, seal=trust.seal, find=find
        )
        self.directory.publish(self.description)
        self.directory.start()
        self.set_layouts(layouts)

    def set_layouts(self, layouts: Sequence[CacheLayout]) -> None:
        self.submit(events.SetEngine(self.name, tuple(layouts)))

    def submit(self, *commands: events.Command) -> None:
        for rank in self.ranks:
            rank.engine.submit(rank.engine.before_step(commands))

    # prefill

    def offer(self, request: str, tables: Tables, num_tokens: int) -> Ticket:
        """Offer a finished prefill whose KV is in these blocks."""
        nonce, request_id = new_nonce(), RequestId(request)
        self.submit(
            events.PrepareOffer(
                nonce, request_id, CONTEXT, num_tokens, tuple(map(Table.of, tables))
            ),
            events.PublishOffer(nonce, request_id),
        )
        return self.ticket(nonce, num_tokens)

    def publish(self) -> None:
        """Describe the engine, as its ranks are by now."""
        ranks = [rank.description for rank in self.ranks]
        self.description = describe_engine(self.name, MODEL, self.description.shape, ranks)
        self.directory.publish(self.description)

    def ticket(self, nonce: Nonce, num_tokens: int) -> Ticket:
        return Ticket(
            engine=self.name,
            host=self.config.host,
            port=self.directory.port,
            incarnation=self.description.incarnation,
            nonce=nonce,
            num_tokens=num_tokens,
            context=CONTEXT,
        )

    def wait_offer(self, request: str, timeout_s: float = TIMEOUT_S) -> list[events.OfferEnd]:
        name = RequestId(request)
        self.wait(lambda: all(name in rank.offers for rank in self.ranks), timeout_s)
        return [rank.offers[name] for rank in self.ranks]

    # decode

    def prepare_load(
        self, request: str, ticket: Ticket, claim: Claim | None = None, *, is_early: bool = False
    ) -> None:
        claim = claim or new_claim()
        early = msgspec.structs.replace(ticket, is_early=is_early)
        self.submit(events.PrepareLoad(RequestId(request), early, claim))

    def start_load(
        self, request: str, tables: Tables, tokens: range, *, verify: bool = False
    ) -> None:
        """The request has blocks: read these tokens into them.

        `tables` begin at the entry that holds the first of these tokens.
        """
        layout = self.ranks[0].description.layout
        sent = tables_from(layout, tables, tokens.start)
        self.submit(
            events.StartLoad(RequestId(request), tokens.start, tokens.stop, sent, verify=verify)
        )

    def cancel_load(self, request: str) -> None:
        self.submit(events.CancelLoad(RequestId(request)))

    def wait_load(self, request: str, timeout_s: float = TIMEOUT_S) -> list[events.LoadEnded]:
        name = RequestId(request)
        self.wait(lambda: all(name in rank.loads for rank in self.ranks), timeout_s)
        return [rank.loads[name] for rank in self.ranks]

    def wait_failure(self, request: str, timeout_s: float = TIMEOUT_S) -> str | None:
        """Why a load failed, on the first rank where it did; None if it is good everywhere."""
        reports = self.wait_load(request, timeout_s)
        return next((one.failure.detail for one in reports if one.failure), None)

    # both

    def wait(self, condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
        """Take results until a condition holds."""
        deadline = time.monotonic() + timeout_s
        while True:
            for rank in self.ranks:
                rank.poll()
            if condition():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"engine {self.name}, after {timeout_s:g} s: {self.ranks}")
            time.sleep(NAP_S)

    def close(self) -> None:
        """End all ranks, and check that their machines are in order."""
        for rank in self.ranks:
            rank.engine.stop()
        self.directory.stop()
        for rank in self.ranks:
            rank.parts.decode.check()
            rank.parts.prefill.check()


def tables_from(layout: CacheLayout, tables: Tables, begin: int) -> tuple[Table, ...]:
    """Block tables as commands have them, of tables that begin at the entry of token `begin`."""
    pairs = zip(layout.groups, tables, strict=True)
    return tuple(Table.of(ids, begin // group.entry_size) for group, ids in pairs)
