"""Makes objects of classes whose constructors may gain or lose arguments meanwhile."""

import inspect
from typing import Any, TypeVar

_Made = TypeVar("_Made")


def made(kind: type[_Made], **available: Any) -> _Made:
    """An instance from those of the arguments that its constructor has."""
    wanted = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in available.items() if name in wanted})
