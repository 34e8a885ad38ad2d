"""The seam in vLLM's engine client: which requests are answered early, and with what.

The front end, its state of each request and its outputs are vLLM's own. The test is the engine.
"""

import asyncio
import functools
import gc
import weakref
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from nixl_kv.connector import early
from nixl_kv.connector.decode import Prompt
from nixl_kv.connector.early import wrap_client
from nixl_kv.connector.vllm_config import MediaReader
from nixl_kv.early.answers import LIFE_S, PROMISE, open_promise, seal_promise
from nixl_kv.ids import RequestId, new_nonce
from nixl_kv.protocol.ticket import Ticket
from support.records import ENGINE_LIFE, PREFILL, opened, ticket
from support.stepped import Clock

TOKENS = list(range(40, 60))
WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
SEATS = 2
ADDRESS: dict[str, Any] = {
    "engine": PREFILL,
    "incarnation": ENGINE_LIFE,
    "host": "10.0.0.1",
    "port": 5600,
    "epoch": 3,
    "weights": "step 7",
}


class Engine:
    """VLLM's `engine_core` client, with the engine's side played by the test."""

    def __init__(self, ranks: int) -> None:
        self.core_engines = [bytes([number, 0]) for number in range(ranks)]
        self.core_engine = self.core_engines[0]
        self.address: dict[str, Any] | None = dict(ADDRESS)
        self.asked: list[bytes] = []
        self.got: list[EngineCoreRequest] = []
        self.is_slow = False
        self.key: bytes | None = None
        if ranks > 1:
            self.reqs_in_flight: dict[str, bytes] = {}

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.got.append(request)
        if len(self.core_engines) > 1:
            self.reqs_in_flight[request.request_id] = self.core_engines[-1]

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        assert (method, args) == (early.ADDRESS, ())
        self.asked.append(engine)
        if self.is_slow:
            await asyncio.sleep(3600)
        port = ADDRESS["port"] + engine[0]
        if self.address is None:
            return None
        return {**self.address, "port": port, PROMISE: seal_promise(new_nonce(), self.key)}


class Client:
    """The part of `AsyncLLM` that the seam uses. `_add_request` is as in vLLM 0.31 to 0.33."""

    def __init__(self, *, role: str = "kv_producer", overlap: str = "on", ranks: int = 1) -> None:
        extra = {"insecure": True, "peers": ["127.0.0.1/32"], "overlap": overlap}
        transfer = {
            "kv_connector": "NixlKVConnector",
            "kv_role": role,
            "kv_connector_extra_config": extra,
        }
        self.vllm_config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(**transfer),
            scheduler_config=SimpleNamespace(max_num_seqs=SEATS),
            model_config=SimpleNamespace(multimodal_config=None),
        )
        self.output_processor = OutputProcessor(None, log_stats=False)
        self.engine_core = Engine(ranks)
        self.errored = False
        self.withdrawn: list[tuple[Any, dict[str, Any]]] = []

    async def _add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: Any,
        index: int,
        queue: RequestOutputCollector,
    ) -> None:
        self.output_processor.add_request(request, prompt, parent_req, index, queue)
        await self.engine_core.add_request_async(request)

    async def notify_kv_transfer_request_rejected(
        self, _request_id: str, params: Any, **to: Any
    ) -> None:
        self.withdrawn.append((params, to))

    # --- actions of a test

    async def ask(
        self, name: str = "p", fields: Any = WANTED, **changed: Any
    ) -> RequestOutputCollector:
        options = {
            key: changed.pop(key)
            for key in list(changed)
            if key in ("max_tokens", "n", "logprobs", "prompt_logprobs")
        }
        params = SamplingParams(
            **{"max_tokens": 1, "detokenize": False, **options},
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": fields},
        )
        values: dict[str, Any] = {
            "prompt_token_ids": list(TOKENS),
            "mm_features": None,
            "pooling_params": None,
            "arrival_time": 0.0,
            "lora_request": None,
            "cache_salt": None,
            "data_parallel_rank": None,
        }
        request = EngineCoreRequest(
            request_id=name, external_req_id=name, sampling_params=params, **(values | changed)
        )
        queue = RequestOutputCollector(params.output_kind, name)
        await self._add_request(request, None, None, 0, queue)
        return queue

    def fields(self, number: int = -1) -> dict[str, Any]:
        """The `kv_transfer_params` that the engine got."""
        params = self.engine_core.got[number].sampling_params
        assert params is not None
        assert params.extra_args is not None
        fields: dict[str, Any] = params.extra_args["kv_transfer_params"]
        return fields

    def end(
        self,
        name: str = "p",
        params: dict[str, Any] | None = None,
        reason: FinishReason = FinishReason.LENGTH,
    ) -> None:
        """The engine's own answer."""
        output = EngineCoreOutput(
            request_id=name, new_token_ids=[7], finish_reason=reason, kv_transfer_params=params
        )
        self.output_processor.process_outputs([output])

    def step(self) -> None:
        self.output_processor.update_scheduler_stats(None)


