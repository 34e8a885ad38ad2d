"""README, docs/ and configs/ say what the code does, and name what exists."""

import ast
import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import nixl_kv
import protocol_tables
from benchmarks import plot
from nixl_kv.config import Config

REPO = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "configs/**/*.md") for path in REPO.glob(pattern)
)
CONFIGS = sorted((REPO / "configs").glob("*.json"))
WRITTEN = {  # defaults that the environment gives, or that the code writes otherwise
    "host": "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "port": "VLLM_NIXL_SIDE_CHANNEL_PORT",
    "verify": "off",
    "weights": '""',
}

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO))
)


def read(path: Path | str) -> str:
    return (REPO / path).read_text(encoding="utf-8")


def table(document: str) -> dict[str, str]:
    """The first two cells of each row of the first table, without its head."""
    rows = [line.strip("|").split("|") for line in read(document).splitlines() if line[:3] == "| `"]
    return {cells[0].strip(" `"): cells[1].strip() for cells in rows}


def metrics() -> dict[str, tuple[str, ...]]:
    """Type, role, labels and description of each. Read, not imported: the module needs vLLM."""
    found: dict[str, tuple[str, ...]] = {}
    for node in ast.parse(read("nixl_kv/connector/stats.py")).body:
        kind = ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else ""
        if kind in ("COUNTERS", "GAUGES", "HISTOGRAMS"):
            entries: Any = node.value  # type: ignore[attr-defined]
            for name, metric in zip(entries.keys, entries.values, strict=True):
                labels = ", ".join(f"`{label.arg}`" for label in metric.keywords)
                description = ast.literal_eval(metric.args[0])
                role = metric.func.id.strip("_")
                found[name.value] = (kind.lower().rstrip("s"), role, labels, description)
    return found


