"""The middleware that answers for prefill: when it does, with what, and what vLLM gets to see."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from nixl_kv.connector import early_answer
from nixl_kv.connector.early_answer import CHAT, COMPLETIONS, EarlyAnswer, may_answer_early
from nixl_kv.errors import REQUEST_LINES, ConfigError
from nixl_kv.ids import Incarnation, Nonce
from nixl_kv.protocol.ticket import FIELD, SealedTicket, Ticket
from support.records import ENGINE_LIFE, hex32, ticket

WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
REQUEST: dict[str, Any] = {
    "model": "tiny",
    "prompt": "What is a lease?",
    "max_tokens": 1,
    "stream": False,
    "kv_transfer_params": WANTED,
}
CHAT_REQUEST: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What is a lease?"}],
    "max_completion_tokens": 1,
    "kv_transfer_params": WANTED,
}
TICKET = ticket(epoch=3, weights="step 7")


class Watch:
    """An `OfferWatch`; a test says which offers decode releases."""

    def __init__(self, control: Any) -> None:
        control.close()
        self.watched: dict[Nonce, Callable[[], object]] = {}

    def start(self) -> None:
        pass

    def add(self, pair: Ticket, on_released: Callable[[], object]) -> None:
        self.watched[pair.nonce] = on_released

    def discard(self, nonce: Nonce) -> None:
        self.watched.pop(nonce, None)


@pytest.fixture(autouse=True)
def replaced_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_answer, "OfferWatch", Watch)
    monkeypatch.setattr(early_answer, "log_like_vllm", lambda: None)  # else caplog is empty


class Engine:
    """VLLM's API server, as far as the middleware sees it: it reads a request, then answers."""

    def __init__(self) -> None:
        self.ticket: Ticket | None = TICKET
        self.status = 200
        self.read = b""  # the latest body
        self.seen: list[Any] = []  # the requests
        self.has_read = asyncio.Event()
        self.is_allowed = True  # to read the request: its API key is right
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.has_hung_up = False
        self.is_broken = False

    async def __call__(self, _scope: Any, receive: Any, send: Any) -> None:
        if not self.is_allowed:
            await _respond(send, 401, {"error": "Unauthorized"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message["body"]
            more = message.get("more_body", False)
        self.read = body
        with contextlib.suppress(ValueError, RecursionError):
            self.seen.append(json.loads(body))
        self.has_read.set()
        watch = asyncio.create_task(receive())
        await asyncio.wait(
            [watch, asyncio.create_task(self.may_end.wait())], return_when=asyncio.FIRST_COMPLETED
        )
        self.has_hung_up = watch.done()
        watch.cancel()
        if self.has_hung_up:  # as vLLM's `with_cancellation`: the engine aborts the request
            await _respond(send, 200, None)
            return
        if self.is_broken:
            raise RuntimeError("the engine is dead")
        params = None if self.ticket is None else self.ticket.params(None)
        await _respond(send, self.status, {"kv_transfer_params": params, "choices": ["computed"]})


async def _respond(send: Any, status: int, body: Any) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


class Client:
    """Sends requests through the middleware to an engine, on an event loop of its own."""

    def __init__(self, role: str = "kv_producer", data_parallel: int = 1) -> None:
        self.engine = Engine()
        self.early = EarlyAnswer(self.engine)
        transfer = {
            "kv_connector": "NixlKVConnector",
            "kv_role": role,
            "kv_connector_extra_config": {
                "insecure": True,
                "peers": ["127.0.0.1/32"],
            },
        }
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(**transfer),
            parallel_config=SimpleNamespace(data_parallel_size=data_parallel),
        )
        self.more_scope: dict[str, Any] = {}
        self.withdrawn: list[Any] = []  # `kv_transfer_params` of failed requests
        self.args = SimpleNamespace(enable_request_id_headers=False)
        state = SimpleNamespace(vllm_config=config, engine_client=self, args=self.args)
        self.app = SimpleNamespace(state=state)
        self.headers: dict[bytes, bytes] = {}  # of the latest answer

    async def notify_kv_transfer_request_rejected(self, _request_id: str, params: Any) -> None:
        self.withdrawn.append(params)

    async def ask(
        self,
        request: Any = REQUEST,
        path: str = COMPLETIONS,
        hang_up: bool = False,  # noqa: FBT001, FBT002 - a test's own option
    ) -> Any:
        """The status and body of the answer, when vLLM has ended the request if it may."""
        body = request if isinstance(request, bytes) else json.dumps(request).encode()
        half = len(body) // 2
        coming = [(body[:half], True), (body[half:], False)]
        sent: list[Any] = []

        async def receive() -> Any:
            if coming:
                part, more = coming.pop(0)
                return {"type": "http.request", "body": part, "more_body": more}
            if not hang_up:
                await asyncio.Event().wait()
            return {"type": "http.disconnect", "body": b""}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "app": self.app} | self.more_scope
        await self.early(scope, receive, send)
        start, body_message = sent
        self.headers = dict(start["headers"])
        if self.engine.may_end.is_set():
            await self.end()
        return start["status"], json.loads(body_message["body"])

    async def end(self) -> None:
        """Wait for what was answered early."""
        if self.early._tasks:
            await asyncio.wait(self.early._tasks)

    @property
    def watched(self) -> dict[Nonce, Callable[[], object]]:
        assert isinstance(self.early._watch, Watch)
        return self.early._watch.watched


