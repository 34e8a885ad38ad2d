"""Write the protocol's transition tables into docs/protocol.md, from the code.

.venv/bin/python scripts/protocol_tables.py
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from nixl_kv.connector import decode
from nixl_kv.connector import prefill as offers
from nixl_kv.early import asks as early
from nixl_kv.protocol import load, peers, prefill
from nixl_kv.protocol.events import OVER
from nixl_kv.reading import peers as ranks

DOCUMENT: Final = Path(__file__).resolve().parents[1] / "docs" / "protocol.md"
BLOCK: Final = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Table: TypeAlias = Mapping[Any, Mapping[Any, Any]]
"""For each state, a member of an enum, which event leads to which state, or to one of several."""

TABLES: Final[Mapping[str, Table]] = {
    "load": load.LOAD_TRANSITIONS,
    "read": load.READ_TRANSITIONS,
    "offer": prefill.TRANSITIONS,
    "peer": peers.TRANSITIONS,
    "rank": ranks.TRANSITIONS,
    "scheduled": decode.SCHEDULED_TRANSITIONS,
    "offered": offers.OFFER_TRANSITIONS,
    "demand": early.DEMAND_TRANSITIONS,
}


def rewrite(text: str) -> str:
    """Put each machine's table between its markers."""
    return BLOCK.sub(lambda match: match[1] + render(TABLES[match[2]]) + match[3], text)


def render(table: Table) -> str:
    """One row per state, one column per type of event; a dot where there is no transition."""
    events = list(dict.fromkeys(event for moves in table.values() for event in moves))
    names = [event.__name__ if isinstance(event, type) else str(event.name) for event in events]
    lines = [f"| {' | '.join(['state', *names])} |", "|---" * (len(events) + 1) + "|"]
    for state, moves in table.items():
        cells = (_cell(moves[event]) if event in moves else "·" for event in events)
        lines.append(f"| {' | '.join([f'**{state.name}**', *cells])} |")
    return "\n".join(lines) + "\n"


def _cell(after: Any) -> str:
    states = after if isinstance(after, tuple) else (after,)
    return " or ".join(OVER if state is None else state.name for state in states)


if __name__ == "__main__":
    DOCUMENT.write_text(rewrite(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
