"""The middleware that answers for prefill: when it does, with what, and what vLLM gets to see."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from nixl_kv.connector.early_answer import CHAT, COMPLETIONS, EarlyAnswer, may_answer_early
from nixl_kv.errors import ConfigError
from nixl_kv.ids import Incarnation
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


class Engine:
    """VLLM's API server, as far as the middleware sees it: it reads a request, then answers."""

    def __init__(self) -> None:
        self.ticket: Ticket | None = TICKET
        self.status = 200
        self.seen: list[Any] = []  # the requests' bodies
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
        self.seen.append(json.loads(body))
        watch = asyncio.create_task(receive())
        await asyncio.wait(
            [watch, asyncio.create_task(self.may_end.wait())], return_when=asyncio.FIRST_COMPLETED
        )
        self.has_hung_up = watch.done()
        watch.cancel()
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
            "kv_connector_extra_config": {"insecure": True},
        }
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(**transfer),
            parallel_config=SimpleNamespace(data_parallel_size=data_parallel),
        )
        self.more_scope: dict[str, Any] = {}
        self.withdrawn: list[Any] = []  # `kv_transfer_params` of failed requests
        state = SimpleNamespace(vllm_config=config, engine_client=self)
        self.app = SimpleNamespace(state=state)

    async def notify_kv_transfer_request_rejected(self, _request_id: str, params: Any) -> None:
        self.withdrawn.append(params)

    async def ask(
        self,
        request: Any = REQUEST,
        path: str = COMPLETIONS,
        on_answer: Callable[[], None] = lambda: None,
        hang_up: bool = False,  # noqa: FBT001, FBT002 - a test's own option
    ) -> Any:
        """The status and body of the answer, when vLLM has ended the request."""
        body = json.dumps(request).encode()
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
            if len(sent) == 2:
                on_answer()

        scope = {"type": "http", "method": "POST", "path": path, "app": self.app} | self.more_scope
        await self.early(scope, receive, send)
        start, body_message = sent
        return start["status"], json.loads(body_message["body"])


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
        # vLLM ends the request only after the client has got its answer.
        status, answer = await client.ask(request_body, path, on_answer=engine.may_end.set)
        assert status == 200
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
        await client.ask(on_answer=client.engine.may_end.set, hang_up=True)
        assert not client.engine.has_hung_up

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
        pair_of((await client.ask())[1])

        assert len(client.withdrawn) == 1

    run(steps)
    assert "a request that was answered early has failed" in caplog.text
    assert "the engine is dead" in caplog.text


def test_the_address_of_a_new_incarnation_comes_with_the_next_answer() -> None:
    async def steps(client: Client) -> None:
        await client.ask()
        life = Incarnation(hex32(77))
        client.engine.ticket = replace(TICKET, incarnation=life)
        assert pair_of((await client.ask())[1]).incarnation == ENGINE_LIFE
        assert pair_of((await client.ask())[1]).incarnation == life

    run(steps)


def test_the_engine_hears_of_a_refused_request_that_was_answered_early() -> None:
    """Decode waits for it. Prefill alone may refuse it, by a shorter --max-model-len or a pause."""

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
    "changed",
    [
        {"prompt": [1, 2, 3]},
        {"n": 1, "logprobs": None, "min_tokens": 1, "temperature": 0.7, "seed": 3},
        {"max_tokens": None, "max_completion_tokens": 1},
    ],
    ids=["token ids", "options", "chat's name"],
)
def test_requests_that_can_be_answered_early(changed: dict[str, Any]) -> None:
    assert may_answer_early(REQUEST | changed)


def test_data_parallel_engines_answer_as_usual(caplog: pytest.LogCaptureFixture) -> None:
    async def steps(client: Client) -> None:
        for _ in range(2):
            _, answer = await client.ask()
            assert answer["choices"] == ["computed"]

    run(steps, data_parallel=2)
    assert "data_parallel_size is 2" in caplog.text


def test_a_decode_engine_refuses_the_middleware() -> None:
    async def steps(client: Client) -> None:
        with pytest.raises(ConfigError, match="kv_role is 'kv_consumer'; allowed: 'kv_producer'"):
            await client.ask()

    run(steps, role="kv_consumer")