def run(steps: Callable[[Client], Awaitable[None]], **options: Any) -> None:
    async def in_loop() -> None:
        await asyncio.wait_for(steps(Client(**options)), 60)

    asyncio.run(in_loop())


def pair_of(body: Any) -> Ticket:
    ticket = SealedTicket.parse({FIELD: body["kv_transfer_params"][FIELD]}).open()
    assert ticket.is_pair
    return ticket


@pytest.mark.parametrize(
    ("request_body", "path"), [(REQUEST, COMPLETIONS), (CHAT_REQUEST, CHAT)], ids=["text", "chat"]
)
def test_it_answers_before_prefill_computes(request_body: Any, path: str) -> None:
    async def steps(client: Client) -> None:
        engine = client.engine
        _, first = await client.ask(request_body, path)
        assert first["choices"] == ["computed"], "the address is not known before the first answer"
        engine.may_end.clear()
        status, answer = await client.ask(request_body, path)
        assert status == 200
        engine.may_end.set()
        await client.end()
        pair = pair_of(answer)
        assert (pair.engine, pair.incarnation, pair.host, pair.port, pair.epoch, pair.weights) == (
            *(TICKET.engine, TICKET.incarnation, TICKET.host, TICKET.port),
            *(TICKET.epoch, TICKET.weights),
        )
        assert answer["model"] == "tiny"
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length"
        assert choice.get("text", choice.get("message", {}).get("content")) == ""
        # vLLM computes the same request, with the pair ticket that the client got.
        seen = engine.seen[1]
        assert SealedTicket.parse({FIELD: seen["kv_transfer_params"].pop(FIELD)}).open() == pair
        assert seen == request_body
        assert not engine.has_hung_up
        assert pair_of((await client.ask(request_body, path))[1]).nonce != pair.nonce

    run(steps)


def test_a_client_that_hangs_up_after_its_answer_aborts_nothing() -> None:
    async def steps(client: Client) -> None:
        await client.ask()
        client.engine.may_end.clear()
        await client.ask(hang_up=True)
        client.engine.may_end.set()
        await client.end()
        assert not client.engine.has_hung_up

    run(steps)


def test_requests_without_a_client_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_answer, "MAX_OPEN", 2)

    async def steps(client: Client) -> None:
        await client.ask()
        client.engine.may_end.clear()
        for _ in range(2):
            pair_of((await client.ask(hang_up=True))[1])
        client.engine.has_read.clear()
        usual = asyncio.create_task(client.ask())
        await client.engine.has_read.wait()
        client.engine.may_end.set()
        assert (await usual)[1]["choices"] == ["computed"]
        await client.end()
        pair_of((await client.ask())[1])

    run(steps)


