"""What both ways to judge cells have in common."""

from typing import Protocol

from lab.results import Results


class Judge(Protocol):
    """One way to judge cells, those that were chosen on the command line."""

    title: str
    what: str
    """What the last line counts."""

    @property
    def num_cells(self) -> int:
        """How many cells it runs or skips; each has one result or more."""

    def lines(self) -> list[str]:
        """What it would run, a line for each cell."""

    def check(self) -> None:
        """Refuse the whole run for what would be refused in the middle of it.

        Raises:
            ValueError: says what, and what is allowed.
        """

    def run(self, results: Results) -> None:
        """Run all cells and add what came of them."""
