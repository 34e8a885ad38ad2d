"""The self-test of `nixl-kv doctor` on GPUs: two processes read each other over NIXL."""

import pytest

from nixl_kv.cli.doctor import host
from nixl_kv.cli.doctor.self_test import check_reads
from nixl_kv.config import Config

pytestmark = pytest.mark.gpu


def test_gpus_are_found_and_read_near_their_speed() -> None:
    gpus = host.find_gpus()
    assert gpus is not None
    assert gpus.failure == ""
    checks = [check for check in check_reads(Config(), len(gpus.names)) if "GPU" in check.name]
    assert [check.verdict for check in checks] == ["ok"], checks
