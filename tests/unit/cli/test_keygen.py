"""`nixl-kv keygen`."""

import json
import re
from pathlib import Path

from typer.testing import CliRunner, Result

from nixl_kv.cli.main import app
from nixl_kv.config import Config
from nixl_kv.keys import read_key_file


def keygen(path: Path) -> Result:
    return CliRunner().invoke(app, ["keygen", str(path)])


def test_a_key_is_made_and_what_to_do_next_is_said(tmp_path: Path) -> None:
    path = tmp_path / "key"
    result = keygen(path)
    assert result.exit_code == 0
    assert read_key_file(path).fingerprint in result.stdout
    assert path.read_text().strip() not in result.stdout
    (found,) = re.findall(r"^ +(\"kv_connector_extra_config.*)$", result.stdout, re.MULTILINE)
    extra = json.loads(f"{{{found}}}")["kv_connector_extra_config"]
    assert Config.parse({**extra, "host": "10.0.0.1"}, {}).key_file == str(path)


def test_a_file_that_exists_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "key"
    keygen(path)
    before = path.read_bytes()
    result = keygen(path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        f"error: no key is written to {str(path)!r}: File exists; allowed: the path of a new file\n"
    )
    assert path.read_bytes() == before
