"""What clients may write into a request's kv_transfer_params, and what they may do with it."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpx

from harness.cluster.client import RefusedError, Ticket
from harness.cluster.metrics import wait_until_free
from harness.cluster.tickets import changed, values
from suites.hostile.victims import (
    HELD_S,
    NUM_BLOCKS,
    TIMEOUT_S,
    EngineGoneError,
    Tally,
    Victims,
)

LATE: Final = 5
"""Tickets."""
MARGIN_S: Final = 3
ELSEWHERE: Final = "127.0.0.2"
BIG_BYTES: Final = 10 << 20
DEPTHS: Final = (100, 10_000)
DISCONNECTS: Final = 20
MOST_HUNG: Final = 1
"""Of the requests of one case: the others would hang as well."""
BAD_VALUES: Final = (  # as JSON
    "-1", "9223372036854775808", "1e308", '""', f'"{"x" * 300}"', "null", "true", "[]", "[[[[]]]]",
    '{"a": {"b": [1]}}',
)  # fmt: skip


def several_prompts(victims: Victims, tally: Tally) -> None:
    """One ticket comes with a list of prompts, of which it belongs to the first."""
    for lengths in ((150, 150, 150), (150, 600)):
        prompts = [victims.prompt(length) for length in lengths]
        victims.ask_all(tally, prompts, kv_transfer_params=victims.ticket(prompts[0]))


def short_blocks(victims: Victims, tally: Tally) -> None:
    """Fewer blocks than the prompt needs; where a ticket names none, fewer tokens."""
    prompt = victims.prompt(500)
    ticket = victims.ticket(prompt)
    if values(ticket):
        ticket = changed(ticket, num_tokens=100)
    else:
        ticket["remote_block_ids"] = [group[:1] for group in ticket["remote_block_ids"]]
    victims.ask(tally, prompt, ticket)


def used_ticket(victims: Victims, tally: Tally) -> None:
    """A ticket that was read comes again, with its own prompt and with others."""
    prompt = victims.prompt()
    ticket = victims.ticket(prompt)
    for again in (prompt, prompt, victims.prompt(), victims.prompt()):
        victims.ask(tally, again, ticket)


def others_ticket(victims: Victims, tally: Tally) -> None:
    """A ticket that nobody has read comes with another prompt of the same length."""
    victims.ask(tally, victims.prompt(), victims.ticket(victims.prompt()))


def lone_flag(victims: Victims, tally: Tally) -> None:
    """do_remote_prefill and nothing else."""
    victims.ask(tally, victims.prompt(), {"do_remote_prefill": True})


def no_engine(victims: Victims, tally: Tally) -> None:
    """Everything but the engine's id; the client does not wait for ever."""
    prompt = victims.prompt()
    ticket = victims.ticket(prompt)
    ticket.pop("remote_engine_id")
    victims.ask(tally, prompt, ticket)


def late_tickets(victims: Victims, tally: Tally) -> None:
    """Tickets come after prefill has given their blocks to other prompts; then without them."""
    prompts = [victims.prompt(300) for _ in range(LATE)]
    tickets = [victims.ticket(prompt) for prompt in prompts]
    time.sleep(HELD_S + MARGIN_S)
    for _ in range(10):
        victims.pair.to_prefill.complete(victims.prompt(500), 1)
    late, plain = Tally(), Tally()
    try:
        for prompt, ticket in zip(prompts, tickets, strict=True):
            victims.ask(late, prompt, ticket)
        for prompt in prompts:
            victims.ask(plain, prompt)
    finally:
        tally.counts += late.counts + plain.counts
        tally.notes += [f"late: {late}; the same prompts without a ticket: {plain}"]


def bad_fields(victims: Victims, tally: Tally) -> None:
    """Each field of a ticket, and what is in its string, with some values that it cannot have."""
    like = victims.ticket(victims.prompt())
    for name in (*like, *values(like)):
        for value in BAD_VALUES:
            if tally.counts["hung"] >= MOST_HUNG:
                tally.notes.append(f"stopped after {name}")
                return
            prompt = victims.prompt()
            try:
                victims.ask(
                    tally, prompt, changed(victims.ticket(prompt), **{name: json.loads(value)})
                )
            except EngineGoneError:
                tally.notes.append(f"{name} was {value[:20]}")
                raise


