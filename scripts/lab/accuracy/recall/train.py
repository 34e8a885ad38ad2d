"""Train a small Qwen3 to follow links through a prompt, and write it as a model folder.

It prints what it ran on, how long it took, and the scores on held-out prompts.
"""

import argparse
import json
import platform
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from lab.accuracy.recall.evaluate import Score, every_damage, score, scores
from lab.accuracy.recall.folder import load, save
from lab.accuracy.recall.heldout import LENGTHS
from lab.accuracy.recall.loss import compute_loss
from lab.accuracy.recall.model import Recall, Shape
from lab.accuracy.recall.task import HELD_OUT, LONGEST, batch, links_in, prompts

ROWS = 512  # of a batch at most
DECAY = 0.4  # the last part of training, in which the rate falls to nothing
PROMOTION = 0.95  # accuracy at which prompts grow
GROWTH = 1.04
SMOOTHING = 0.9
SAY_EVERY = 50
DAMAGED = 100  # prompts, at most, that are answered over damaged KV
DTYPES: Final = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Plan:
    """All that decides what comes out, but the machine."""

    steps: int = 2500
    seed: int = 0
    layers: int = 2
    tokens: int = 1500  # of the longest prompt
    batch_tokens: int = 32768
    asked: int = 256  # tokens of questions and answers behind a prompt, at most
    rate: float = 1e-3
    warmup: int = 200
    wary: float = 0.5  # weight of being unsure over damaged KV, see loss.compute_loss

    def __post_init__(self) -> None:
        """Refuse a seed that would draw what is held out."""
        if not 0 <= self.seed < HELD_OUT:
            raise ValueError(f"seed={self.seed}: 0 to {HELD_OUT - 1}")


class Point(NamedTuple):
    """One step of training."""

    step: int
    links: int
    loss: float
    accuracy: float
    lr: float


class Course:
    """The length of prompts, which grows while they are answered well."""

    def __init__(self, plan: Plan) -> None:
        """Begins with the shortest."""
        self.longest = links_in(plan.tokens)
        self.reach = min(2.0 * LONGEST, self.longest)
        self._smooth = 0.0
        self._rng = random.Random(plan.seed)  # noqa: S311

    def links(self) -> int:
        """How many links the next prompts have: half of the time as many as allowed now."""
        top = int(self.reach)
        fewer = int(LONGEST * (top / LONGEST) ** self._rng.random())
        return self._rng.choice([top, fewer])

    def adapt(self, accuracy: float) -> None:
        """To the accuracy of one more step."""
        self._smooth = SMOOTHING * self._smooth + (1 - SMOOTHING) * accuracy
        if self._smooth > PROMOTION:
            self.reach = min(self.reach * GROWTH, self.longest)


def train(plan: Plan, device: str) -> tuple[Recall, list[Point]]:
    """Train from the seed; prints as it goes."""
    torch.manual_seed(plan.seed)
    model = Recall(Shape(layers=plan.layers)).to(device)
    generator = torch.Generator(device).manual_seed(plan.seed)
    course, rng = Course(plan), random.Random(plan.seed + 1)  # noqa: S311
    optimizer = torch.optim.AdamW(_groups(model), lr=plan.rate, betas=(0.9, 0.98))
    points: list[Point] = []
    begin = time.monotonic()
    for step in range(plan.steps):
        links = course.links()
        rate = plan.rate * _pace(plan, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = min(ROWS, plan.batch_tokens // (3 * links + min(2 * links, plan.asked)))
        drawn = batch(generator, rows, links, tokens=plan.asked)
        wary = plan.wary if course.reach >= course.longest else 0.0  # first learn, then doubt
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = compute_loss(model, drawn, rng, wary=wary)
        _step(model, optimizer, loss.total)
        answers, accuracy = float(loss.answers), float(loss.accuracy)
        course.adapt(accuracy)
        points.append(Point(step, links, round(answers, 5), round(accuracy, 5), round(rate, 7)))
        if step % SAY_EVERY == 0 or step == plan.steps - 1:
            seconds = time.monotonic() - begin
            print(f"{seconds:5.0f} s  reach {course.reach:4.0f}  {points[-1]}", flush=True)
    return model, points


def _pace(plan: Plan, step: int) -> float:
    """The part of the full rate: up during the warm-up, down at the end."""
    left = (plan.steps - step) / (DECAY * plan.steps)
    return min(1.0, (step + 1) / plan.warmup, left)


def _groups(model: Recall) -> list[dict[str, object]]:
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    return [
        {"params": matrices, "weight_decay": 0.01},
        {"params": vectors, "weight_decay": 0.0},
    ]


def _step(model: Recall, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def results(folder: Path, device: str, count: int) -> dict[str, object]:
    """Scores of a saved model on held-out prompts, in both precisions, and over damaged KV."""
    held_out = {tokens: prompts(count, tokens=tokens, seed=0) for tokens in LENGTHS}
    lengths: dict[str, dict[int, Score]] = {}
    for dtype in DTYPES:
        model = load(folder, dtype).to(device)
        of_length = {tokens: score(model, items) for tokens, items in held_out.items()}
        lengths[str(dtype).removeprefix("torch.")] = of_length
    model = load(folder).to(device)
    damage = scores(model, held_out[LENGTHS[-1]][:DAMAGED], every_damage(model))
    return {"held_out_prompts": count, "lengths": lengths, "damage": damage}


def main() -> None:
    """Train, from the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/lab/run.sh lab.accuracy.recall.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu", help="default cpu")
    parser.add_argument("--held-out", type=int, default=500, help="prompts per length; default 500")
    for name, value in asdict(Plan()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(value), default=value, help=f"default {value}")
    options = vars(parser.parse_args())
    folder, device, count = options.pop("out"), options.pop("device"), options.pop("held_out")
    plan = Plan(**options)
    begin = time.monotonic()
    model, _ = train(plan, device)
    seconds = time.monotonic() - begin
    save(folder, model)
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    ran = {"device": machine, "torch": torch.__version__, "seconds": round(seconds, 1)}
    result = {"plan": asdict(plan), **ran, **results(folder, device, count)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