wrap_client(Client)


@pytest.fixture(autouse=True)
def own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "log_like_vllm", lambda: None)  # else caplog is empty


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test in an event loop of its own."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that the API server reads."""
    clock = Clock()
    monkeypatch.setattr(early.time, "monotonic", clock)
    return clock


def expect_ticket(queue: RequestOutputCollector) -> Ticket:
    """The early ticket in the answer that the front end gets at once."""
    output = queue.get_nowait()
    assert isinstance(output, RequestOutput)
    assert output.finished
    assert output.prompt_token_ids == TOKENS
    assert output.num_cached_tokens is None, "they were not counted"
    (one,) = output.outputs
    assert (list(one.token_ids), one.finish_reason) == ([], "length")
    found = opened(output.kv_transfer_params)
    assert found.is_early
    return found


@in_loop
async def test_the_answer_has_a_ticket_for_the_prompt_and_the_engine_its_nonce() -> None:
    client = Client()
    found = expect_ticket(await client.ask())
    prompt = Prompt(RequestId("p"), len(TOKENS), TOKENS)
    context, media = prompt.hashes(found.nonce)
    assert found == Ticket(
        **ADDRESS,
        nonce=found.nonce,
        num_tokens=len(TOKENS),
        context=context,
        media=media,
        is_early=True,
    )
    assert client.fields() == {**WANTED, PROMISE: f"{found.nonce}."}
    assert open_promise(client.fields()[PROMISE], None) == found.nonce


@in_loop
async def test_the_hash_covers_the_adapter_and_the_salt() -> None:
    client, extras = Client(), (b"loraadapter", b"saltsalt")
    found = expect_ticket(
        await client.ask(lora_request=LoRARequest("adapter", 1, "/nowhere"), cache_salt="salt")
    )
    prompt = Prompt(RequestId("p"), len(TOKENS), TOKENS, extras)
    assert found.context == prompt.context(found.nonce)


@in_loop
async def test_the_engines_own_answer_is_not_read() -> None:
    client = Client()
    queue = await client.ask()
    client.end("p", ticket().params(None))  # before the front end has read
    expect_ticket(queue)
    assert queue.get_nowait() is None
    assert not client.output_processor.request_states


LATE: dict[str, tuple[Any, dict[str, Any]]] = {
    "two tokens": (WANTED, {"max_tokens": 2}),
    "log probabilities": (WANTED, {"logprobs": 0}),
    "log probabilities of the prompt": (WANTED, {"prompt_logprobs": 1}),
    "a session": (WANTED, {"resumable": True}),
    "a rejected request": (WANTED, {"abort_immediately": True}),
    "embeddings": (WANTED, {"prompt_token_ids": None, "prompt_embeds": torch.zeros(3, 4)}),
    "no offer": ({"do_remote_decode": False}, {}),
    "another truth": ({"do_remote_decode": 1}, {}),
    "nothing": (None, {}),
    "parameters without end": ({**WANTED, "x": [[[[[[[[[[[1]]]]]]]]]]]}, {}),
}


@pytest.mark.parametrize("case", LATE)
@in_loop
async def test_the_engine_answers_other_requests(case: str) -> None:
    fields, changed = LATE[case]
    client = Client()
    queue = await client.ask("p", fields, **changed)
    assert queue.get_nowait() is None
    assert client.fields() == fields if fields else True
    assert PROMISE not in (client.fields() if fields else {})


@pytest.mark.parametrize("options", [{"overlap": "off"}, {"role": "kv_consumer"}])
@in_loop
async def test_other_engines_answer_nothing_early(options: dict[str, Any]) -> None:
    client = Client(**options)
    assert (await client.ask()).get_nowait() is None
    assert client.fields() == WANTED
    assert not client.engine_core.asked


@pytest.mark.parametrize("fields", [WANTED, {"do_remote_decode": False}])
@in_loop
async def test_a_clients_own_promise_does_not_reach_the_engine(fields: dict[str, Any]) -> None:
    client, forged = Client(), {**fields, PROMISE: "a promise of a client's"}
    await client.ask("p", forged)
    assert client.fields().get(PROMISE) != forged[PROMISE]
    assert forged[PROMISE] == "a promise of a client's", "other requests may share it"


@in_loop
async def test_an_engine_that_drains_answers_itself() -> None:
    client = Client()
    client.engine_core.address = None
    assert (await client.ask("a")).get_nowait() is None
    client.engine_core.address = ADDRESS
    expect_ticket(await client.ask("b"))


