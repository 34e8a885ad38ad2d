"""Namespaces behind a switch reach each other until a link is cut, by IPv4 and IPv6."""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack

import pytest

from harness.cluster.netns import Namespace, Switch

CONNECT = """\
import socket, sys
host, timeout_s = sys.argv[1], float(sys.argv[2])
try:
    socket.create_connection((host, 9), timeout_s)
except ConnectionRefusedError:  # by the host, which was reached
    sys.exit(0)
except OSError:
    sys.exit(1)
"""


def reaches(one: Namespace, other: Namespace, timeout_s: float = 20.0) -> bool:
    command = [sys.executable, "-c", CONNECT, other.wire_address, str(timeout_s)]
    return subprocess.run(one.inside(command), check=False).returncode == 0


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need root, and `ip` of iproute2",
)
def test_a_cut_link_is_one_between_two_hosts() -> None:
    with ExitStack() as stack:
        hosts = [stack.enter_context(Namespace(f"kv-test-{n}", n)) for n in (101, 102, 103)]
        first, second, third = hosts
        for ipv6 in (True, False):
            with Switch(*hosts, ipv6=ipv6) as switch:
                assert (":" in first.wire_address) is ipv6
                switch.cut(first, second)
                assert not reaches(first, second, 0.3)
                assert reaches(first, third)
                switch.heal()
                assert reaches(first, second)