def test_a_request_whose_offer_decode_has_released_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    life = Incarnation(hex32(77))

    async def steps(client: Client) -> None:
        await client.ask()
        client.engine.may_end.clear()
        client.more_scope = {"headers": [(b"x-request-id", b"first")]}
        first = pair_of((await client.ask())[1]).nonce
        client.more_scope = {"headers": [(b"x-request-id", b"second")]}
        second = pair_of((await client.ask())[1]).nonce
        assert client.watched.keys() == {first, second}
        client.watched[second]()
        while second in client.watched:
            await asyncio.wait(client.early._tasks, return_when=asyncio.FIRST_COMPLETED)
        assert client.engine.has_hung_up
        client.engine.ticket = replace(TICKET, incarnation=life)
        client.engine.may_end.set()
        await client.end()
        assert not client.engine.has_hung_up, "the other request ends as usual"
        assert (client.watched, client.withdrawn) == ({}, [])
        assert pair_of((await client.ask())[1]).incarnation == life
        assert (
            f"request second (offer {second[:8]}), which was answered early, is aborted: "
            "decode has released its offer"
        ) in caplog.text
        assert "request first" not in caplog.text

    run(steps)


def test_what_vllm_answers_to_an_aborted_request_says_nothing_about_the_engine() -> None:
    async def steps(client: Client) -> None:
        await client.ask()
        client.engine.may_end.clear()
        nonce = pair_of((await client.ask())[1]).nonce
        client.watched[nonce]()
        await client.end()
        assert client.engine.has_hung_up
        pair_of((await client.ask())[1])

    run(steps)


def test_a_call_that_is_cancelled_before_its_answer_ends_the_request() -> None:
    async def steps(client: Client) -> None:
        client.engine.may_end.clear()
        call = asyncio.create_task(client.ask())
        await client.engine.has_read.wait()
        call.cancel()
        await client.end()
        assert not client.early._tasks
        with pytest.raises(asyncio.CancelledError):
            await call

    run(steps)


@pytest.mark.parametrize("is_shown", [False, True])
@pytest.mark.parametrize("given", [None, "router-7"])
def test_its_answer_has_the_id_that_the_request_has(given: str | None, *, is_shown: bool) -> None:
    async def steps(client: Client) -> None:
        client.args.enable_request_id_headers = is_shown
        if given is not None:
            client.more_scope = {"headers": [(b"x-request-id", given.encode()), (b"x", b"y")]}
        await client.ask()
        _, answer = await client.ask()
        kind, shown = answer["id"].split("-", 1)
        assert kind == "cmpl"
        assert given in (None, shown)
        assert client.headers.get(b"x-request-id") == (shown.encode() if is_shown else None)

    run(steps)


def test_a_request_that_is_not_answered_early_ends_with_its_client() -> None:
    async def steps(client: Client) -> None:
        client.engine.may_end.clear()
        await client.ask(hang_up=True)
        assert client.engine.has_hung_up

    run(steps)


def test_without_the_right_api_key_nothing_is_answered_early() -> None:
    async def steps(client: Client) -> None:
        await client.ask()
        client.engine.is_allowed = False
        assert await client.ask() == (401, {"error": "Unauthorized"})

    run(steps)


def test_a_path_with_the_root_path_before_it_is_answered_early() -> None:
    async def steps(client: Client) -> None:
        client.more_scope = {"root_path": "/prefill"}
        await client.ask(path=f"/prefill{COMPLETIONS}")
        pair_of((await client.ask(path=f"/prefill{COMPLETIONS}"))[1])
        pair_of((await client.ask())[1])

    run(steps)


