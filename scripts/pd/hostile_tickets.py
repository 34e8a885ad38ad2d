"""What clients may write into a request's kv_transfer_params, and what they may do with it."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpx

from pd.hostile_pair import HELD_S, TIMEOUT_S, EngineGoneError, Pair, Tally, Ticket
from pd.waiting import wait_until

LATE = 5  # tickets
MARGIN_S = 3
ELSEWHERE = "127.0.0.2"
BIG_BYTES = 10 << 20
DEPTHS: Final = (100, 10_000)
DISCONNECTS = 20
MOST_HUNG = 1  # of the requests of one case: the others would hang as well
BAD_VALUES: Final = (  # as JSON
    "-1", "9223372036854775808", "1e308", '""', f'"{"x" * 300}"', "null", "true", "[]", "[[[[]]]]",
    '{"a": {"b": [1]}}',
)  # fmt: skip


def several_prompts(pair: Pair, tally: Tally) -> None:
    """One ticket comes with a list of prompts, of which it belongs to the first."""
    for lengths in ((150, 150, 150), (150, 600)):
        prompts = [pair.prompt(length) for length in lengths]
        pair.ask_all(tally, prompts, kv_transfer_params=pair.ticket(prompts[0]))


def short_blocks(pair: Pair, tally: Tally) -> None:
    """Fewer blocks than the prompt needs; where a ticket names none, fewer tokens."""
    prompt = pair.prompt(500)
    ticket = pair.ticket(prompt)
    if "remote_block_ids" in ticket:
        ticket["remote_block_ids"] = [group[:1] for group in ticket["remote_block_ids"]]
    else:
        ticket["num_tokens"] = 100
    pair.ask(tally, prompt, ticket)


def used_ticket(pair: Pair, tally: Tally) -> None:
    """A ticket that was read comes again, with its own prompt and with others."""
    prompt = pair.prompt()
    ticket = pair.ticket(prompt)
    for again in (prompt, prompt, pair.prompt(), pair.prompt()):
        pair.ask(tally, again, ticket)


def others_ticket(pair: Pair, tally: Tally) -> None:
    """A ticket that nobody has read comes with another prompt of the same length."""
    pair.ask(tally, pair.prompt(), pair.ticket(pair.prompt()))


def lone_flag(pair: Pair, tally: Tally) -> None:
    """do_remote_prefill and nothing else."""
    pair.ask(tally, pair.prompt(), {"do_remote_prefill": True})


def no_engine(pair: Pair, tally: Tally) -> None:
    """Everything but the engine's id; the client does not wait for ever."""
    prompt = pair.prompt()
    ticket = pair.ticket(prompt)
    ticket.pop("remote_engine_id")
    pair.ask(tally, prompt, ticket)


def late_tickets(pair: Pair, tally: Tally) -> None:
    """Tickets come after prefill has given their blocks to other prompts; then without them."""
    prompts = [pair.prompt(300) for _ in range(LATE)]
    tickets = [pair.ticket(prompt) for prompt in prompts]
    time.sleep(HELD_S + MARGIN_S)
    for _ in range(10):
        pair.source.complete(pair.prompt(500), 1)
    late, plain = Tally(), Tally()
    try:
        for prompt, ticket in zip(prompts, tickets, strict=True):
            pair.ask(late, prompt, ticket)
        for prompt in prompts:
            pair.ask(plain, prompt)
    finally:
        tally.counts += late.counts + plain.counts
        tally.notes += [f"late: {late}; the same prompts without a ticket: {plain}"]


def bad_fields(pair: Pair, tally: Tally) -> None:
    """Each field of a ticket with each of some values that it cannot have."""
    for name in pair.ticket(pair.prompt()):
        for value in BAD_VALUES:
            if tally.counts["hung"] >= MOST_HUNG:
                tally.notes.append(f"stopped after {name}")
                return
            prompt = pair.prompt()
            try:
                pair.ask(tally, prompt, pair.ticket(prompt) | {name: json.loads(value)})
            except EngineGoneError:
                tally.notes.append(f"{name} was {value[:20]}")
                raise


