"""Bounds of `kv_transfer_params`, which a client may have written.

A value of JSON may be nested as deeply as a client likes, and code that follows it by recursion
ends with a RecursionError: pickle at 500 levels, with which vLLM sends requests to its workers.
"""

import sys
from itertools import chain
from typing import Any, Final

from nixl_kv.errors import TicketRefused

# Prefixes of the fields that a prefill engine or a router writes for decode.
OUR_PREFIXES: Final = ("nixl_kv_", "do_remote_", "remote_")

MAX_LEVELS: Final = 8  # vLLM's own connectors and the routers nest three
# Values and characters together. vLLM's own NixlConnector sends a number for each block of a
# prompt: 62,500 for a million tokens.
MAX_SIZE: Final = 1 << 16

# Those that msgspec makes from a message, and the other ones that pickle follows by recursion.
CONTAINERS: Final = (dict, list, tuple, set, frozenset)

TEXTS: Final = (str, bytes)
NUMBERS: Final = frozenset((int, float, bool, type(None)))

TOO_DEEP: Final = "it has more than {} levels of lists and objects"
TOO_LARGE: Final = "it has more than {} values and characters"
CHANGED: Final = "pass prefill's kv_transfer_params on to decode as they are"


def why_unbounded(
    value: object, *, max_levels: int = MAX_LEVELS, max_size: int | None = MAX_SIZE
) -> str:
    """Why a value of JSON is too deep or too large, or ''.

    Does not recurse. It stops at `max_size`: 60,000 lists, the slowest value, take 40 ms on a busy
    machine, and a ticket 5 us.
    """
    level: list[Any] = [(value,)]
    size = -1  # without that tuple's own entry
    limit = sys.maxsize if max_size is None else max_size
    for _ in range(max_levels + 1):
        inner: list[Any] = []
        for container in level:
            is_dict = isinstance(container, dict)
            size += len(container) * (1 + is_dict)
            if size > limit:
                return TOO_LARGE.format(limit)
            for each in chain(container, container.values() if is_dict else ()):
                if type(each) in NUMBERS:  # most values of a large list
                    continue
                if isinstance(each, TEXTS):
                    size += len(each)
                elif isinstance(each, CONTAINERS):
                    inner.append(each)
        if size > limit:
            return TOO_LARGE.format(limit)
        if not inner:
            return ""
        level = inner
    return TOO_DEEP.format(max_levels)


def check_bounds(params: object) -> None:
    """Raise a TicketRefused for `kv_transfer_params` that are too deep or too large."""
    if reason := why_unbounded(params):
        raise TicketRefused(
            f"kv_transfer_params: {reason}; allowed: {MAX_LEVELS} levels, {MAX_SIZE} values and "
            f"characters; {CHANGED}"
        )


def foreign_fields(params: object) -> dict[str, Any]:
    """The fields of bounded `kv_transfer_params` that may be another connector's."""
    if not isinstance(params, dict) or why_unbounded(params):
        return {}
    ours = (*OUR_PREFIXES, "tp_size")
    return {k: v for k, v in params.items() if not str(k).startswith(ours)}
