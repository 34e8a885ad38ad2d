"""Our tickets in a decode engine that runs vLLM's own NixlConnector, of the installed version.

vLLM's scheduler and connector are the real ones; the test is the worker.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.request import Request, RequestStatus

from support.records import ticket
from support.vllm_scheduler import SteppedScheduler, make_config

in_tree = pytest.importorskip(
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl", reason="this vLLM has it elsewhere"
)
utils = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.utils")

PROMPT: Final = 100
FLAGGED: Final = {"do_remote_prefill": True, "do_remote_decode": False}
"""llm-d's coordinator writes these over a ticket's own flags."""

BOTH: Final = pytest.mark.parametrize("connector", ["NixlPullConnector", "NixlPushConnector"])


class Decode(SteppedScheduler):
    def __init__(self, connector: str, policy: str) -> None:
        transfer = KVTransferConfig(
            kv_connector=connector,
            kv_role="kv_consumer",
            kv_load_failure_policy=policy,
        )
        super().__init__(make_config(transfer, 32))

    def request(self, params: dict[str, Any], name: str = "request", first: int = 0) -> Request:
        return self.add(name, range(first, first + PROMPT), dict(params))

    def expect_it_serves(self) -> None:
        """It computes the next prompt, with a ticket of ours, and holds nothing afterwards."""
        self.request(ticket().params(b"k" * 32), "next", first=300)
        output = self.vllm.schedule()
        assert output.num_scheduled_tokens == {"next": PROMPT}
        assert not output.kv_connector_metadata.reqs_to_recv
        (answer,) = self.end(output)
        assert str(answer.finish_reason) == "length"
        self.end(self.vllm.schedule())
        assert self.free_blocks == self.idle


Make = Callable[..., Decode]


@pytest.fixture
def decode() -> Iterator[Make]:
    engines: list[Decode] = []

    def new(connector: str, policy: str = "fail") -> Decode:
        if not hasattr(in_tree, connector):
            pytest.skip(f"this vLLM has no {connector}")
        engines.append(Decode(connector, policy))
        return engines[-1]

    yield new
    for one in engines:
        one.vllm.connector.shutdown()


@BOTH
@pytest.mark.parametrize("flags", [{}, FLAGGED], ids=["as it is", "flags set anew"])
def test_it_computes_our_prompt_at_once_also_if_another_client_hangs_up(
    decode: Make, connector: str, flags: dict[str, bool]
) -> None:
    engine = decode(connector)
    engine.request(ticket().params(None) | flags)
    engine.vllm.finish_requests("request", RequestStatus.FINISHED_ABORTED)
    engine.end(engine.vllm.schedule())
    engine.expect_it_serves()


@BOTH
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_with_flags_set_anew_it_fails_or_computes_that_request_alone(
    decode: Make, connector: str, policy: str
) -> None:
    engine = decode(connector, policy)
    engine.request(ticket().params(None) | FLAGGED)
    output = engine.vllm.schedule()
    (load,) = output.kv_connector_metadata.reqs_to_recv.values()
    with pytest.raises(ZeroDivisionError):
        handshake(load, connector)
    failed = {"finished_recving": {"request"}, "failed_recving": {"request"}}
    answers = engine.end(output, **failed)
    if policy == "fail":
        assert [str(answer.finish_reason) for answer in answers] == ["error"]
    else:
        output = engine.vllm.schedule()
        assert output.num_scheduled_tokens == {"request": PROMPT}
        (answer,) = engine.end(output)
        assert str(answer.finish_reason) == "length"
    engine.expect_it_serves()


def handshake(load: Any, connector: str) -> None:
    """Begin a load as a worker does, by vLLM's own code, with nothing to connect to.

    It runs in the background, where an exception fails the loads that wait for it.
    """
    topology = object.__new__(utils.TransferTopology)
    topology.tp_size, topology.tp_rank = 2, 1
    worker = SimpleNamespace(_is_csa_linear=False, use_host_buffer=True, transfer_topo=topology)
    getattr(in_tree, f"{connector}Worker")._nixl_handshake(
        worker, load.remote.host, load.remote.port, load.tp_size, load.remote.engine_id
    )
