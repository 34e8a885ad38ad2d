"""README and configs/ say what the code does."""

import ast
import dataclasses
import json
import re
from pathlib import Path

import pytest
import tables

from nixl_kv.config import Config

REPO = Path(__file__).resolve().parent.parent
README = (REPO / "README.md").read_text(encoding="utf-8")
WRITTEN = {"verify": "off"}  # what is another value in the code
CONFIGS = sorted((REPO / "configs").glob("*.json"))


def table(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    section = README.split(f"### {heading}\n", 1)[1]
    lines = [line for line in section.split("\n#")[0].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def counters() -> dict[str, str]:
    """Read, not imported: the module needs vLLM."""
    source = (REPO / "nixl_kv/connector/stats.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "COUNTERS":
            assert node.value is not None
            return dict(ast.literal_eval(node.value))
    raise AssertionError("stats.py has no COUNTERS")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_example_is_accepted(path: Path) -> None:
    transfer = json.loads(path.read_text(encoding="utf-8"))
    assert transfer["kv_connector"] == "NixlKVConnector"
    assert transfer["kv_role"] in ("kv_producer", "kv_consumer", "kv_both")
    Config.parse(transfer["kv_connector_extra_config"], {})


def test_the_examples_use_every_key() -> None:
    used = {
        key
        for path in CONFIGS
        for key in json.loads(path.read_text(encoding="utf-8"))["kv_connector_extra_config"]
    }
    assert used == {field.name for field in dataclasses.fields(Config)}


def test_the_table_of_keys_is_complete_and_its_defaults_are_true() -> None:
    described = {row[0].strip("`"): row[1] for row in table("Configuration")}
    for field in dataclasses.fields(Config):
        default = field.default
        shown = list(default) if isinstance(default, tuple) else default
        text = (
            json.dumps(shown)
            if shown is None or isinstance(shown, list | bool)
            else f"{shown:g}"
            if isinstance(shown, float)
            else str(shown)
        )
        assert f"`{WRITTEN.get(field.name, text)}`" in described.pop(field.name)
    assert described == {}


def test_the_table_of_metrics_is_the_code() -> None:
    described = {row[0].strip("`"): row[1] for row in table("Metrics")}
    assert described == counters()


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not (REPO / target).exists()] == []


def test_the_tables_of_the_protocol_are_the_code() -> None:
    written = tables.DOCUMENT.read_text(encoding="utf-8")
    assert tables.rewrite(written) == written
    assert sorted(found[2] for found in tables.BLOCK.finditer(written)) == sorted(tables.MACHINES)
