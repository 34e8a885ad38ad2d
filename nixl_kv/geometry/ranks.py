"""Which ranks exchange KV with which.

Ranks are numbered `pp_rank * tp + tp_rank`. Today both engines have the same shape, so that each
rank reads the one that stands where it stands; other shapes are refused by `compat.mismatches`.
"""

from dataclasses import dataclass

from nixl_kv.ids import Rank


@dataclass(frozen=True)
class Shape:
    """How an engine is cut: `tp` ranks side by side in each of `pp` pipeline stages."""

    tp: int
    pp: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, value in (("tp", self.tp), ("pp", self.pp)):
            if not 1 <= value <= 1024:  # noqa: PLR2004
                raise ValueError(f"{name} is {value}; allowed: 1 to 1024")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.tp * self.pp


def sources(reader: Rank) -> tuple[Rank, ...]:
    """The ranks of the prefill engine that this rank of an equal decode engine reads."""
    return (reader,)


def readers(source: Rank) -> tuple[Rank, ...]:
    """The ranks of the decode engine that read this rank of an equal prefill engine."""
    return (source,)
