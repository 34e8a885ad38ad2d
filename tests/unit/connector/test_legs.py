"""Requests that routers and proxies send, and which leg of a request each is."""

from typing import Any

import pytest

from nixl_kv.connector.legs import Leg, leg_of
from nixl_kv.protocol.ticket import FIELD

# What vLLM's own connector answers on prefill.
IN_TREE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_block_ids": [1, 2],
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
}


@pytest.mark.parametrize(
    ("params", "leg"),
    [
        pytest.param(None, Leg.NONE, id="none"),
        pytest.param({}, Leg.DECODE, id="empty"),
        pytest.param([1], Leg.DECODE, id="no object"),
        pytest.param({"do_remote_decode": True}, Leg.PREFILL, id="a router to prefill"),
        pytest.param(
            {"do_remote_decode": True, "remote_block_ids": None},
            Leg.PREFILL,
            id="empty fields",
        ),
        pytest.param({"do_remote_decode": 1}, Leg.DECODE, id="not exactly true"),
        pytest.param({"do_remote_decode": True, FIELD: "t"}, Leg.PREFILL, id="a stale ticket"),
        pytest.param(IN_TREE, Leg.IN_TREE, id="vLLM's connector on prefill"),
        pytest.param({**IN_TREE, FIELD: "t"}, Leg.DECODE, id="a ticket with vLLM's fields"),
        pytest.param({**IN_TREE, "remote_block_ids": []}, Leg.DECODE, id="no groups"),
        pytest.param({**IN_TREE, "remote_block_ids": [[], []]}, Leg.DECODE, id="empty groups"),
        pytest.param({**IN_TREE, "remote_block_ids": [[], [3]]}, Leg.IN_TREE, id="one group"),
        pytest.param(
            {**IN_TREE, "remote_block_ids": None}, Leg.UNANSWERED, id="prefill's address, no blocks"
        ),
        pytest.param(
            {"do_remote_prefill": True, "remote_ready": False}, Leg.UNANSWERED, id="not ready"
        ),
        pytest.param(
            {"do_remote_prefill": True, "remote_ready": False, FIELD: "t"}, Leg.DECODE, id="early"
        ),
        pytest.param({"do_remote_prefill": True}, Leg.DECODE, id="nothing of prefill's"),
        pytest.param({"remote_ready": False}, Leg.DECODE, id="not a load"),
        pytest.param({FIELD: "t"}, Leg.DECODE, id="a ticket alone"),
        pytest.param({"remote_kv_source": {"host": "h"}}, Leg.FOREIGN, id="llm-d's offloading"),
        pytest.param({"ttl": 3}, Leg.FOREIGN, id="another connector's"),
        pytest.param({"remote_kv_source": {}, FIELD: "t"}, Leg.DECODE, id="both"),
        pytest.param({1: 2}, Leg.FOREIGN, id="a number as a name"),
    ],
)
def test_the_leg_of_a_request(params: Any, leg: Leg) -> None:
    assert leg_of(params) is leg
