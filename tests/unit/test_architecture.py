"""Hold every module to its layer: what it may import, and which words it may use.

    L3              connector/                 sees all the others
                   /    |     \\
    L2      transport/  |   protocol/          do not know each other
                |       |   /
    L1          |   geometry/    config.py, keys.py     pure
                |       |           |
    L0         ids.py      errors.py           leaves, standard library only

An import counts wherever it stands: in a function and below TYPE_CHECKING too.
"""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nixl_kv"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


class Layer(NamedTuple):
    """What a part may import, besides itself and the standard library."""

    ours: frozenset[str]
    foreign: frozenset[str]


def layer(ours: str, foreign: str = "") -> Layer:
    return Layer(frozenset(ours.split()), frozenset(foreign.split()))


LAYERS: Final = {
    "__init__": layer(""),
    "ids": layer(""),
    "errors": layer(""),
    "config": layer("ids errors"),
    "keys": layer("ids errors"),
    "geometry": layer("ids errors", "numpy"),
    "protocol": layer("ids errors config geometry", "msgspec"),
    "transport": layer("ids errors config keys geometry", "numpy nixl zmq"),
    "connector": layer(
        "ids errors config keys geometry protocol transport",
        "numpy msgspec vllm torch triton prometheus_client",
    ),
    "cli": layer(
        "ids errors config keys geometry protocol transport connector", "numpy rich typer"
    ),
}

# The one file through which each of these enters.
SOLE_IMPORTERS: Final = {"nixl": "transport/nixl.py", "zmq": "transport/control.py"}

# Model families, backends and platforms are data that connector/ makes: what lies below it must
# not even be able to name them.
WORDS_OF_THE_CONNECTOR = frozenset({"mla", "mamba", "cuda", "cpu", "flashinfer"})
ABOVE = frozenset({"connector", "cli"})

# The words of HTTPServer, use_mla and cudaMemcpy, in any spelling.
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def part_of(path: str) -> str:
    return path.partition("/")[0].removesuffix(".py")