def large_tickets(pair: Pair, tally: Tally) -> None:
    """A field of 10 MB, and fields that are nested deeply."""
    prompt = pair.prompt()
    pair.ask(tally, prompt, pair.ticket(prompt) | {"padding": "x" * BIG_BYTES})
    for depth in DEPTHS:
        nested = "[" * depth + "]" * depth
        prompt = pair.prompt()
        params = json.dumps(pair.ticket(prompt))[:-1] + f', "x": {nested}}}'
        _post_raw(pair, tally, prompt, params=params)


def _post_raw(pair: Pair, tally: Tally, prompt: str, *, params: str) -> None:
    """A body that no JSON library would write."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    text = json.dumps(body)[:-1] + f', "kv_transfer_params": {params}}}'
    with pair.noted(tally):
        reply = httpx.post(
            f"{pair.decode.url}/v1/completions",
            content=text,
            headers={"Content-Type": "application/json"},
            timeout=TIMEOUT_S,
            trust_env=False,
        )
        if reply.is_error:
            raise RuntimeError(f"HTTP {reply.status_code}")
        got = reply.json()["choices"][0]["text"]
        right = got == pair.source.complete(prompt, 4).text
        tally.counts["right" if right else "wrong"] += 1


def foreign_host(pair: Pair, tally: Tally) -> None:
    """A ticket names an address where somebody else listens."""
    prompt = pair.prompt()
    ticket = pair.ticket(prompt)
    with _listening(ELSEWHERE) as (port, came):
        elsewhere: Ticket = {"remote_host": ELSEWHERE, "remote_port": port}
        pair.ask(tally, prompt, ticket | elsewhere | {"remote_engine_id": "somebody"})
        prompt = pair.prompt()
        pair.ask(tally, prompt, pair.ticket(prompt) | elsewhere)
    tally.notes.append(f"{len(came)} connections to the foreign address")


@contextmanager
def _listening(host: str) -> Iterator[tuple[int, list[Any]]]:
    """A listener that says nothing; yields its port and who came."""
    with socket.create_server((host, 0)) as server:
        came: list[Any] = []

        def accept() -> None:
            try:
                while True:
                    came.append(server.accept())
            except OSError:
                return  # closed

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1], came
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection, _ in came:
                connection.close()


def disconnects(pair: Pair, tally: Tally) -> None:
    """Clients hang up in the middle, again and again; prefill's blocks must be free soon."""
    for number in range(DISCONNECTS):
        prompt = pair.prompt(400)
        params = pair.ticket(prompt)
        after_s = 0.01 + 0.02 * (number % 8)
        extra = {"kv_transfer_params": params, "max_tokens": 400}
        pair.target.disconnect_early(prompt, after_s, **extra)
    begin = time.monotonic()
    freed = wait_until(lambda: _all_free(pair), HELD_S * 3)
    told = f"free after {time.monotonic() - begin:.0f} s" if freed else "NEVER free"
    tally.notes.append(f"prefill's blocks {told}")
    tally.counts["right" if freed else "wrong"] += 1


def _all_free(pair: Pair) -> bool:
    """Whether prefill's cache holds nothing; the gauge moves with its steps alone."""
    pair.source.complete(pair.prompt(5), 1)
    return pair.source.counters()["vllm:kv_cache_usage_perc"] == 0


def several_answers(pair: Pair, tally: Tally) -> None:
    """n=3 and beam search: one request becomes several, all with the same ticket."""
    # vLLM refuses several greedy answers; of one word to choose from there is no other.
    sampled = {"n": 3, "temperature": 1, "top_k": 1}
    beams = {"n": 3, "use_beam_search": True}
    for extra in (sampled, beams):
        prompt = pair.prompt()
        ticket = pair.ticket(prompt)
        pair.ask_all(tally, prompt, kv_transfer_params=ticket, logprobs=None, **extra)
