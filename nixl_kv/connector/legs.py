"""The leg that a request is for this connector, by its `kv_transfer_params`."""

import enum
from collections.abc import Mapping
from typing import Any, Final

from nixl_kv.protocol.params import OUR_PREFIXES
from nixl_kv.protocol.ticket import FIELD

SOURCE: Final = "remote_kv_source"
"""In it, llm-d's router names an engine that may have cached KV of the prompt."""

# Fields with these prefixes that belong to vLLM's OffloadingConnector (its peer-to-peer tier).
FOREIGN_FIELDS: Final = frozenset({"remote_decoder", "remote_prefiller", SOURCE})


class Leg(enum.Enum):
    NONE = enum.auto()  # no fields at all
    FOREIGN = enum.auto()  # they concern only another connector of a MultiConnector
    PREFILL = enum.auto()  # the router wants the request's KV for another engine
    IN_TREE = enum.auto()  # vLLM's own NixlConnector on prefill wrote them
    UNANSWERED = enum.auto()  # the router asks decode to load before prefill has answered
    DECODE = enum.auto()  # a ticket, or fields without one


def leg_of(params: object) -> Leg:
    if params is None:
        return Leg.NONE
    if not isinstance(params, Mapping):
        return Leg.DECODE
    # Every router, even one that drops fields, leaves at least one field of ours or of vLLM's.
    ours = [name for name in params if str(name).startswith(OUR_PREFIXES)]
    if params and FOREIGN_FIELDS.issuperset(ours):
        return Leg.FOREIGN
    if params.get("do_remote_decode") is True:
        return Leg.PREFILL
    # A ticket has vLLM's fields as well, but names no blocks.
    return Leg.DECODE if FIELD in params else _leg_without_ticket(params)


def _leg_without_ticket(params: Mapping[Any, Any]) -> Leg:
    blocks, host = params.get("remote_block_ids"), params.get("remote_host")
    if isinstance(blocks, list) and any(blocks):
        return Leg.IN_TREE
    is_load = params.get("do_remote_prefill") is True
    is_early = params.get("remote_ready") is False or (host is not None and blocks is None)
    return Leg.UNANSWERED if is_load and is_early else Leg.DECODE