def imported_names(source: str) -> Iterator[str]:
    """Yield each import in full, those by importlib and a literal name too."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                yield from (f"{'.' * level}{module or ''}.{alias.name}" for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def origin(name: str) -> str:
    """Return whose a name is: nixl_kv and the part, or the foreign package."""
    top, _, rest = name.partition(".")
    if top == "nixl_kv":
        return f"nixl_kv.{rest.partition('.')[0] or '__init__'}"
    return re.sub(r"^nixl_cu\d+$", "nixl", top)


def origins(source: str) -> set[str]:
    return {origin(name) for name in imported_names(source)} - sys.stdlib_module_names


def breaches(path: str, source: str) -> set[str]:
    """Return what the module imports and its layer may not."""
    part = part_of(path)
    allowed = LAYERS.get(part, layer(""))
    ours = {f"nixl_kv.{name}" for name in allowed.ours | {part}}
    return origins(source) - ours - allowed.foreign


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


def words_of_the_connector(source: str) -> set[str]:
    words = {word.lower() for token in tokens(source) for word in WORD.findall(token)}
    return words & WORDS_OF_THE_CONNECTOR


def read(path: str) -> str:
    return (PACKAGE / path).read_text(encoding="utf-8")


def test_every_module_belongs_to_a_layer() -> None:
    assert MODULES
    assert {part_of(path) for path in MODULES} <= LAYERS.keys()


@pytest.mark.parametrize("path", MODULES)
def test_a_module_imports_only_what_its_layer_may(path: str) -> None:
    assert breaches(path, read(path)) == set()


@pytest.mark.parametrize("name", SOLE_IMPORTERS)
def test_one_file_alone_imports(name: str) -> None:
    importers = {path for path in MODULES if name in origins(read(path))}
    assert importers == {SOLE_IMPORTERS[name]} & set(MODULES)


@pytest.mark.parametrize("path", [path for path in MODULES if part_of(path) not in ABOVE])
def test_below_the_connector_no_model_backend_or_platform_is_named(path: str) -> None:
    assert words_of_the_connector(f"path = {path!r}\n{read(path)}") == set()


PROGRAM = """
import json, sys, threading
import nixl_kv.connector
import nixl_kv.connector.plugin
nixl = [name for name in sys.modules if name.split(".")[0] in {"nixl", "nixl_cu12", "nixl_cu13"}]
others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
print(json.dumps({"nixl": nixl, "threads": others}))
"""


@pytest.mark.skipif("connector/plugin.py" not in MODULES, reason="the plugin is not written yet")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_importing_the_connector_starts_nothing() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == {"nixl": [], "threads": []}


# The checks themselves


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        pytest.param("ids.py", "import nixl_kv.errors", "nixl_kv.errors", id="leaf"),
        pytest.param("errors.py", "from nixl_kv import ids", "nixl_kv.ids", id="other leaf"),
        pytest.param("config.py", "import msgspec", "msgspec", id="config"),
        pytest.param("keys.py", "import zmq", "zmq", id="keys"),
        pytest.param("keys.py", "import nixl_kv.config", "nixl_kv.config", id="keys and config"),
        pytest.param("geometry/a.py", "import nixl_kv.config", "nixl_kv.config", id="geometry"),
        pytest.param("geometry/a.py", "import torch.cuda", "torch", id="geometry and torch"),
        pytest.param("protocol/a.py", "import numpy as np", "numpy", id="protocol"),
        pytest.param(
            "protocol/a.py",
            "def f():\n    from nixl_kv.transport import base",
            "nixl_kv.transport",
            id="protocol and transport, in a function",
        ),
        pytest.param(
            "transport/a.py",
            "if TYPE_CHECKING:\n    from nixl_kv.protocol.messages import Ask",
            "nixl_kv.protocol",
            id="transport and protocol, for types",
        ),
        pytest.param("transport/a.py", "from msgspec import Struct", "msgspec", id="transport"),
        pytest.param("connector/a.py", "import nixl_kv.cli", "nixl_kv.cli", id="connector"),
        pytest.param("connector/a.py", "import nixl_cu13._api", "nixl", id="nixl by its wheel"),
        pytest.param("connector/a.py", "import_module('zmq.green')", "zmq", id="by name"),
        pytest.param("cli/a.py", "importlib.import_module('vllm')", "vllm", id="cli"),
        pytest.param("cli/a.py", "from torch import Tensor", "torch", id="cli and torch"),
        pytest.param("geometry/a.py", "from .. import ids", "", id="relative"),
        pytest.param("stray.py", "import numpy", "numpy", id="no layer"),
        pytest.param("__init__.py", "import nixl_kv.connector", "nixl_kv.connector", id="root"),
    ],
)
def test_a_breach_is_found(path: str, source: str, found: str) -> None:
    assert breaches(path, source) == {found}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("config.py", "import ipaddress\nfrom nixl_kv.errors import ConfigError"),
        ("geometry/a.py", "import numpy.typing as npt\nfrom nixl_kv.geometry import ranks"),
        ("protocol/a.py", "from msgspec import Struct\nimport nixl_kv.config"),
        ("transport/nixl.py", "from nixl._api import nixl_agent\nimport nixl_kv.transport.base"),
        ("connector/a.py", "import torch, vllm.config\nfrom nixl_kv.transport import nixl"),
        ("cli/a.py", "import argparse, nixl_kv.connector.translate"),
    ],
)
def test_what_a_layer_may_import_is_no_breach(path: str, source: str) -> None:
    assert breaches(path, source) == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("mla = 1", "mla"),
        ("use_mla = 1", "mla"),
        ("x.MambaSpec", "mamba"),
        ("def cuda(): ...", "cuda"),
        ("class MLALayout: ...", "mla"),
        ("def f(cpu_only): ...", "cpu"),
        ("f(flashinfer=1)", "flashinfer"),
        ("import os.cpu", "cpu"),
        ("x = f'needs a CUDA {gpu}'", "cuda"),
        ("x = {'cpu': 1}", "cpu"),
    ],
)
def test_a_word_of_the_connector_is_found(source: str, found: str) -> None:
    assert words_of_the_connector(source) == {found}


@pytest.mark.parametrize(
    "source",
    [
        "x = 1  # the CPU waits",
        'def f():\n    """Copy to CUDA."""',
        'x: int\n"""For MLA."""',
        "cpus = formla = occupy = 1",
    ],
)
def test_comments_docstrings_and_longer_words_are_free(source: str) -> None:
    assert words_of_the_connector(source) == set()
