"""The interface of a feature: parts of the machines, work in steps, and a part on the step thread.

A feature is a folder. Its `build` makes a `Feature`, and `engine.engine` lists it. The machines,
the loop and the caller's half know these interfaces, and no feature.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

from nixl_kv.config import Config
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.protocol import events
from nixl_kv.protocol.load import LoadPart
from nixl_kv.protocol.prefill import PrefillPart
from nixl_kv.transport.base import SlotPage


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """The rank for which a feature is built."""

    layout: CacheLayout
    config: Config
    is_prefill: bool
    is_decode: bool
    wake: Callable[[], None]  # ends a wait of the transfer thread; on any thread
    watch: Callable[[int], None]  # end its waits while a file descriptor is readable
    background: Executor  # plans
    counts: events.Counts
    clock: Callable[[], float]


class Worker(Protocol):
    """Work of a feature that takes many steps. All methods run on the transfer thread."""

    name: ClassVar[str]  # of its work, in the status of a rank
    actions: ClassVar[frozenset[type]]  # of the machines, which it carries out

    def __len__(self) -> int:
        """How much work is in progress."""

    @property
    def wait_s(self) -> float | None:
        """How long a turn may wait before it calls `poll`; None: it has no work."""

    def add(self, action: events.WorkAction) -> events.WorkEvent | None:
        """Begin an action. Returns its event if it has ended at once."""

    def poll(self) -> Sequence[events.WorkEvent]:
        """Do a step; return the events of the work that has ended."""

    def clear(self) -> None:
        """Forget the work that may be forgotten: the machines have forgotten all."""

    def close(self) -> None:
        """Wait until nothing of it reads or writes memory. May be called again."""


class StepPart:
    """A feature's part on the caller's thread, before each step of its engine.

    Only that thread knows which blocks a step reuses, before the step runs. So a part may own fence
    slots, which it writes and clears without waiting for another thread.
    """

    num_slots: int = 0
    #: Whether it waits for `end_step`.
    is_in_step: bool = False

    def bind(self, page: SlotPage, first: int) -> None:
        """The part owns `num_slots` slots of the page, from `first` on."""

    def before_step(self, commands: Iterable[events.Command]) -> list[events.Command]:
        """The commands of a step, as the transfer thread shall have them."""
        return list(commands)

    def end_step(self, has_ended: Callable[[], bool] | None) -> None:
        """All work of the step is on the GPU's stream. `has_ended` asks for its end; None: it has.

        Any thread may ask.
        """

    def on_result(self, result: events.Result) -> None:
        """A result of the transfer thread."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """All parts of a feature on one rank."""

    prefill: PrefillPart | None = None
    load: LoadPart | None = None
    worker: Worker | None = None
    step: StepPart | None = None
    # The token of a reader that wants to map this rank's memory; empty: it cannot.
    invite: Callable[[], bytes] = lambda: b""
    # The rank begins another incarnation, with the same memory.
    begin_life: Callable[[], None] = lambda: None
    # Called after everything else has ended.
    close: Callable[[], None] = lambda: None


BuildFeature: TypeAlias = Callable[[RankSetup], Feature]