@cache
def names_in(path: Path) -> frozenset[str]:
    """Every function, class, field and constant that a file defines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = {node.name for node in ast.walk(tree) if isinstance(node, defined)}
    stored = (n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return frozenset(names | {node.id for node in stored})


# --- configuration, metrics, protocol: tables


def our_part(path: Path) -> dict[str, Any]:
    """The whole example, or the first connector of its MultiConnector."""
    transfer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if transfer["kv_connector"] == "MultiConnector":
        # vLLM looks at the whole for how loads are ordered, and for what becomes of failed ones.
        assert transfer["kv_role"] == "kv_both"
        assert transfer["kv_load_failure_policy"] == "recompute"
        transfer = transfer["kv_connector_extra_config"]["connectors"][0]
    return transfer


def test_the_example_configurations_are_accepted_and_use_every_key() -> None:
    used: set[str] = set()
    for path in CONFIGS:
        transfer = our_part(path)
        assert transfer["kv_connector"] == "NixlKVConnector", path
        assert transfer["kv_role"] in ("kv_producer", "kv_consumer", "kv_both"), path
        Config.parse(transfer["kv_connector_extra_config"], {})
        used |= transfer["kv_connector_extra_config"].keys()
    assert used == set(Config.parsers())


def test_the_table_of_keys_is_complete_and_its_defaults_are_true() -> None:
    described = table("docs/reference/configuration.md")
    for field in dataclasses.fields(Config):
        if field.name not in Config.parsers():
            continue
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        text = f"{default:g}" if isinstance(default, float) else json.dumps(default).strip('"')
        assert f"`{WRITTEN.get(field.name, text)}`" in described.pop(field.name)
    assert described == {}


def test_the_table_of_metrics_is_the_code() -> None:
    lines = read("docs/reference/metrics.md").splitlines()
    rows = [[cell.strip(" ") for cell in line.strip("|").split("|")] for line in lines]
    described = {row[0].strip("`"): tuple(row[1:]) for row in rows if len(row) == 5}
    del described["name"], described["---"]
    assert described == metrics()


def test_the_tables_of_transitions_timeouts_and_backends_are_the_code() -> None:
    written = [document.read_text(encoding="utf-8") for document in protocol_tables.DOCUMENTS]
    assert [protocol_tables.rewrite(text) for text in written] == written
    names = [block[2] for text in written for block in protocol_tables.BLOCK.finditer(text)]
    others = (protocol_tables.TIMEOUTS, protocol_tables.BACKENDS)
    assert sorted(names) == sorted([*protocol_tables.TABLES, *others])


def test_all_files_name_the_same_versions_of_vllm() -> None:
    required = re.search(r'"vllm>=0\.(\d+),<0\.(\d+)"', read("pyproject.toml"))
    assert required is not None
    oldest, end = map(int, required.groups())
    releases = [f"0.{minor}.0" for minor in range(oldest, end)]
    in_table = re.findall(r"^\| (0\.\d+\.\d+) \|", read("docs/compatibility.md"), re.MULTILINE)
    assert in_table == releases
    assert [f"{minor}.0" for minor in nixl_kv.TESTED_VLLM] == releases
    assert f"scripts/contract {' '.join(releases)}`" in read("docs/compatibility.md")
    assert f"vLLM 0.{oldest} to 0.{end - 1}" in read("README.md")
    lane = read("scripts/test")
    assert f'RELEASES=({" ".join(releases[:-1])} "$NEWEST")' in lane
    assert f"NEWEST={releases[-1]} " in lane


def test_the_plot_shows_its_records() -> None:
    assert read(plot.PLOT) == plot.draw()


# --- names in the docs exist


def test_the_slow_lane_names_files_that_exist() -> None:
    lists = re.findall(r"^(?:both_runners|only_v1)=\((.+)\)$", read("scripts/test"), re.MULTILINE)
    assert len(lists) == 2
    names = [name for each in lists for name in each.split()]
    assert [name for name in names if not (REPO / f"tests/e2e/test_{name}.py").exists()] == []


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@each_document
def test_links_lead_to_files_and_headings(document: Path) -> None:
    missing = []
    for target, anchor in re.findall(
        r"\]\((?!https?://)([^)#\s]*)#?([^)\s]*)[^)]*\)", read(document)
    ):
        page = document.parent / target if target else document
        if not page.exists():
            missing.append(target)
        elif anchor:
            headings = re.findall(r"^#+ (.+)$", read(page), re.MULTILINE)
            missing += [] if anchor in map(slug, headings) else [f"{target}#{anchor}"]
    assert missing == []


@each_document
def test_scripts_and_tests_that_are_named_exist(document: Path) -> None:
    """Tests as `file.py::test_name`, with or without `tests/` before it."""
    text = read(document)
    scripts = set(re.findall(r"(?<![\w/.])scripts/[\w./]*\w", text))
    missing = [name for name in sorted(scripts) if not (REPO / name).exists()]
    for file, name in sorted(set(re.findall(r"([\w/]+\.py)::(\w+)", text))):
        path = REPO / "tests" / file.removeprefix("tests/")
        if not path.exists() or name not in names_in(path):
            missing.append(f"{file}::{name}")
    assert missing == []


def test_each_row_of_the_security_table_names_hostile_tests_that_exist() -> None:
    names = {name for path in (REPO / "tests").rglob("*.py") for name in names_in(path)}
    rows = [line.strip("|").split("|") for line in read("SECURITY.md").splitlines()]
    rows = [row for row in rows if len(row) == 4][2:]
    assert len(rows) > 10
    for *_, tests in rows:
        named = re.findall(r"`(test_\w+)`", tests)
        assert named, tests
        assert [name for name in named if name not in names] == []


@each_document
def test_functions_that_are_named_exist(document: Path) -> None:
    """Functions of the product as `file.py: function`; more may follow, in their own backticks."""
    named = re.findall(r"`([\w/]+\.py): (\w+)`((?:, `\w+`)*)", read(document))
    missing = []
    for file, first, others in named:
        path = REPO / "nixl_kv" / file.removeprefix("nixl_kv/")
        defined = names_in(path) if path.exists() else ()
        names = (first, *re.findall(r"\w+", others))
        missing += [f"{file}: {name}" for name in names if name not in defined]
    assert missing == []


@cache
def names_used_by(path: Path, function: str) -> frozenset[str]:
    """Every name in the functions of this name, but not in their comments and strings."""
    defined = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = ast.walk(ast.parse(path.read_text(encoding="utf-8") if path.is_file() else ""))
    functions = [node for node in found if isinstance(node, defined) and node.name == function]
    nodes = [node for each in functions for node in ast.walk(each)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return frozenset(names | {node.attr for node in nodes if isinstance(node, ast.Attribute)})


def wrong_steps(row: str) -> list[str]:
    """Check the last cell of a row: `file.py: function` → `function that it calls` (`its event`).

    A function without a file is in the file before it.
    """
    wrong, path, function = [], REPO, ""
    cell = row.rsplit(" | ", maxsplit=1)[-1]
    for sign, file, name in re.findall(r"(→ |\()?`(?:([\w/]+\.py): )?(\w+)`", cell):
        if sign and name not in names_used_by(path, function):
            wrong.append(f"{path.name}: {function} {sign.strip()} {name}")
        if sign == "(":
            continue
        path, function = REPO / "nixl_kv" / file if file else path, name
        if name not in (names_in(path) if path.is_file() else ()):
            wrong.append(f"{path.name}: {name}")
    return wrong


def test_the_paths_of_requests_in_the_architecture_are_the_code() -> None:
    rows = [
        row for row in read("ARCHITECTURE.md").splitlines() if re.match(r"\| [a-f]?\d+a? \|", row)
    ]
    wrong = {row.split(" | ")[0]: wrong_steps(row) for row in rows if ".py: " in row}
    assert len(wrong) > 50
    assert {row: steps for row, steps in wrong.items() if steps} == {}


def test_files_that_the_architecture_names_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.py)[`:]", read("ARCHITECTURE.md")))
    parts = [path.relative_to(REPO).parts for path in (REPO / "nixl_kv").rglob("*.py")]
    known = {"/".join(path[start:]) for path in parts for start in range(len(path))}
    assert sorted(named - known) == []
