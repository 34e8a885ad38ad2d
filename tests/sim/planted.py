"""Bugs, planted one at a time into the running code: the simulator has to find each.

Each is what somebody might write, or leave out. None of them is kept from doing harm by a second
defence, or the schedules would be right to pass. bugs.txt has them:

    the bug's name | the profiles of schedules that give it a chance; none named: all
    @ a function or property of nixl_kv
    - what stands there once; further lines as they are indented in the function
    + what the bug has in its place

Where the old text is not there exactly once, the code has moved on: that is an error.
"""

import inspect
import pkgutil
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from harness.local.engine import HOST_PATHS


@dataclass
class Edit:
    """One function of a bug."""

    where: str
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Whoever holds the function runs the edited code until the end of the block.

        Raises:
            LookupError: if the code has moved on.
        """
        function = _function(pkgutil.resolve_name(f"nixl_kv.{self.where}"))
        source = textwrap.dedent(inspect.getsource(function))
        old, new = "\n".join(self.old), "\n".join(self.new)
        if source.count(old) != 1:
            raise LookupError(f"{self.where} has {source.count(old)} times, not once: {old}")
        names: dict[str, Any] = {}
        exec(source.replace(old, new), function.__globals__, names)  # noqa: S102 - our own text
        before, function.__code__ = function.__code__, _function(names[function.__name__]).__code__
        try:
            yield
        finally:
            function.__code__ = before


@dataclass
class Bug:
    """How to plant it, and the profiles that give it a chance."""

    profiles: list[str]
    edits: list[Edit] = field(default_factory=list)

    @contextmanager
    def plant(self) -> Iterator[None]:
        """It is there until the end of the block."""
        with ExitStack() as stack:
            for edit in self.edits:
                stack.enter_context(edit.apply())
            yield


def _function(defined: Any) -> Any:
    return defined.fget if isinstance(defined, property) else defined


def _read_bugs(text: str) -> Iterator[tuple[str, Bug]]:
    for entry in text.strip().split("\n\n"):
        title, *lines = entry.split("\n")
        name, _, profiles = title.partition(" | ")
        bug = Bug(profiles.split())
        for line in lines:
            match line[:2]:
                case "@ ":
                    bug.edits.append(Edit(line[2:]))
                case "- ":
                    bug.edits[-1].old.append(line[2:])
                case "+ ":
                    bug.edits[-1].new.append(line[2:])
                case _:
                    raise ValueError(f"{name}: {line!r}; a line starts with '@ ', '- ' or '+ '")
        yield name, bug


PLANTED: Final[Mapping[str, Bug]] = {
    name: bug
    for name, bug in _read_bugs(Path(__file__).with_name("bugs.txt").read_text(encoding="utf-8"))
    if "staged" in HOST_PATHS or "staged" not in bug.profiles
}
