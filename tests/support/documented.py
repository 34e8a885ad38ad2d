"""The code of docs/library.md: its example file, and the block of code in the page."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLE = DOCS / "two_engines.py"


def library() -> Any:
    """The names that the example and the page define, as if they were one module."""
    page = (DOCS / "library.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "documented"}
    for code in (EXAMPLE.read_text(encoding="utf-8"), page.split("```python\n")[1].split("```")[0]):
        exec(code, names)  # noqa: S102 - our own
    return SimpleNamespace(**names)
