"""The interface of every way to read (`ReadPath`) and of every read in progress (`ReadOp`).

A path prepares a remote rank once and starts one operation per load. An agent asks its paths in
this order, and the first one that accepts a read performs it:

    gather   a kernel on decode's GPU reads memory of the remote rank that is mapped here
    staged   prefill packs short runs, NIXL reads them in one piece, decode scatters them
    direct   NIXL reads each contiguous run: one descriptor per run

So the rule is: gather if the memory is mapped, direct if the runs are long or few, staged
otherwise. The setting `path` leaves out the paths that it excludes.
"""

import abc
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from nixl_kv.config import Config
from nixl_kv.geometry.layout import CacheLayout, Memory, Span
from nixl_kv.geometry.plan import Pieces, Plan, Share
from nixl_kv.protocol import events, messages
from nixl_kv.transport.base import ListHandle, PeerName, Transport

STOPPED: Final = "no longer wanted"

RUNS_PER_TURN: Final = 1 << 14
"""Descriptors that one turn of the transfer thread posts, give or take one slice. NIXL takes 2 us
for each on a host and 3.3 us on an H200: 54 ms, of a lease of 5 s."""


class Budget:
    """Limits what an agent posts in one turn of the transfer thread."""

    def __init__(self) -> None:
        self.runs = RUNS_PER_TURN

    def renew(self) -> None:
        self.runs = RUNS_PER_TURN


@dataclass(frozen=True)
class Source:
    """A remote rank that one agent can read. The lists are of the rank's whole plan."""

    transport: Transport
    name: PeerName
    description: messages.RankDescription
    plan: Plan
    local: ListHandle
    remote: ListHandle
    is_tcp: bool
    """Whether NIXL reads this rank over TCP, where the transport paces reads."""
    budget: Budget = field(default_factory=Budget)


class Read(NamedTuple):
    """One load's read of one remote rank."""

    action: events.StartRead
    source: Source
    pieces: Sequence[Pieces]
    num_bytes: int
    num_runs: int


class ReadOp(abc.ABC):
    """A read in progress. All methods run on the transfer thread, except `end_copies`.

    Nothing stops bytes that are on their way, so an operation ends only when all of them have
    landed or failed; then `poll` is not called again.
    """

    path: str = "direct"
    """The path that metrics report."""
    num_direct_bytes: int = 0
    """Bytes that NIXL read run by run although the path is another one."""
    failure: str | None = None
    """Why the operation ends without all of its bytes."""
    is_connection_lost: bool = False
    """Whether reads of this rank fail until it is added again."""
    is_autonomous: bool = False
    """Whether the operation needs no call before its end, so that a late poll costs little."""

    @property
    @abc.abstractmethod
    def has_ended(self) -> bool:
        """Whether nothing of it writes any longer."""

    @abc.abstractmethod
    def poll(self) -> list[events.ReadEvent]:
        """Continue; events other than the end: progress, and chunks for prefill to pack.

        Raises:
            TransportError: if the state of a read is unknown. It may go on for ever; `poll` must
                not be called again.
        """

    @abc.abstractmethod
    def stop(self) -> None:
        """Start nothing more; the operation ends early with `failure` if it lacks bytes then."""

    def on_message(self, message: events.ReadChunk) -> None:
        """Prefill answered a question of this operation."""
        del message

    def end_copies(self) -> None:  # noqa: B027 - most have none
        """Return when no kernel or thread of this process writes for it; on any thread."""

    def release(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what it holds: nothing writes any longer, however the operation ended."""


class Prepared(Protocol):
    """A remote rank as one path reads it."""

    def release(self) -> None:
        """The rank is not read any longer: free what this holds once no operation uses it.

        On the transfer thread, or on any thread after the agent has ended.
        """


class ReadPath(Protocol):
    """One way to read, for all remote ranks and all agents of this rank."""

    def prepare(
        self, description: messages.RankDescription, share: Share, plan: Plan
    ) -> Prepared | None:
        """Prepare to read a remote rank; None if this path cannot. On a background thread."""

    def start(self, prepared: Any, read: Read) -> ReadOp | None:
        """Start a read; None if another path is better or this one cannot. Transfer thread.

        Raises:
            TransportError: if the read cannot be posted; then nothing is in progress.
            ValueError: for block tables that this cache cannot have.
        """

    def tidy(self) -> None:
        """Free what nobody needs any longer. Called once per turn while reads are in progress."""

    def close(self) -> None:
        """Wait for copies in progress and end threads; may be called again."""


class Packer(Protocol):
    """Prefill's part of a path: it prepares bytes that readers ask for. On the transfer thread."""

    @property
    def writing(self) -> list[int]:
        """The slots into which copies are in progress."""

    def __len__(self) -> int: ...

    def add(self, action: events.PackChunk) -> events.ChunkPacked | None:
        """Start to pack; an event if it fails at once."""

    def poll(self) -> list[events.ChunkPacked]:
        """Copies that have ended since the last call."""

    def close(self) -> None:
        """Return when no copy reads the cache or writes into the ring."""


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """What a feature learns of the rank that it is built into."""

    layout: CacheLayout
    config: Config
    is_prefill: bool
    is_decode: bool
    wake: Callable[[], None]
    """Ends a wait of the transfer thread; on any thread."""
    counts: defaultdict[str, float]
    clock: Callable[[], float]


class ExtraMemory(NamedTuple):
    """Memory besides the cache that a transport registers."""

    span: Span
    memory: Memory
    device: int


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A path beside NIXL's own, built into one rank: both halves of it, as far as there are any."""

    path: ReadPath | None = None
    packer: Packer | None = None
    description: Mapping[str, Any] = field(default_factory=dict)
    """Fields of this rank's `RankDescription`."""
    read_into: tuple[ExtraMemory, ...] = ()
    """Memory that every agent of this rank that reads has to register."""
    served: tuple[ExtraMemory, ...] = ()
    """Memory that the agent registers by which others read this rank."""
    close: Callable[[], None] = lambda: None
    """Withdraws what prefill offers; called after everything else has ended."""


BuildFeature: TypeAlias = Callable[[RankSetup], Feature]
