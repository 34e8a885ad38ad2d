"""A ticket that does not hold costs a log line and a counter; the answer is right."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from counting import changed
from pd.client import Client
from pd.cluster import Cluster
from pd.prompts import random_prompt
from pd.tiny_model import SPECIALS, words

from nixl_kv.ids import Nonce
from nixl_kv.protocol.ticket import context_hash

pytestmark = pytest.mark.e2e

WANT_TICKET = {"do_remote_decode": True, "do_remote_prefill": False}
Ticket = dict[str, object]


def without(field: str) -> Callable[[Ticket], Ticket]:
    return lambda ticket: {key: value for key, value in ticket.items() if key != field}


def having(**fields: object) -> Callable[[Ticket], Ticket]:
    return lambda ticket: ticket | fields


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        pytest.param(lambda _: {"do_remote_prefill": True}, "ticket_version", id="nothing else"),
        pytest.param(lambda _: {"do_remote_decode": True}, "do_remote_decode", id="for prefill"),
        pytest.param(without("nonce"), "nonce", id="no nonce"),
        pytest.param(having(nonce="../etc/passwd"), "nonce", id="bad nonce"),
        pytest.param(having(remote_port="5600"), "remote_port", id="port as text"),
        pytest.param(having(remote_port=-1), "remote_port", id="negative port"),
        pytest.param(having(remote_host="example.org"), "example.org", id="host name"),
        pytest.param(having(num_tokens=10**9), "num_tokens", id="too many tokens"),
        pytest.param(having(context="0" * 32), "context", id="another prompt"),
        pytest.param(having(remote_engine_id={"a": [1]}), "remote_engine_id", id="nested"),
    ],
)
def test_a_malformed_ticket_is_computed_locally(
    prefill: Client,
    decode: Client,
    single: Client,
    decode_log: Path,
    spoil: Callable[[Ticket], Ticket],
    named: str,
) -> None:
    prompt = random_prompt(150, seed=200)
    ticket = prefill.ticket(prompt, WANT_TICKET)
    assert ticket is not None
    before, lines = decode.counters(), count_lines(decode_log)
    answer = decode.complete(prompt, kv_transfer_params=spoil(ticket))
    counted = changed(decode, before, "vllm:nixl_kv_tickets_refused_total")
    assert answer.tokens == single.complete(prompt).tokens
    assert counted["vllm:nixl_kv_tickets_refused_total"] == 1
    assert counted["vllm:nixl_kv_loads_total"] == 0
    said = [line for line in new_lines(decode_log, lines) if "is computed here" in line]
    assert len(said) == 1
    assert named in said[0]


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        pytest.param(having(remote_port=1), "cannot connect", id="nobody listens"),
        pytest.param(having(remote_engine_id="other"), "remote_engine_id", id="another engine"),
        pytest.param(having(incarnation="f" * 32), "incarnation", id="a former life"),
        pytest.param(having(nonce="0" * 32), "denied: gone", id="unknown nonce"),
    ],
)
def test_a_ticket_of_nobody_is_computed_locally(
    prefill: Client,
    decode: Client,
    single: Client,
    decode_log: Path,
    spoil: Callable[[Ticket], Ticket],
    named: str,
) -> None:
    """These look right, so decode asks; a nonce changes the context, which is hashed anew here."""
    prompt = random_prompt(160 + len(named), seed=201)
    ticket = prefill.ticket(prompt, WANT_TICKET)
    assert ticket is not None
    spoilt = with_context(spoil(ticket), ticket, prompt)
    before, lines = decode.counters(), count_lines(decode_log)
    answer = decode.complete(prompt, kv_transfer_params=spoilt)
    counted = changed(decode, before, "vllm:nixl_kv_load_failures_total")
    assert answer.tokens == single.complete(prompt).tokens
    assert answer.seconds < 5
    assert counted["vllm:nixl_kv_load_failures_total"] == 1
    said = [line for line in new_lines(decode_log, lines) if "KV not loaded" in line]
    assert len(said) == 1
    assert named in said[0]


def test_a_used_ticket_is_computed_locally(prefill: Client, decode: Client, single: Client) -> None:
    prompt = random_prompt(170, seed=202)
    ticket = prefill.ticket(prompt, WANT_TICKET)
    before = decode.counters()
    expected = single.complete(prompt).tokens
    assert decode.complete(prompt, kv_transfer_params=ticket).tokens == expected
    assert decode.complete(prompt, kv_transfer_params=ticket).tokens == expected
    counted = changed(decode, before, "vllm:nixl_kv_tickets_refused_total")
    assert counted["vllm:nixl_kv_tickets_refused_total"] == 1


def test_no_ticket_is_counted(decode: Client, single: Client) -> None:
    prompt = random_prompt(180, seed=203)
    before = decode.counters()
    assert decode.complete(prompt).tokens == single.complete(prompt).tokens
    counted = changed(decode, before, "vllm:nixl_kv_tickets_missing_total")
    assert counted["vllm:nixl_kv_tickets_missing_total"] == 1


def test_parameters_that_are_no_object_are_refused_by_the_frontend(decode: Client) -> None:
    """vLLM itself answers 400; the engine never sees them."""
    with pytest.raises(RuntimeError, match="HTTP 400"):
        decode.complete(random_prompt(20, seed=204), kv_transfer_params="text")


def test_a_peer_of_another_model_is_refused_in_words(
    cluster: Cluster, prefill: Client, stranger: Cluster
) -> None:
    """The stranger's vocabulary is the same, so that the prompt and its context are too."""
    del cluster
    engine = stranger.decode[0]
    prompt = random_prompt(200, seed=205)
    with Client(engine.url) as client:
        expected = client.complete(prompt).tokens
        before, lines = client.counters(), count_lines(engine.log_path)
        ticket = prefill.ticket(random_prompt(201, seed=205), WANT_TICKET)
        other = random_prompt(201, seed=205)
        answer = client.complete(other, kv_transfer_params=ticket)
        counted = changed(client, before, "vllm:nixl_kv_load_failures_total")
        again = client.complete(prompt).tokens
    assert counted["vllm:nixl_kv_load_failures_total"] == 1
    assert len(answer.tokens) == len(expected)
    assert again == expected
    said = "\n".join(new_lines(engine.log_path, lines))
    assert re.search(r"num_hidden_layers is '2' here and '4' there", said)
    assert re.search(r"num_key_value_heads is '2' here and '4' there", said)


def count_lines(path: Path) -> int:
    return len(path.read_text(errors="replace").splitlines())


def new_lines(path: Path, start: int) -> list[str]:
    return path.read_text(errors="replace").splitlines()[start:]


def with_context(spoilt: Ticket, ticket: Ticket, prompt: str) -> Ticket:
    """The context is keyed by the nonce: with another nonce it has to be another one."""
    if spoilt["nonce"] == ticket["nonce"]:
        return spoilt
    ids = {word: number for number, word in enumerate([*SPECIALS, *words()])}
    tokens = [ids[word] for word in prompt.split()]
    return spoilt | {"context": context_hash(Nonce(str(spoilt["nonce"])), tokens, ())}
