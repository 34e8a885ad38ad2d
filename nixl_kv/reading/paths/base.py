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
    """Limits the descriptors that an agent posts in one turn of the transfer thread."""

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

    Nothing stops bytes in flight, so an operation ends only when all of them have landed or
    failed. After that `poll` is not called again.
    """

    path: str = "direct"
    """The path that metrics report."""
    num_direct_bytes: int = 0
    """Bytes of another path that NIXL read run by run all the same."""
    failure: str | None = None
    """Why the operation ends without all of its bytes."""
    is_connection_lost: bool = False
    """Whether reads of this rank fail until it is added again."""
    is_autonomous: bool = False
    """Whether the operation continues without calls, so that a late poll costs little."""

    @property
    @abc.abstractmethod
    def has_ended(self) -> bool:
        """Whether nothing writes for it."""

    @abc.abstractmethod
    def poll(self) -> list[events.ReadEvent]:
        """Continue; return progress, and the chunks that prefill shall pack.

        A read without progress for `request_timeout_s` fails. So an operation that may take
        longer returns a `ChunksWanted`, which may be empty, when some of its bytes have landed.

        Raises:
            TransportError: if the state of a read is unknown. It may go on for ever; `poll` must
                not be called again.
        """

    @abc.abstractmethod
    def stop(self) -> None:
        """Start nothing more. The operation ends early, with a `failure` if bytes are missing."""

    def on_message(self, message: events.ReadChunk) -> None:
        """Handle prefill's answer to a request of this operation."""
        del message

    def end_copies(self) -> None:  # noqa: B027 - most have none
        """Wait until no kernel or thread of this process writes for it; on any thread."""

    def release(self) -> None:  # noqa: B027 - most hold nothing
        """Give back memory and slots. Nothing writes for it, however it ended."""


class Prepared(Protocol):
    """A remote rank that one path has prepared."""

    def release(self) -> None:
        """Free what this holds once no operation uses it: this agent no longer reads the rank.

        On the transfer thread, or on any thread after the agent has ended.
        """


class ReadPath(Protocol):
    """One way to read, for all remote ranks and all agents of this rank."""

    def prepare(
        self, description: messages.RankDescription, share: Share, plan: Plan
    ) -> Prepared | None:
        """Prepare to read a remote rank; None if this path cannot read it. Background thread."""

    def start(self, prepared: Any, read: Read) -> ReadOp | None:
        """Start a read; None if a later path shall read it. Transfer thread.

        Raises:
            TransportError: if the read cannot be posted; then nothing is in progress.
            ValueError: for block tables that this cache cannot have.
        """

    def tidy(self) -> None:
        """Free unused memory. Called once per turn while reads are in progress."""

    def close(self) -> None:
        """Wait for copies in progress and end threads. May be called again."""


class Packer(Protocol):
    """Prefill's half of a path: it packs bytes when readers ask for them. Transfer thread."""

    @property
    def writing(self) -> list[int]:
        """The slots into which copies are in progress."""

    def __len__(self) -> int: ...

    def add(self, action: events.PackChunk) -> events.ChunkPacked | None:
        """Start to pack; return an event if that fails at once."""

    def poll(self) -> list[events.ChunkPacked]:
        """Return the copies that have ended since the last call."""

    def close(self) -> None:
        """Wait until no copy reads the cache or writes into the ring."""


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """The rank for which a feature is built."""

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
    """A path besides direct reads, built for one rank: decode's and prefill's halves of it."""

    path: ReadPath | None = None
    packer: Packer | None = None
    description: Mapping[str, Any] = field(default_factory=dict)
    """Fields of this rank's `RankDescription`."""
    read_into: tuple[ExtraMemory, ...] = ()
    """Memory that each reading agent of this rank registers."""
    served: tuple[ExtraMemory, ...] = ()
    """Memory that the serving agent of this rank registers, for readers."""
    close: Callable[[], None] = lambda: None
    """Withdraws prefill's exports; called after everything else has ended."""


BuildFeature: TypeAlias = Callable[[RankSetup], Feature]