def large_tickets(victims: Victims, tally: Tally) -> None:
    """A field of 10 MB, and fields that are nested deeply."""
    prompt = victims.prompt()
    victims.ask(tally, prompt, victims.ticket(prompt) | {"padding": "x" * BIG_BYTES})
    for depth in DEPTHS:
        nested = "[" * depth + "]" * depth
        prompt = victims.prompt()
        params = json.dumps(victims.ticket(prompt))[:-1] + f', "x": {nested}}}'
        _post_raw(victims, tally, prompt, params=params)


def _post_raw(victims: Victims, tally: Tally, prompt: str, *, params: str) -> None:
    """A body that no JSON library would write."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    content = json.dumps(body)[:-1] + f', "kv_transfer_params": {params}}}'
    with victims.noted(tally):
        reply = httpx.post(
            f"{victims.pair.decode.url}/v1/completions",
            content=content,
            headers={"Content-Type": "application/json"},
            timeout=TIMEOUT_S,
            trust_env=False,
        )
        if reply.is_error:
            raise RefusedError(reply)
        text = reply.json()["choices"][0]["text"]
        right = text == victims.pair.to_prefill.complete(prompt, 4).text
        tally.counts["right" if right else "wrong"] += 1


def foreign_host(victims: Victims, tally: Tally) -> None:
    """A ticket names an address where somebody else listens."""
    prompt = victims.prompt()
    ticket = victims.ticket(prompt)
    with _listening(ELSEWHERE) as (port, visitors):
        elsewhere: Ticket = {"remote_host": ELSEWHERE, "remote_port": port}
        victims.ask(tally, prompt, changed(ticket, **elsewhere, remote_engine_id="somebody"))
        prompt = victims.prompt()
        victims.ask(tally, prompt, changed(victims.ticket(prompt), **elsewhere))
    tally.notes.append(f"{len(visitors)} connections to the foreign address")


@contextmanager
def _listening(host: str) -> Iterator[tuple[int, list[Any]]]:
    """A listener that says nothing; yields its port and who visited."""
    with socket.create_server((host, 0)) as server:
        visitors: list[Any] = []

        def accept() -> None:
            try:
                while True:
                    visitors.append(server.accept())
            except OSError:
                return  # closed

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1], visitors
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection, _ in visitors:
                connection.close()


def disconnects(victims: Victims, tally: Tally) -> None:
    """Clients hang up in the middle, again and again; prefill's blocks must be free soon."""
    for number in range(DISCONNECTS):
        prompt = victims.prompt(400)
        params = victims.ticket(prompt)
        after_s = 0.01 + 0.02 * (number % 8)
        extra = {"kv_transfer_params": params, "max_tokens": 400}
        victims.pair.to_decode.disconnect_early(prompt, after_s, **extra)
    begin = time.monotonic()
    source = victims.pair.to_prefill
    freed = not wait_until_free(source, NUM_BLOCKS, HELD_S * 3)
    words = f"free after {time.monotonic() - begin:.0f} s" if freed else "NEVER free"
    tally.notes.append(f"prefill's blocks {words}")
    tally.counts["right" if freed else "wrong"] += 1


def several_answers(victims: Victims, tally: Tally) -> None:
    """n=3 and beam search: one request becomes several, all with the same ticket."""
    # vLLM refuses several greedy answers; of one word to choose from there is no other.
    sampled = {"n": 3, "temperature": 1, "top_k": 1}
    beams = {"n": 3, "use_beam_search": True}
    for extra in (sampled, beams):
        prompt = victims.prompt()
        ticket = victims.ticket(prompt)
        victims.ask_all(tally, prompt, kv_transfer_params=ticket, logprobs=None, **extra)
