"""How bugs are planted."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

Planted = AbstractContextManager[Any]


def replaced(where: Any, name: str, make: Callable[[Any], Any]) -> Planted:
    """An attribute, made anew from what it was."""
    return patch.object(where, name, make(getattr(where, name)))
