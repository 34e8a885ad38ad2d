"""Code that stands in a document, as a module."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"


def code(document: str) -> Any:
    """The names that the document's first Python block defines."""
    text = (DOCS / document).read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(text.split("```python\n", 1)[1].split("```", 1)[0], names)  # noqa: S102 - our own
    return SimpleNamespace(**names)
