"""Write tables into the docs, from the code: transitions, timeouts and attention backends.

.venv/bin/python scripts/protocol_tables.py
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from nixl_kv.config import Config
from nixl_kv.connector import backends, decode
from nixl_kv.connector import prefill as offers
from nixl_kv.conversations import finding, owners
from nixl_kv.early import asks as early
from nixl_kv.protocol import load, peers, prefill
from nixl_kv.protocol.events import OVER
from nixl_kv.reading import peers as ranks
from nixl_kv.verify import queue

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = ROOT / "nixl_kv"
DOCUMENTS: Final = tuple(
    ROOT / "docs" / name for name in ("protocol.md", "faults.md", "compatibility.md")
)
TIMEOUTS: Final = "timeouts"
BACKENDS: Final = "backends"
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
    "sought": finding.SOUGHT_TRANSITIONS,
    "owner": owners.OWNER_TRANSITIONS,
    "demand": early.DEMAND_TRANSITIONS,
    "digest": queue.JOB_TRANSITIONS,
}

# Shorter times are pauses between two polls, and bounds of one turn or step.
SHORTEST_S: Final = 0.1
LOG: Final = "_LOG_S"  # the end of the name of a pause between two log lines


def rewrite(text: str) -> str:
    """Put each table between its markers."""
    return BLOCK.sub(lambda match: match[1] + _table(match[2]) + match[3], text)


def _table(name: str) -> str:
    others = {TIMEOUTS: render_timeouts, BACKENDS: render_backends}
    return others[name]() if name in others else render(TABLES[name])


def render(table: Table) -> str:
    """One row per state, one column per type of event; a dot if a state has no transition."""
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


# --- timeouts


class Timeout(NamedTuple):
    seconds: float
    file: str
    name: str
    ends: str  # the first sentence of the comment beside it


def timeouts() -> list[Timeout]:
    """Each constant of the package whose name ends in _S, and each setting; the shortest first."""
    found = [each for path in PACKAGE.rglob("*.py") for each in _constants(path)]
    found += _settings(PACKAGE / "config.py")
    return sorted(each for each in found if each.seconds >= SHORTEST_S)


def _constants(path: Path) -> Iterator[Timeout]:
    """A pair is a first and a longest pause: only the longest one counts."""
    text = path.read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        if name.endswith("_S") and not name.endswith(LOG):
            values = ast.literal_eval(node.value)
            seconds = max(values) if isinstance(values, tuple) else values
            yield Timeout(seconds, _name(path), name, _sentence(_comment_above(text, node.lineno)))


def _settings(path: Path) -> Iterator[Timeout]:
    """The fields and properties of `Config` whose names end in _s, with their defaults."""
    text, defaults = path.read_text(encoding="utf-8"), Config()
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    for node in [each for one in classes if one.name == Config.__name__ for each in one.body]:
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_s"):
            name, comment = node.name, ast.get_docstring(node) or ""
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target).endswith("_s"):
            name, comment = ast.unparse(node.target), _comment_above(text, node.lineno)
        else:
            continue
        yield Timeout(getattr(defaults, name), _name(path), name, _sentence(comment))


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def _comment_above(text: str, number: int) -> str:
    """The comment that ends above a line; lines are numbered from 1."""
    lines = [line.strip() for line in text.splitlines()[: number - 1]]
    begin = len(lines)
    while begin and lines[begin - 1].startswith("#"):
        begin -= 1
    return " ".join(line.lstrip("# ") for line in lines[begin:])


def _sentence(comment: str) -> str:
    return comment.split(". ", maxsplit=1)[0].rstrip(".")


def render_timeouts() -> str:
    lines = ["| after | what happens | name | file |", "|--:|---|---|---|"]
    lines += [f"| {e.seconds:g} s | {e.ends} | `{e.name}` | `{e.file}` |" for e in timeouts()]
    return "\n".join(lines) + "\n"


# --- attention backends


def render_backends() -> str:
    lines = ["| backends | cache | may be exchanged | reason |", "|---|---|---|---|"]
    for row in backends.ROWS:
        names = ", ".join(f"`{name}`" for name in row.backends)
        lines.append(f"| {names} | {_cache_of(row)} | {row.form.value} | {row.reason} |")
    return "\n".join(lines) + "\n"


def _cache_of(row: backends.Row) -> str:
    """The stored types and the fields of the spec that the row asks for."""
    types = ", ".join(f"`{name}`" for name in sorted(row.stored or ()))
    fields = {
        "`num_head_slots`": row.has_slots,
        "`state_content_bytes`": row.has_content,
        "several tokens per state": row.has_groups,
    }
    return "; ".join(filter(None, [types, *(name for name, asked in fields.items() if asked)]))


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(rewrite(document.read_text(encoding="utf-8")), encoding="utf-8")
