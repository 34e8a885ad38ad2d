"""Rules that the import contracts (pyproject.toml, `lint-imports`) cannot express.

Below `connector/` no model family, attention backend or platform is named: they are data that
`connector/` makes.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "nixl_kv"
EXEMPT = frozenset(
    {
        "reading/kernel.py",  # these run where the cache is in GPU memory
        "verify/gpu.py",
        "gpu.py",
        "reading/gather/memory.py",
        "reading/gather/gpu.py",
        "reading/gather/path.py",  # advises how to configure vLLM
        "transport/ucx/settings.py",  # names of UCX's own settings
        "transport/ucx/detect.py",
    }
)
MODULES = sorted(
    path.relative_to(PACKAGE).as_posix()
    for path in PACKAGE.rglob("*.py")
    if path.relative_to(PACKAGE).parts[0] not in ("connector", "cli")
)

FORBIDDEN_WORDS = frozenset({"mla", "mamba", "cuda", "cpu", "flashinfer"})

# The words of HTTPServer, use_mla and cudaMemcpy, in any spelling.
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def tokens(source: str) -> Iterator[str]:
    """Yield the names and strings of the code; a string that is a statement only documents."""
    tree = ast.parse(source)
    documenting = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node in documenting:
            continue
        for _, value in ast.iter_fields(node):
            texts = value if isinstance(value, list) else [value]
            yield from (text for text in texts if isinstance(text, str))


def forbidden_words(source: str) -> set[str]:
    words = {word.lower() for token in tokens(source) for word in WORD.findall(token)}
    return words & FORBIDDEN_WORDS


@pytest.mark.parametrize("path", [path for path in MODULES if path not in EXEMPT])
def test_below_the_connector_no_model_backend_or_platform_is_named(path: str) -> None:
    source = (PACKAGE / path).read_text(encoding="utf-8")
    assert forbidden_words(f"path = {path!r}\n{source}") == set()


READING_PATH = re.findall(
    r"^\| \d+ \| `([a-z_/]+\.py)` \| (`[^|]+`) \|",
    (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def find(path: str, name: str) -> ast.stmt:
    """The definition of `Class.method` in a file of the package; ValueError without one."""
    body: list[ast.stmt] = ast.parse((PACKAGE / path).read_text(encoding="utf-8")).body
    for part in name.split("."):
        (found,) = [
            each
            for each in body
            if isinstance(each, ast.ClassDef | ast.FunctionDef) and each.name == part
        ]
        body = found.body
    return found


def test_the_names_of_the_reading_path_exist() -> None:
    assert len(READING_PATH) == 10
    for path, text in READING_PATH:
        for name in re.findall("`([^`]+)`", text):
            find(path, name)
