"""What a schedule may bring to light."""


class Violation(Exception):  # noqa: N818 - it is what the simulator looks for
    """A promise is broken. `check` names it in a word or two."""

    def __init__(self, check: str, told: str) -> None:
        """Say which, and what happened."""
        super().__init__(f"{check}: {told}")
        self.check = check
        self.told = told


class InjectedError(Exception):
    """A bug of our own somewhere in the transfer thread, planted by the schedule."""