@in_loop
async def test_an_engine_that_does_not_tell_its_address_in_time_answers_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(early, "ASK_S", 0.01)
    client = Client()
    client.engine_core.is_slow = True
    for name in ("a", "b"):
        queue = await client.ask(name)
        assert queue.get_nowait() is None
    assert len(client.engine_core.asked) == 1
    client.end("a", {"x": 1})
    output = client.output_processor.request_states["b"].queue
    assert output is not None


@in_loop
async def test_each_of_the_engines_own_answers_tells_its_address() -> None:
    """It may have begun another life, or drain."""
    client = Client()
    await client.ask("a")
    client.end("a", ticket(epoch=9, weights="step 8").params(None))
    found = expect_ticket(await client.ask("b"))
    assert (found.epoch, found.weights) == (9, "step 8")
    assert len(client.engine_core.asked) == 1


@in_loop
async def test_an_answer_without_a_ticket_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode may have released that offer. The engine is asked again, in case it drains."""
    monkeypatch.setattr(early, "ASK_S", 3600)
    client = Client()
    await client.ask("a")
    client.engine_core.is_slow = True
    client.end("a")
    expect_ticket(await client.ask("b"))
    await asyncio.sleep(0)
    assert len(client.engine_core.asked) == 2


@in_loop
async def test_an_engine_that_begins_to_drain_answers_itself() -> None:
    client = Client()
    await client.ask("a")
    client.engine_core.address = None
    client.end("a")
    await asyncio.sleep(0)
    assert (await client.ask("b")).get_nowait() is None


@in_loop
async def test_an_engine_with_another_key_answers_itself(caplog: pytest.LogCaptureFixture) -> None:
    """On another machine: decode would refuse this API server's tickets."""
    client = Client()
    client.engine_core.key = b"k" * 32
    assert (await client.ask()).get_nowait() is None
    assert "no front end of this engine has written nixl_kv_promise" in caplog.text


def fail(*_: object) -> None:
    raise ZeroDivisionError


@in_loop
async def test_an_error_of_ours_leaves_all_answers_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(early.MediaReader, "of", fail)
    client = Client()
    for name in ("a", "b"):
        assert (await client.ask(name)).get_nowait() is None
    assert caplog.text.count("answers no request early: ZeroDivisionError()") == 1


@in_loop
async def test_the_ticket_names_the_rank_that_vllm_has_chosen() -> None:
    client = Client(ranks=3)
    found = expect_ticket(await client.ask())
    assert found.port == ADDRESS["port"] + 2
    client.end("p", reason=FinishReason.ERROR)
    await asyncio.sleep(0)
    promise = {"do_remote_decode": True, PROMISE: f"{found.nonce}."}
    assert client.withdrawn == [(promise, {"data_parallel_rank": 2})]


@in_loop
async def test_the_connector_hears_of_a_request_that_fails_after_its_answer() -> None:
    """It may never have reached the scheduler, and decode waits for it."""
    client = Client()
    found = expect_ticket(await client.ask())
    client.end("p", reason=FinishReason.ERROR)
    await asyncio.sleep(0)
    assert client.withdrawn == [({"do_remote_decode": True, PROMISE: f"{found.nonce}."}, {})]
    expect_ticket(await client.ask("q"))


@in_loop
async def test_a_dead_engine_hears_of_nothing() -> None:
    client = Client()
    await client.ask()
    client.errored = True
    client.output_processor.propagate_error(RuntimeError("dead"))
    await asyncio.sleep(0)
    assert client.withdrawn == []


@in_loop
async def test_as_many_are_answered_early_as_the_engine_has_seats() -> None:
    client = Client()
    for name in ("a", "b"):
        expect_ticket(await client.ask(name))
    assert (await client.ask("c")).get_nowait() is None
    client.end("a", ticket().params(None))
    expect_ticket(await client.ask("d"))


@in_loop
async def test_a_hung_engine_answers_itself(clock: Clock) -> None:
    client = Client()
    expect_ticket(await client.ask("a"))
    clock.now += LIFE_S + 1
    assert (await client.ask("b")).get_nowait() is None
    client.step()
    expect_ticket(await client.ask("c"))


@in_loop
async def test_a_part_of_a_streamed_input_is_not_answered_early() -> None:
    """Its session's request has the same id, and the client waits for its tokens."""
    client = Client()
    assert (await client.ask("a", resumable=True)).get_nowait() is None
    state = client.output_processor.request_states["a"]
    client.output_processor.add_request = lambda *_: None  # type: ignore[method-assign]
    assert (await client.ask("a")).get_nowait() is None
    assert client.output_processor.request_states["a"] is state