def test_a_request_that_breaks_after_its_answer_leaves_the_connection_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def steps(client: Client) -> None:
        client.engine.is_broken = True
        with pytest.raises(RuntimeError):  # not answered early
            await client.ask()
        client.engine.is_broken = False
        await client.ask()
        client.engine.is_broken = True
        client.more_scope = {"headers": [(b"x-request-id", b"router-7")]}
        nonce = pair_of((await client.ask())[1]).nonce
        name = f"request router-7 (offer {nonce[:8]}), which was answered early, has failed"
        assert name in caplog.text
        assert "the engine is dead" in caplog.text
        assert len(client.withdrawn) == 1

    run(steps)


def test_an_engine_that_cannot_be_told_of_a_failure_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def steps(client: Client) -> None:
        await client.ask()
        client.engine.status = 500
        client.notify_kv_transfer_request_rejected = None  # type: ignore[assignment,method-assign]
        pair_of((await client.ask())[1])

    run(steps)
    assert "which was answered early, has failed with HTTP 500" in caplog.text
    assert "TypeError: 'NoneType' object is not callable" in caplog.text


@pytest.mark.parametrize(
    "value",
    ["[" * 9 + "]" * 9, "[" * 800 + "]" * 800, "[" * 5000 + "]" * 5000, f'"{"x" * 70_000}"'],
    ids=["9", "800", "5000", "large"],
)
@pytest.mark.parametrize("field", ["kv_transfer_params", "model", "n"])
def test_deep_and_large_values_are_left_to_the_engine(field: str, value: str) -> None:
    """It refuses them, so an early answer would promise an offer that never comes."""
    params = f'{{"do_remote_decode": true, "x": {value}}}'
    fields = {"model": '"tiny"', "prompt": '"a"', "max_tokens": "1"}
    fields |= {"kv_transfer_params": json.dumps(WANTED)}
    fields[field] = params if field == "kv_transfer_params" else value
    body = "{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}"

    async def steps(client: Client) -> None:
        await client.ask()
        _, answer = await client.ask(body.encode())
        if (field, value[0]) != ("model", '"'):  # any name of a model gets an early answer
            assert answer["choices"] == ["computed"]
            assert client.engine.read == body.encode()
        pair_of((await client.ask())[1])

    run(steps)


def test_requests_that_fail_behind_an_early_answer_cost_bounded_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def steps(client: Client) -> None:
        client.more_scope = {"headers": [(b"x-request-id", b"x\x1b" * 30_000)]}
        await client.ask()
        client.engine.status = 500
        for _ in range(30):
            await client.ask()
        client.engine.is_broken = True
        for _ in range(30):
            await client.ask()

    run(steps)
    assert 2 <= len(caplog.messages) < 3 * REQUEST_LINES
    assert all(len(message) < 500 and message.isprintable() for message in caplog.messages)
    assert sum(record.exc_info is not None for record in caplog.records) <= 10  # one a second


def test_the_address_of_a_new_incarnation_comes_with_the_next_answer() -> None:
    async def steps(client: Client) -> None:
        await client.ask()
        life = Incarnation(hex32(77))
        client.engine.ticket = replace(TICKET, incarnation=life)
        assert pair_of((await client.ask())[1]).incarnation == ENGINE_LIFE
        assert pair_of((await client.ask())[1]).incarnation == life

    run(steps)


def test_the_engine_hears_of_a_refused_request_that_was_answered_early() -> None:
    """Decode waits for it. Prefill alone may refuse it, by a shorter --max-model-len."""

    async def steps(client: Client) -> None:
        client.engine.status = 400
        await client.ask()  # not answered early
        client.engine.status = 200
        await client.ask()
        client.engine.status = 400
        _, answer = await client.ask()
        (params,) = client.withdrawn
        assert params == WANTED | {FIELD: answer["kv_transfer_params"][FIELD]}

    run(steps)


