"""Workflows of GitHub: actions by commit, few permissions, and skips that the list knows."""

import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from support.skips import ENVIRONMENT, read_groups

REPO: Final = Path(__file__).resolve().parent.parent
WORKFLOWS: Final = sorted((REPO / ".github/workflows").glob("*.yml"))
PINNED: Final = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def jobs(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


@each_workflow
def test_each_action_is_pinned_by_commit_with_its_version(path: Path) -> None:
    used = re.findall(r"\buses: (.*)", path.read_text(encoding="utf-8"))
    assert used
    assert [one for one in used if not one.startswith("./") and not PINNED.fullmatch(one)] == []


@each_workflow
def test_a_workflow_may_only_read(path: Path) -> None:
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"}
    granted = {name: job["permissions"] for name, job in jobs(path).items() if "permissions" in job}
    assert granted == ({"publish": {"id-token": "write"}} if path.name == "release.yml" else {})


def test_each_job_of_ci_names_groups_of_skips_that_exist() -> None:
    for job in jobs(REPO / ".github/workflows/ci.yml").values():
        rows = job.get("strategy", {}).get("matrix", {}).get("include", [{"vllm": ""}])
        for row in rows:
            groups = job["env"][ENVIRONMENT].replace("${{ matrix.vllm }}", row["vllm"])
            nightly = " ".join(re.findall(r"&& '(.*?)'", groups))
            assert read_groups(f"{re.sub(r'[$]{{.*}}', '', groups)} {nightly}")


def test_a_release_waits_for_ci() -> None:
    release = jobs(REPO / ".github/workflows/release.yml")
    assert release["ci"]["uses"] == "./.github/workflows/ci.yml"
    assert (release["build"]["needs"], release["publish"]["needs"]) == ("ci", "build")
