"""Train a small gated delta net to follow links through a prompt, and write it as a model folder.

The task is that of the recall model (`lab.accuracy.recall.task`) with fewer links: a state has no
room for more. It takes a few minutes of one core. The folder also gets held-out prompts. It
prints how long it took, and of how many held-out answers all tokens are the likeliest.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from lab.accuracy.recall import folder as folders
from lab.accuracy.recall.heldout import mixed, write
from lab.accuracy.recall.task import (
    EOS,
    IGNORED,
    LONGEST,
    VOCABULARY_SIZE,
    Item,
    batch,
    links_in,
    prompts,
    vocabulary,
)
from lab.accuracy.recall_state.model import FAMILY, StateRecall

LENGTHS: Final = (60, 120, 200)
"""Tokens of held-out prompts."""
HELD_OUT: Final = 120
LEAST_ROWS: Final = 8
PROMOTION: Final = 0.95
GROWTH: Final = 1.04
SMOOTHING: Final = 0.9
DECAY: Final = 0.4
"""The last part of training, in which the rate falls to nothing."""
SAY_EVERY: Final = 25


@dataclass(frozen=True)
class Plan:
    """All that decides what comes out, but the machine."""

    steps: int = 800
    seed: int = 0
    tokens: int = LENGTHS[-1]
    batch_tokens: int = 2048
    rate: float = 3e-3
    warmup: int = 50


def train(plan: Plan) -> StateRecall:
    """Train from the seed; prompts grow while they are answered well. Prints as it goes."""
    torch.manual_seed(plan.seed)
    model, generator = StateRecall(), torch.Generator().manual_seed(plan.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    reach, smooth, begin = LONGEST + 1.0, 0.0, time.monotonic()
    for step in range(plan.steps):
        links = int(reach)
        for group in optimizer.param_groups:
            left = (plan.steps - step) / (DECAY * plan.steps)
            group["lr"] = plan.rate * min(1.0, (step + 1) / plan.warmup, left)
        drawn = batch(
            generator, max(LEAST_ROWS, plan.batch_tokens // (5 * links)), links, tokens=2 * links
        )
        logits = model(torch.cat([drawn.links, drawn.asked], 1))[:, drawn.links.shape[1] :]
        loss = functional.cross_entropy(
            logits.flatten(0, 1), drawn.targets.flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        accuracy = float(_right(logits, drawn.targets).float().mean())
        smooth = SMOOTHING * smooth + (1 - SMOOTHING) * accuracy
        if smooth > PROMOTION:
            reach = min(reach * GROWTH, links_in(plan.tokens))
        if step % SAY_EVERY == 0 or step == plan.steps - 1:
            seconds = time.monotonic() - begin
            print(f"{seconds:5.0f} s  step {step}  links {links}  {accuracy:.4f}", flush=True)
    return model


def _right(logits: Tensor, targets: Tensor) -> Tensor:
    """Of the tokens of answers."""
    return (logits.argmax(-1) == targets)[targets != IGNORED]


def share_right(model: StateRecall, items: list[Item]) -> float:
    """Of how many answers each token is the likeliest after the right ones before it."""
    numbers = {word: number for number, word in enumerate(vocabulary())}
    right = 0
    for item in items:
        prompt, answer = ([numbers[word] for word in text.split()] for text in item)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer]]))[0, len(prompt) - 1 :]
        right += logits.argmax(-1).tolist() == [*answer, EOS]
    return right / len(items)


def save(folder: Path, model: StateRecall) -> None:
    """Write weights, configuration and tokenizer."""
    config = FAMILY.config(VOCABULARY_SIZE)
    folders.write(folder, model.tensors(), config, FAMILY.max_positions)


def main() -> None:
    """Train, from the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/lab/run.sh lab.accuracy.recall_state.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--threads", type=int, default=1, help="of torch; default 1")
    for name, value in asdict(Plan()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(value), default=value, help=f"default {value}")
    options = vars(parser.parse_args())
    folder, threads = options.pop("out"), options.pop("threads")
    plan = Plan(**options)
    torch.set_num_threads(threads)
    begin, busy = time.monotonic(), time.process_time()
    model = train(plan)
    took = {
        "seconds": round(time.monotonic() - begin, 1),
        "cpu_seconds": round(time.process_time() - busy, 1),
    }
    save(folder, model)
    write(folder / "heldout.jsonl", mixed(HELD_OUT, 0, LENGTHS))
    right = {
        str(tokens): share_right(model, prompts(HELD_OUT, tokens=tokens, seed=1))
        for tokens in LENGTHS
    }
    result = {"plan": asdict(plan), "torch": torch.__version__, **took, "right": right}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
