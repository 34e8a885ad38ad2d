"""`nixl-kv trace`: the event logs of running engines as Chrome trace events, for Perfetto.

A rank is a process of the trace. A peer is a track of it, or several where its requests overlap. A
state is a slice, and the end of an offer, a load or a read is an instant.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from nixl_kv.cli import client
from nixl_kv.engine.event_log import EVERY_REQUEST
from nixl_kv.protocol.events import OVER
from nixl_kv.protocol.messages import MAX_LISTED, Status

ENDS: Final = frozenset({OVER, "DONE", "FAILED", "LOADED"})
OFFERS: Final = "offers"  # the track of transitions without a peer

_Record = Mapping[str, Any]
