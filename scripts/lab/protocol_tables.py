"""Write the protocol's transition tables into docs/protocol.md, from the code.

python scripts/tables.py           # rewrite what stands between the markers
python scripts/tables.py --check   # say whether it is up to date
"""

import argparse
import enum
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from nixl_kv.protocol import peers, receiving, sending

DOCUMENT: Final = Path(__file__).resolve().parent.parent / "docs" / "protocol.md"
BLOCK: Final = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
MACHINES: Final = {"peers": peers, "receiving": receiving, "sending": sending}

Table = Mapping[enum.Enum, Mapping[enum.Enum, enum.Enum]]


def render(table: Table) -> str:
    """One row per state, one column per cause; a dot where there is no such move."""
    causes = list(dict.fromkeys(cause for moves in table.values() for cause in moves))
    lines = [
        " | ".join(["| state", *(cause.name for cause in causes)]) + " |",
        "|---" * (len(causes) + 1) + "|",
    ]
    for state, moves in table.items():
        cells = (moves[cause].name if cause in moves else "·" for cause in causes)
        lines.append(" | ".join([f"| **{state.name}**", *cells]) + " |")
    return "\n".join(lines) + "\n"


def rewrite(text: str) -> str:
    """Put each machine's table between its markers."""
    return BLOCK.sub(
        lambda found: found[1] + render(MACHINES[found[2]].TRANSITIONS) + found[3], text
    )


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    before = DOCUMENT.read_text(encoding="utf-8")
    after = rewrite(before)
    if check:
        print("up to date" if after == before else f"{DOCUMENT.name} is not what the code says")
        return int(after != before)
    DOCUMENT.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