@pytest.mark.parametrize("change", ["a failure", "no ticket"])
def test_it_forgets_the_address_of_an_engine_that_offers_nothing(change: str) -> None:
    async def steps(client: Client) -> None:
        await client.ask()
        if change == "no ticket":  # it is draining
            client.engine.ticket = None
        else:
            client.engine.status = 400
        pair_of((await client.ask())[1])
        _, answer = await client.ask()
        if change == "no ticket":
            assert answer["choices"] == ["computed"]
        else:  # says nothing about other requests
            pair_of(answer)

    run(steps)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"max_tokens": 2}, id="more tokens"),
        pytest.param({"max_tokens": None}, id="as many tokens as fit"),
        pytest.param({"n": 2}, id="several answers"),
        pytest.param({"stream": True}, id="a stream"),
        pytest.param({"echo": True}, id="the prompt itself"),
        pytest.param({"logprobs": 0}, id="log probabilities"),
        pytest.param({"logprobs": 1}, id="more log probabilities"),
        pytest.param({"prompt_logprobs": 0}, id="log probabilities of the prompt"),
        pytest.param({"return_token_ids": True}, id="its token ids"),
        pytest.param({"min_tokens": 2}, id="at least two tokens"),
        pytest.param({"prompt": ["a", "b"]}, id="several prompts"),
        pytest.param({"prompt_embeds": ["AA=="]}, id="a prompt of embeddings beside the text"),
        pytest.param({"prompt": [[1, 2], [3]]}, id="several prompts of token ids"),
        pytest.param({"prompt": ""}, id="an empty prompt"),
        pytest.param({"prompt": None}, id="no prompt"),
        pytest.param({"prompt": 7}, id="a prompt of another type"),
        pytest.param({"kv_transfer_params": {**WANTED, FIELD: "9..AA"}}, id="a ticket of its own"),
        pytest.param({"kv_transfer_params": {"do_remote_decode": False}}, id="no decode engine"),
        pytest.param({"kv_transfer_params": None}, id="no kv_transfer_params"),
    ],
)
def test_other_requests_pass_unchanged(changed: dict[str, Any]) -> None:
    request = REQUEST | changed

    async def steps(client: Client) -> None:
        await client.ask()
        _, answer = await client.ask(request)
        assert answer["choices"] == ["computed"]
        assert client.engine.seen[-1] == request

    run(steps)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "zo", "kv_transfer_params": {"do_remote_decode": true}',
        b'[{"do_remote_decode": true}]',
        b'{"kv_transfer_params": {"do_remote_decode": true}, "prompt": "zo", "max_tokens": "\xff"}',
    ],
    ids=["cut", "a list", "not UTF-8"],
)
def test_what_is_no_request_is_left_to_vllm(body: bytes) -> None:
    async def steps(client: Client) -> None:
        await client.ask()
        _, answer = await client.ask(body)
        assert answer["choices"] == ["computed"]
        assert client.engine.read == body

    run(steps)


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt": [1, 2, 3]},
        {"n": 1, "logprobs": None, "min_tokens": 1, "temperature": 0.7, "seed": 3},
        {"max_tokens": None, "max_completion_tokens": 1},
    ],
    ids=["token ids", "options", "chat's name"],
)
def test_requests_that_can_be_answered_early(changed: dict[str, Any]) -> None:
    request = msgspec.json.encode(REQUEST | changed)
    assert may_answer_early(msgspec.json.decode(request, type=dict[str, msgspec.Raw]))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"data_parallel": 2}, "data_parallel_size is 2; allowed: 1"),
    ],
)
def test_some_engines_answer_as_usual(
    options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def steps(client: Client) -> None:
        for _ in range(2):
            _, answer = await client.ask()
            assert answer["choices"] == ["computed"]

    run(steps, **options)
    assert reason in caplog.text


def test_a_decode_engine_refuses_the_middleware() -> None:
    async def steps(client: Client) -> None:
        with pytest.raises(ConfigError, match="kv_role is 'kv_consumer'; allowed: 'kv_producer'"):
            await client.ask()

    run(steps, role="kv_consumer")
