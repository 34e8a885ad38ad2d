"""Where tables are printed."""

from rich.console import Console


def console(width: int) -> Console:
    """Of the terminal's width; of this one where there is no terminal, such as in a log."""
    found = Console()
    return found if found.is_terminal else Console(width=width)
