"""Writes the protocol's transition tables into docs/protocol.md, from the code.

scripts/lab/run.sh lab.protocol_tables           # rewrite what stands between the markers
scripts/lab/run.sh lab.protocol_tables --check   # say whether it is up to date
"""

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from nixl_kv.protocol import load, peers, prefill
from nixl_kv.protocol.events import OVER
from nixl_kv.reading import peers as ranks

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
BLOCK: Final = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Table: TypeAlias = Mapping[Any, Mapping[Any, Any]]
"""For each state, a member of an enum, which event leads to which state, or to one of several."""

TABLES: Final[Mapping[str, Table]] = {
    "load": load.TRANSITIONS,
    "offer": prefill.TRANSITIONS,
    "peer": peers.TRANSITIONS,
    "rank": ranks.TRANSITIONS,
}


def render(table: Table) -> str:
    """One row per state, one column per type of event; a dot where there is no transition."""
    events = list(dict.fromkeys(event for moves in table.values() for event in moves))
    lines = [
        " | ".join(["| state", *(_name(event) for event in events)]) + " |",
        "|---" * (len(events) + 1) + "|",
    ]
    for state, moves in table.items():
        cells = (_cell(moves[event]) if event in moves else "·" for event in events)
        lines.append(" | ".join([f"| **{state.name}**", *cells]) + " |")
    return "\n".join(lines) + "\n"


def rewrite(text: str) -> str:
    """Put each machine's table between its markers."""
    return BLOCK.sub(lambda match: match[1] + render(TABLES[match[2]]) + match[3], text)


def _name(event: Any) -> str:
    """Of a type, or of a member of an enum."""
    return event.__name__ if isinstance(event, type) else str(event.name)


def _cell(after: Any) -> str:
    states = after if isinstance(after, tuple) else (after,)
    return " or ".join(OVER if state is None else state.name for state in states)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    only_check = parser.parse_args().check
    before = DOCUMENT.read_text(encoding="utf-8")
    after = rewrite(before)
    if only_check:
        print("up to date" if after == before else f"{DOCUMENT.name} is not what the code says")
        return int(after != before)
    DOCUMENT.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