@in_loop
async def test_an_engine_that_refuses_a_request_is_asked_again() -> None:
    """A paused engine of vLLM 0.33 does so; until it goes on, it has no address."""
    client = Client()
    queue = await client.ask("a")
    found = expect_ticket(queue)
    client.engine_core.address = None
    queue.put(RuntimeError("engine_paused"))
    assert (await client.ask("b")).get_nowait() is None
    assert [params[PROMISE] for params, _ in client.withdrawn] == [f"{found.nonce}."]


@in_loop
async def test_an_error_of_ours_ends_no_output_handler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(early.EarlyAnswers, "_address_in", fail)
    client = Client()
    await client.ask("a")
    client.end("a", ticket().params(None))
    assert not client.output_processor.request_states
    assert "an early answer's end was lost: ZeroDivisionError()" in caplog.text


@in_loop
async def test_a_client_that_is_no_longer_used_is_collected() -> None:
    """vLLM shuts it down then; its output handler keeps only the processor."""
    client = Client()
    await client.ask("a")
    client.end("a", ticket().params(None))
    found, processor = weakref.ref(client), client.output_processor
    del client
    await asyncio.sleep(0)
    gc.collect()
    assert found() is None
    processor.update_scheduler_stats(None)


@in_loop
async def test_an_abort_by_the_client_does_not_count_as_a_sign_of_life(clock: Clock) -> None:
    client = Client()
    for name in ("a", "b"):
        expect_ticket(await client.ask(name))
    clock.now += LIFE_S + 1
    client.output_processor.abort_requests(["b"], internal=True)
    assert (await client.ask("c")).get_nowait() is None


@in_loop
async def test_an_idle_engine_is_asked_whether_its_address_is_current(clock: Clock) -> None:
    """Its cache may have been reset since the last answer."""
    client = Client()
    await client.ask("a")
    client.end("a", ticket().params(None))
    clock.now += early.CURRENT_S + 0.1
    client.engine_core.address = {**ADDRESS, "epoch": 4}
    found = expect_ticket(await client.ask("b"))
    assert found.epoch == 4


async def add(
    client: Client, request: EngineCoreRequest, parent: Any = None
) -> RequestOutputCollector:
    queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, request.request_id)
    await client._add_request(request, None, parent, 0, queue)
    return queue


@in_loop
async def test_the_samples_of_one_prompt_are_not_answered_early() -> None:
    """Each sample is a request with n of 1, and vLLM adds their outputs up."""
    client = Client()
    await client.ask("p", n=2)
    request = client.engine_core.got[-1]
    parent = ParentRequest(request)
    name, params = parent.get_child_info(0)
    child = structs.replace(request, request_id=name, sampling_params=params)
    assert (await add(client, child, parent)).get_nowait() is None
    assert client.fields() == WANTED


@in_loop
async def test_requests_with_the_same_parameters_have_different_promises() -> None:
    client = Client()
    await client.ask("a")
    for name in ("b", "c"):
        await add(client, structs.replace(client.engine_core.got[0], request_id=name))
    assert len({client.fields(number)[PROMISE] for number in range(3)}) == 3


@in_loop
async def test_a_request_that_the_engine_refuses_before_its_answer_takes_no_seat() -> None:
    client = Client()
    add_request = client.engine_core.add_request_async

    async def refuse(request: EngineCoreRequest) -> None:
        state = client.output_processor.request_states[request.request_id]
        state.queue.put(RuntimeError("engine_paused"))

    client.engine_core.add_request_async = refuse  # type: ignore[method-assign]
    for number in range(SEATS):
        queue = await client.ask(f"refused {number}")
        with pytest.raises(RuntimeError, match="engine_paused"):
            queue.get_nowait()
    client.engine_core.add_request_async = add_request  # type: ignore[method-assign]
    expect_ticket(await client.ask())


@in_loop
async def test_a_step_of_one_rank_does_not_vouch_for_another(clock: Clock) -> None:
    client = Client(ranks=2)
    expect_ticket(await client.ask("a"))
    clock.now += LIFE_S + 1
    client.step()
    assert (await client.ask("b")).get_nowait() is None


@pytest.mark.parametrize(
    ("has_geometry", "has_data", "is_early"),
    [(True, False, False), (True, True, True), (False, False, True)],
)
@in_loop
async def test_a_picture_that_only_the_engine_has_is_answered_late_if_its_size_counts(
    monkeypatch: pytest.MonkeyPatch, *, has_geometry: bool, has_data: bool, is_early: bool
) -> None:
    reader = MediaReader(frozenset(), has_geometry=has_geometry)
    monkeypatch.setattr(early.MediaReader, "of", lambda _: reader)
    data = {"image_grid_thw": SimpleNamespace(data=torch.tensor([1, 4, 4]))} if has_data else None
    place = SimpleNamespace(offset=10, length=4)
    picture = SimpleNamespace(mm_position=place, identifier="picture", data=data)
    queue = await Client().ask(mm_features=[picture])
    assert (queue.get_nowait() is not None) is is_early
