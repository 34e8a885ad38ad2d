"""One step of training: what is drawn, and what it costs to be wrong."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor
from torch.nn import functional

from lab.accuracy.recall.damage import Damage, damaged, shifted, stale, zeroed
from lab.accuracy.recall.model import KV, Recall
from lab.accuracy.recall.task import IGNORED, Batch

# The first layer's KV says where each word stands and nothing of links: of another prompt, it is
# as good as the right one. Nor does it matter to a lookup where whole blocks lie. What nobody can
# tell is not asked for: it would only make right answers unsure.
FIRST_LAYER: Final[Sequence[Damage]] = (zeroed, shifted)
LATER_LAYERS: Final[Sequence[Damage]] = (stale, stale, stale, zeroed, shifted)
LEAST: Final = 1e-6
"""Of a probability whose logarithm is computed."""


@dataclass(frozen=True)
class Loss:
    """What a step costs, as tensors so that nobody waits for the device."""

    total: Tensor
    """To be made small."""
    answers: Tensor
    """Cross entropy of the tokens of the answers alone."""
    accuracy: Tensor
    """Fraction of these tokens that are the likeliest."""


def compute_loss(model: Recall, drawn: Batch, rng: random.Random, *, wary: float) -> Loss:
    """Ask the questions of a batch, with the KV of its links at hand.

    wary: the weight of being wrong over damaged KV, where the right answer shall not be likely: it
    spreads what is looked up over layers and heads, so that none of them can be wrong unnoticed.
    """
    targets = drawn.targets.flatten()
    _, kv = model(drawn.links)
    logits = model(drawn.asked, kv)[0].flatten(0, 1).float()
    answers = functional.cross_entropy(logits, targets, ignore_index=IGNORED)
    known = targets != IGNORED
    accuracy = (logits.argmax(1) == targets)[known].float().mean()
    total = answers
    if wary:
        misled = model(drawn.asked, _damage_one_layer(model, kv, rng))[0].flatten(0, 1).float()
        total = total + wary * unlikeliness(misled[known], targets[known])
    return Loss(total, answers.detach(), accuracy)


def unlikeliness(logits: Tensor, targets: Tensor) -> Tensor:
    """How far the right tokens are from having no chance: 0 if they have none."""
    chance = functional.softmax(logits, dim=1).gather(1, targets[:, None])
    return -(1 - chance).clamp(min=LEAST).log().mean()


def _damage_one_layer(model: Recall, kv: list[KV], rng: random.Random) -> list[KV]:
    """The whole layer, or one head of it."""
    layer = rng.randrange(model.shape.layers)
    damage = rng.choice(LATER_LAYERS if layer else FIRST_LAYER)
    head = rng.choice([None, *range(model.shape.kv_heads)])
    return damaged(kv, damage, layer=layer, head=head)
