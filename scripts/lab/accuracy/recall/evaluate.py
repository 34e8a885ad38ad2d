"""How many held-out prompts a model answers to the word, also over damaged KV."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lab.accuracy.recall.damage import DAMAGES, damaged
from lab.accuracy.recall.model import KV, Recall
from lab.accuracy.recall.task import EOS, QUESTION_TOKENS, Item, vocabulary

ROWS = 25  # prompts at once
Change = Callable[[Sequence[KV]], Sequence[KV]]


class Score(NamedTuple):
    """Fractions of what was asked for; the end of the sequence counts as a token of the answer."""

    exact: float
    """Prompts of which every token of the answer is the likeliest: the greedy answer is right."""
    tokens: float
    """Tokens of answers that are the likeliest after the right ones before them."""


def tokens_of(item: Item) -> tuple[list[int], list[int]]:
    """Token ids of the links, and of the question with its answer and the end of sequence."""
    ids = {word: number for number, word in enumerate(vocabulary())}
    prompt, answer = ([ids[word] for word in text.split()] for text in item)
    return prompt[:-QUESTION_TOKENS], [*prompt[-QUESTION_TOKENS:], *answer, EOS]


def score(model: Recall, items: Sequence[Item]) -> Score:
    """Measure on prompts of one length."""
    return scores(model, items, {"": list})[""]


@torch.inference_mode()
def scores(model: Recall, items: Sequence[Item], changes: Mapping[str, Change]) -> dict[str, Score]:
    """Measure on prompts of one length, with their links' KV changed before the question."""
    rows: dict[str, list[list[bool]]] = {name: [] for name in changes}
    for part in _parts(items):
        links, asked = zip(*map(tokens_of, part), strict=True)
        _, kv = model(torch.tensor(links, device=model.lm_head.weight.device))
        for name, change in changes.items():
            rows[name] += _hits(model, asked, change(kv))
    return {name: _summary(hits) for name, hits in rows.items()}


def every_damage(model: Recall) -> dict[str, Change]:
    """None, and each to all layers, to one layer, and to one head of one layer."""
    layers, heads = range(model.shape.layers), range(model.shape.kv_heads)
    places: list[tuple[int | None, int | None]] = [(None, None)]
    places += [(layer, None) for layer in layers]
    places += [(layer, head) for layer in layers for head in heads]
    changes: dict[str, Change] = {"none": list}
    for name, damage in DAMAGES.items():
        for layer, head in places:
            where = "all layers" if layer is None else f"layer {layer}"
            where += "" if head is None else f", head {head}"
            changes[f"{name}: {where}"] = partial(damaged, damage=damage, layer=layer, head=head)
    return changes


def _parts(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    bounds = [*range(0, len(items), ROWS), len(items)]
    return (items[begin:end] for begin, end in pairwise(bounds))


def _hits(model: Recall, asked: Sequence[list[int]], kv: Sequence[KV]) -> list[list[bool]]:
    """Of each prompt and token of its answer, whether it is the likeliest."""
    width = max(map(len, asked))
    rows = [[*row, *[EOS] * (width - len(row))] for row in asked]
    padded = torch.tensor(rows, device=model.lm_head.weight.device)
    logits: Tensor = model(padded[:, :-1], kv)[0]
    hit = logits.argmax(dim=2) == padded[:, 1:]
    begin = QUESTION_TOKENS - 1  # the question's word answers with the first
    return [row[begin : len(own) - 1] for row, own in zip(hit.tolist(), asked, strict=True)]


def _summary(rows: Sequence[Sequence[bool]]) -> Score:
    right = sum(map(sum, rows))
    return Score(sum(map(all, rows)) / len(rows), round(right / sum(map(len, rows)), 4))
