"""Tickets that come late, and caches that are full."""

from functools import partial
from typing import Final

from pd.client import Answer
from pd.faults_asking import ask
from pd.faults_deck import LONG, TALK, Question
from pd.faults_pair import Clients
from pd.faults_processes import Early
from pd.faults_scene import Fault, Scene
from pd.waiting import wait_until

UNCLAIMED: Final = "vllm:nixl_kv_offers_unclaimed_total"
PREEMPTIONS: Final = "vllm:num_preemptions_total"
QUEUED: Final = "vllm:num_requests_waiting"
LATE: Final = 3
FILLING: Final = 8  # of 12 blocks each, more than a cache of 80 has
TALKERS: Final = 12  # of 3 blocks each, which grow to 6
TICKETS: Final = 5
GENERATING: Final = 16  # likewise, which is more than there are


def late_ticket(scene: Scene) -> None:
    """Offers run out, prefill uses the blocks for others, then decode gets the tickets."""
    source, target = scene.clients.source, scene.clients.target
    unclaimed = source.counters().get(UNCLAIMED, 0.0)
    questions = scene.deck.draw(LONG, LATE)
    late = [Early(question, source.offer(question)) for question in questions]
    scene.expect_soon(
        lambda: source.counters().get(UNCLAIMED, 0.0) >= unclaimed + LATE, "no offer ran out"
    )
    for question in scene.deck.draw(LONG, FILLING):
        scene.crowd.send(question, partial(source.complete, question.prompt, question.tokens))
    scene.collect()
    for request in late:
        request.send(scene)
    scene.collect()
    for question in questions:
        scene.ended.append(
            ask(question, partial(target.complete, question.prompt, question.tokens))
        )


def preempted_prefill(scene: Scene) -> None:
    """Prefill's cache runs out under prompts that it goes on to generate from, for a while."""
    clients = scene.clients
    before = clients.source.counters()[PREEMPTIONS]
    for question in scene.deck.draw(TALK, GENERATING):
        scene.crowd.send(question, partial(generate_and_decode, clients, question))
    scene.collect()
    preempted = clients.source.counters()[PREEMPTIONS] - before
    scene.expect(preempted > 0, "prefill preempted nothing")


def generate_and_decode(clients: Clients, question: Question) -> Answer:
    """Both engines generate all of it; what prefill generates lets its cache run out."""
    return clients.decoded(question, clients.source.offer(question, question.tokens))


def crowded_decode(scene: Scene) -> None:
    """Decode's cache is full of long generations, and tickets wait longer than an offer lasts."""
    source, target = scene.clients.source, scene.clients.target
    for question in scene.deck.draw(TALK, TALKERS):
        scene.crowd.send(question, partial(target.complete, question.prompt, question.tokens))
    early = [Early(q, source.offer(q)) for q in scene.deck.draw(LONG, TICKETS)]
    for request in early:
        request.send(scene)
    scene.expect(
        wait_until(lambda: target.counters()[QUEUED] > 0, 5.0), "no ticket waited on decode"
    )
    scene.collect()


TICKET_FAULTS: Final = (
    Fault("late-ticket", "local", late_ticket),
    Fault("preempted-prefill", "local", preempted_prefill, deadline_s=60.0),
    Fault("crowded-decode", "local", crowded_decode, deadline_s=60.0),
)
