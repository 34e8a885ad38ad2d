"""A copy of the package as a later release may be: of another wire version, with other messages."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import nixl_kv
from nixl_kv.protocol.ticket import WIRE_VERSION

OTHER_VERSION: Final = WIRE_VERSION + 1

CHANGES: Final[Mapping[str, Mapping[str, str]]] = {
    "protocol/ticket.py": {
        f"WIRE_VERSION: Final = {WIRE_VERSION}": f"WIRE_VERSION: Final = {OTHER_VERSION}",
        "    num_tokens: Annotated[int,": "    mood: str = 'good'\n    num_tokens: Annotated[int,",
    },
    "protocol/messages.py": {
        "    engine: _Engine\n\n\nclass Drain": "    engine: _Engine\n    mood: str = 'good'\n\n\n"
        "class Drain",
    },
}
"""Texts and their replacements, by file. A ticket and a question have a field more."""


def copy_package(folder: Path) -> Path:
    """Copy the package that runs here into a folder, and change it. Returns the folder."""
    copy = folder / "nixl_kv"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(nixl_kv.__file__).parent, copy, ignore=ignored)
    for name, changes in CHANGES.items():
        text = (copy / name).read_text()
        for before, after in changes.items():
            assert text.count(before) == 1, f"{name}: {before!r}"
            text = text.replace(before, after)
        (copy / name).write_text(text)
    return folder
