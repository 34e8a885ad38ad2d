"""vLLM's records, as far as nixl_kv looks at them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sim.memory import Prompt
from sim.standins import statuses
from sim.violations import Violation


@dataclass(eq=False)
class Request:
    """One request of one engine."""

    request_id: str
    prompt: Prompt
    kv_transfer_params: Any = None
    num_computed_tokens: int = 0
    status: Any = field(default_factory=lambda: statuses().WAITING)
    local: int = 0  # tokens that decode finds in its own cache
    steps_left: int = 1
    lora_request: ClassVar[None] = None
    cache_salt: ClassVar[None] = None
    prompt_embeds: ClassVar[None] = None
    mm_features: ClassVar[Sequence[Any]] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """As vLLM's."""
        return self.prompt.length

    @property
    def prompt_token_ids(self) -> list[int]:
        """As vLLM's."""
        return self.prompt.tokens

    @property
    def finished(self) -> bool:
        """Whether it is over for its client."""
        return bool(self.status.name.startswith("FINISHED"))


@dataclass(frozen=True)
class Forward:
    """What a step computes of one request."""

    prompt: Prompt
    table: list[int]
    tokens: range


@dataclass
class Reported:
    """What ranks have reported of one kind: an id is through when all of them have."""

    ranks: int
    left: dict[str, int] = field(default_factory=dict)
    told: set[tuple[int, str]] = field(default_factory=set)
    through: list[str] = field(default_factory=list)

    def note(self, rank: int, requests: Iterable[str], known: Callable[[str], bool]) -> None:
        """One rank's report.

        Raises:
            Violation: if vLLM would end the engine for it.
        """
        for request in sorted(requests):
            if (rank, request) in self.told:
                raise Violation("reported twice", f"rank {rank}: {request}")
            if not known(request):
                raise Violation("unexpected report", f"rank {rank}: {request}")
            self.told.add((rank, request))
            self.left[request] = self.left.get(request, self.ranks) - 1
            if not self.left[request]:
                del self.left[request]
                self.through.append(request)

    def take(self) -> list[str]:
        """What is through since the last call."""
        through, self.through = self.through, []
        return through
