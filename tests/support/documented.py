"""Code that stands in a document."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(document: str) -> list[str]:
    """A document's blocks of Python, in order."""
    text = (DOCS / document).read_text(encoding="utf-8")
    return [rest.split("```", 1)[0] for rest in text.split("```python\n")[1:]]


def code(document: str) -> Any:
    """The names that a document's blocks of Python define, as if they were one module."""
    names: dict[str, Any] = {"__name__": "documented"}
    for block in blocks(document):
        exec(block, names)  # noqa: S102 - our own
    return SimpleNamespace(**names)
