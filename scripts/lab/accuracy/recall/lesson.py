"""One step of training: what is drawn, and what it costs to be wrong."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor
from torch.nn import functional

from recall.damage import Damage, damaged, shifted, stale, zeroed
from recall.model import KV, Recall
from recall.task import IGNORED, Batch

# The first layer's KV says where each word stands and nothing of links: of another prompt, it is
# as good as the right one. Nor does it matter to a lookup where whole blocks lie. What nobody can
# tell is not asked for: it would only make right answers unsure.
FIRST_LAYER: Final[Sequence[Damage]] = (zeroed, shifted)
LATER_LAYERS: Final[Sequence[Damage]] = (stale, stale, stale, zeroed, shifted)
LEAST = 1e-6  # of a probability whose logarithm is taken


@dataclass(frozen=True)
class Outcome:
    """What a step found, as tensors so that nobody waits for the device."""

    loss: Tensor
    """To be made small."""
    answer_loss: Tensor
    """Cross entropy of the tokens of the answers alone."""
    accuracy: Tensor
    """Fraction of these tokens that are the likeliest."""


def outcome(model: Recall, drawn: Batch, dice: random.Random, *, wary: float) -> Outcome:
    """Ask the questions of a batch, with the KV of its links at hand.

    wary: the weight of being wrong over damaged KV, where the right answer shall not be likely: it
    spreads what is looked up over layers and heads, so that none of them can be wrong unnoticed.
    """
    targets = drawn.targets.flatten()
    _, kv = model(drawn.links)
    logits = model(drawn.asked, kv)[0].flatten(0, 1).float()
    answer_loss = functional.cross_entropy(logits, targets, ignore_index=IGNORED)
    known = targets != IGNORED
    accuracy = (logits.argmax(1) == targets)[known].float().mean()
    loss = answer_loss
    if wary:
        misled = model(drawn.asked, _misleading(model, kv, dice))[0].flatten(0, 1).float()
        loss = loss + wary * _unlikeliness(misled[known], targets[known])
    return Outcome(loss, answer_loss.detach(), accuracy)


def _misleading(model: Recall, kv: list[KV], dice: random.Random) -> list[KV]:
    """Damage one layer, whole or in one head."""
    layer = dice.randrange(model.shape.layers)
    damage = dice.choice(LATER_LAYERS if layer else FIRST_LAYER)
    head = dice.choice([None, *range(model.shape.kv_heads)])
    return damaged(kv, damage, layer=layer, head=head)


def _unlikeliness(logits: Tensor, targets: Tensor) -> Tensor:
    """How far the right tokens are from having no chance: 0 if they have none."""
    chance = functional.softmax(logits, dim=1).gather(1, targets[:, None])
    return -(1 - chance).clamp(min=LEAST).log().mean()
