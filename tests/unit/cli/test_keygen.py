"""`nixl-kv keygen`."""

import json
import re
from pathlib import Path

from nixl_kv.config import Config
from nixl_kv.keys import read_key_file
from support.nixl_kv_command import nixl_kv


def test_key_is_written_and_its_use_explained(tmp_path: Path) -> None:
    path = tmp_path / "key"
    result = nixl_kv(f"keygen {path}")
    assert result.exit_code == 0
    assert read_key_file(path).fingerprint in result.stdout
    assert path.read_text().strip() not in result.stdout
    (line,) = re.findall(r"^ +(\"kv_connector_extra_config.*)$", result.stdout, re.MULTILINE)
    extra = json.loads(f"{{{line}}}")["kv_connector_extra_config"]
    assert Config.parse({**extra, "host": "10.0.0.1"}, {}).key_file == str(path)
