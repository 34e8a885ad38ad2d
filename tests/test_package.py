"""The wheel, as `python -m build` makes it, in an environment with it and its requirements."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

REPO: Final = Path(__file__).resolve().parent.parent
LIGHT: Final = {"msgspec", "numpy", "psutil", "pyzmq", "rich", "typer"}
ABSENT: Final = ("vllm", "torch", "nixl", "matplotlib")

SAID: Final = """
import importlib.metadata, importlib.util, json, sys
distribution = importlib.metadata.distribution("nixl_kv")
(plugin,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="nixl_kv")
print(json.dumps({
    "metadata": distribution.metadata.json,
    "files": [str(path) for path in distribution.files],
    "plugin": plugin.value,
    "is_callable": callable(plugin.load()),
    "found": [name for name in sys.argv[1:] if importlib.util.find_spec(name)],
}))
"""


def run(folder: Path, *command: str | Path) -> str:
    """The output of a program in a folder from which nothing of this checkout can be found."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ended = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, cwd=folder, env=bare
    )
    assert ended.returncode == 0, f"{command}:\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    return ended.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of the environment."""
    folder = tmp_path_factory.mktemp("package")
    tool = (sys.executable, "-m")
    subprocess.run(  # the sources first, and from these the wheel
        [*tool, "build", "--installer", "uv", "--outdir", folder / "dist", REPO],
        check=True,
        capture_output=True,
    )
    (wheel,) = (folder / "dist").glob("*.whl")
    run(folder, *tool, "uv", "venv", "--python", sys.executable, folder / "environment")
    commands = folder / "environment/bin"
    run(folder, *tool, "uv", "pip", "install", "--python", commands / "python", wheel)
    return commands


@pytest.fixture(scope="module")
def said(installed: Path) -> Any:
    return json.loads(run(installed, "./python", "-c", SAID, *ABSENT))


def test_it_brings_nothing_heavy(said: Any) -> None:
    asked = [line for line in said["metadata"]["requires_dist"] if "extra ==" not in line]
    assert {line.split(">")[0] for line in asked} == LIGHT
    assert said["found"] == []


def test_its_metadata_is_complete(said: Any) -> None:
    metadata = said["metadata"]
    assert metadata["description"].startswith("# nixl_kv\n")
    links = re.findall(r"\]\(([^)]+)\)", metadata["description"])
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert metadata["license_expression"] == "Apache-2.0"
    assert metadata["requires_python"] == "<3.15,>=3.10"
    named = {"summary", "keywords", "classifier", "license_file", "author", "project_url"}
    assert named <= set(metadata)


def test_no_extra_can_replace_vllm_or_torch(said: Any) -> None:
    assert said["metadata"]["provides_extra"] == ["nixl"]
    (asked,) = [line for line in said["metadata"]["requires_dist"] if "extra ==" in line]
    assert asked.startswith("nixl<2,>=1.5.1")


def test_it_has_the_whole_package_and_no_more(said: Any) -> None:
    files = {name for name in said["files"] if name.startswith("nixl_kv/")}
    ours = {path for path in (REPO / "nixl_kv").rglob("*") if path.suffix in (".py", ".typed")}
    assert {str(path.relative_to(REPO)) for path in ours} == {
        name for name in files if "__pycache__" not in name
    }
    assert {name.split("/")[0] for name in said["files"]} == {
        "..",  # the command
        "nixl_kv",
        f"nixl_kv-{said['metadata']['version']}.dist-info",
    }


def test_vllm_finds_the_plugin(said: Any) -> None:
    assert said["plugin"] == "nixl_kv.connector.plugin:register"
    assert said["is_callable"]


def test_it_works_without_vllm(installed: Path) -> None:
    lines = run(installed, "./nixl-kv", "--help").splitlines()
    first_words = {(line.strip("│ ").split() or [""])[0] for line in lines}
    assert {"plan", "status", "drain", "set-weights", "keygen"} <= first_words
