"""Reads without descriptors: a peer's memory is mapped, and a kernel copies what a plan says.

This is the interface; `gpu_gather` has it for GPUs. A read that was started ends by itself,
whatever becomes of its owner, and nothing stops it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from nixl_kv.geometry.plan import Pieces, Plan
from nixl_kv.protocol import messages
from nixl_kv.reading.staged.copier import Staging

MappedPlan: TypeAlias = Any
"""A plan whose remote rows are mapped, opaque, of use only to the gather that made it."""

GatherRead: TypeAlias = Any
"""A read under way, opaque, of use only to the gather that started it."""


class Gather(Protocol):
    """One rank's. All methods but `map`, `wait` and `close` run on the transfer thread."""

    @property
    def num_ended(self) -> int:
        """How many processes have ended whose memory is mapped, or was."""

    def map(self, exported: messages.Export, plan: Plan) -> MappedPlan:
        """Map a peer's memory, and prepare a plan of how it is read.

        Takes some 10 ms for memory that is not mapped yet; runs on any thread.

        Raises:
            TransportError: if it cannot be mapped here; says why.
        """

    def unmap(self, mapped: MappedPlan) -> None:
        """Let a peer's memory go; nothing of it is being read."""

    def is_mapped(self, mapped: MappedPlan) -> bool:
        """Whether the memory's owner is alive: what a dead process leaves is not to be kept."""

    def read(self, mapped: MappedPlan, pieces: Sequence[Pieces]) -> GatherRead:
        """Start to copy remote pieces into local ones.

        Raises:
            TransportError: if it cannot be started; then nothing is under way.
        """

    def poll(self, read: GatherRead) -> bool:
        """Whether all of it has landed.

        Raises:
            TransportError: if it cannot be told: it may go on.
        """

    def wait(self) -> None:
        """Wait for what is under way; may run on any thread."""

    def close(self) -> None:
        """Wait likewise, and end what it has in the background; it may be called again."""


@dataclass(frozen=True)
class Means:
    """What a rank reads with besides NIXL; `wanted` is one of `config.PATHS`.

    `staging` is where it reads what prefill has packed.
    """

    gather: Gather | None = None
    wanted: str = "auto"
    staging: Staging | None = None
