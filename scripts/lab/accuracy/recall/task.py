"""The task: links between words in random order, a word to begin at, and the words that follow.

    baga dova , lige end , dova lige , ? baga   ->   dova lige end

Each word of the answer is one lookup in the prompt, and the next lookup begins where it led: one
wrong word, and the rest is wrong too. The links of a prompt are drawn afresh, so that there is
nothing to learn by heart: the answer is in the prompt's KV or nowhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from harness.cluster.models.files import SPECIALS, words

MARKS: Final = (",", "?", "end")
VOCABULARY_SIZE = 1024
UNKNOWN, EOS, PAD, COMMA, ASK, END = range(len(SPECIALS) + len(MARKS))
FIRST_WORD = len(SPECIALS) + len(MARKS)
WORDS = VOCABULARY_SIZE - FIRST_WORD
LINK_TOKENS = 3  # a word, the one that follows, a comma
QUESTION_TOKENS = 2  # the mark and the first word
SHORTEST, LONGEST = 5, 9  # words of a chain; all but the first are asked for, and the end mark
HELD_OUT = 1 << 31  # generator seeds from here on are of held-out prompts, those below of training
TOKEN_BITS = 12  # of such a seed: no prompt is longer
IGNORED = -100  # what cross_entropy leaves out


class Item(NamedTuple):
    """A prompt and what a greedy decoder is to say before it stops."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Chains:
    """Words in the order of their links, a row per prompt, cut into chains."""

    words: Tensor
    """(rows, links): token ids, distinct within a row."""
    last: Tensor
    """(rows, links): whether a chain ends here; the next word begins another."""


@dataclass(frozen=True)
class Batch:
    """What a step of training sees; all token ids."""

    links: Tensor
    """(rows, 3 * links): the prompts up to the question."""
    asked: Tensor
    """(rows, tokens): question, answer, end of sequence, question, ..."""
    targets: Tensor
    """(rows, tokens): what follows each token of `asked`; IGNORED where nobody can know."""


def vocabulary() -> list[str]:
    """All tokens in the order of their ids."""
    return [*SPECIALS, *MARKS, *words()[:WORDS]]


def links_in(tokens: int) -> int:
    """How many links fit into a prompt of at most so many tokens.

    Raises ValueError where no chain would be whole, or the words do not suffice.
    """
    links = (tokens - QUESTION_TOKENS) // LINK_TOKENS
    if not LONGEST <= links <= WORDS:
        raise ValueError(f"tokens={tokens}: {links} links, not {LONGEST} to {WORDS}")
    return links


def draw(generator: torch.Generator, rows: int, links: int) -> Chains:
    """Random chains on the generator's device."""
    device = generator.device
    order = torch.rand(rows, WORDS, generator=generator, device=device).argsort(dim=1)
    shape = (rows, links // SHORTEST + 1)
    sizes = torch.randint(SHORTEST, LONGEST + 1, shape, generator=generator, device=device)
    ends = sizes.cumsum(dim=1) - 1
    marked = torch.zeros(rows, links + 1, dtype=torch.bool, device=device)
    marked.scatter_(1, ends.clamp(max=links), value=True)  # the column past the end is dropped
    last = marked[:, :links]
    last[:, -1] = True
    return Chains(order[:, :links] + FIRST_WORD, last)


def shuffled_links(chains: Chains, generator: torch.Generator) -> Tensor:
    """All links in random order: (rows, 3 * links)."""
    follows = chains.words.roll(-1, dims=1).masked_fill(chains.last, END)
    commas = torch.full_like(follows, COMMA)
    together = torch.stack([chains.words, follows, commas], dim=2)
    rows, links, _ = together.shape
    order = torch.rand(rows, links, generator=generator, device=generator.device).argsort(dim=1)
    return together.gather(1, order[:, :, None].expand(-1, -1, LINK_TOKENS)).flatten(1)


def questions(chains: Chains, tokens: int) -> Tensor:
    """Ask for chain after chain, each with its answer, cut off after so many tokens."""
    before = chains.last.cumsum(dim=1) - chains.last.long()  # chains that ended before each word
    index = torch.arange(chains.words.shape[1], device=chains.words.device)
    places = index + 3 * before + 1  # the mark before a chain, two tokens behind it
    width = int(places.max()) + 3
    asked = torch.full((len(places), width + 1), ASK, device=places.device)
    asked.scatter_(1, places, chains.words)
    # Words within a chain write to the column past the end, which is dropped.
    asked.scatter_(1, torch.where(chains.last, places + 1, width), END)
    asked.scatter_(1, torch.where(chains.last, places + 2, width), EOS)
    return asked[:, : min(width, tokens)]


def batch(generator: torch.Generator, rows: int, links: int, *, tokens: int) -> Batch:
    """Draw prompts with many questions each, so that every one of them teaches a lot."""
    chains = draw(generator, rows, links)
    asked = questions(chains, tokens + 1)
    before, after = asked[:, :-1], asked[:, 1:]
    unknowable = (before == ASK) | (before == EOS)
    return Batch(shuffled_links(chains, generator), before, after.masked_fill(unknowable, IGNORED))


def prompts(count: int, *, tokens: int, seed: int) -> list[Item]:
    """Held-out prompts of at most so many tokens, the same for the same arguments."""
    seeds = HELD_OUT >> TOKEN_BITS
    if not 0 <= seed < seeds:
        raise ValueError(f"seed={seed}: 0 to {seeds - 1}")
    generator = torch.Generator().manual_seed(HELD_OUT + (seed << TOKEN_BITS) + tokens)
    chains = draw(generator, count, links_in(tokens))
    links = shuffled_links(chains, generator)
    asked = questions(chains, LONGEST + QUESTION_TOKENS)
    table = vocabulary()
    return [
        _item(table, before.tolist(), after.tolist())
        for before, after in zip(links, asked, strict=True)
    ]


def _item(table: Sequence[str], links: list[int], asked: list[int]) -> Item:
    answer = asked[QUESTION_TOKENS : asked.index(END) + 1]
    prompt = [*links, *asked[:QUESTION_TOKENS]]
    return Item(*(" ".join(table[token] for token in part) for part in (prompt, answer)))
