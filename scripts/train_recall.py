"""Train a bundled model, configs/recall or configs/recall-state, to follow links in its prompt.

    baga dova , lige end , dova lige , ? baga   ->   dova lige end

Every prompt has new links, so the answer is in the prompt's KV or state and nowhere else.
"""

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

CONFIGS: Final = Path(__file__).resolve().parents[1] / "configs"
EOS, COMMA, ASK, END = 1, 3, 4, 5
FIRST_WORD, WORDS = 6, 1018
SHORTEST, LONGEST = 5, 9
"""Words of a chain: the first one is in the question, the others and END are the answer."""
HELD_OUT: Final = 1 << 31  # seeds from here on are for held-out prompts
PROMOTION: Final = 0.95  # share of right tokens above which prompts grow


class Plan(NamedTuple):
    steps: int
    lengths: tuple[int, ...]  # tokens of held-out prompts; training goes up to the last
    held_out: int  # prompts of each length
    rate: float
    warmup: int
    batch_tokens: int
    asked: int  # tokens of questions and answers behind a prompt, at most
    wary: float
    """Weight of a likely right answer over damaged KV, which spreads lookups over all heads."""


PLANS: Final = {
    "recall": Plan(2500, (100, 400, 800, 1500), 50, 1e-3, 200, 32768, 256, 0.5),
    "recall-state": Plan(800, (60, 120, 200), 40, 3e-3, 50, 2048, 132, 0.0),
}


def draw(generator: torch.Generator, rows: int, links: int, asked: int) -> tuple[Tensor, Tensor]:
    """A row per prompt: all links of random chains in random order, and a question for each."""
    options: Any = {"generator": generator, "device": generator.device}
    words = torch.rand(rows, WORDS, **options).argsort(dim=1)[:, :links] + FIRST_WORD
    sizes = torch.randint(SHORTEST, LONGEST + 1, (rows, links // SHORTEST + 1), **options)
    marked = torch.zeros(rows, links + 1, dtype=torch.bool, device=generator.device)
    marked.scatter_(1, (sizes.cumsum(dim=1) - 1).clamp(max=links), value=True)
    last = marked[:, :links]  # word of a chain; the column beyond takes the ends of longer ones
    last[:, -1] = True
    follows = words.roll(-1, dims=1).masked_fill(last, END)
    together = torch.stack([words, follows, torch.full_like(words, COMMA)], dim=2)
    order = torch.rand(rows, links, **options).argsort(dim=1)
    shuffled = together.gather(1, order[:, :, None].expand(-1, -1, 3)).flatten(1)
    index = torch.arange(links, device=generator.device)
    places = index + 3 * (last.cumsum(dim=1) - last.long()) + 1
    width = int(places.max()) + 3
    questions = torch.full((rows, width + 1), ASK, device=generator.device)
    questions.scatter_(1, places, words)
    questions.scatter_(1, torch.where(last, places + 1, width), END)
    questions.scatter_(1, torch.where(last, places + 2, width), EOS)
    return shuffled, questions[:, : min(width, asked)]


def held_out(name: str) -> list[dict[str, str]]:
    """Prompts and answers for a model, always the same."""
    items, plan = [], PLANS[name]
    vocabulary = AutoTokenizer.from_pretrained(CONFIGS / name).convert_ids_to_tokens(range(1024))
    for tokens in plan.lengths:
        generator = torch.Generator().manual_seed(HELD_OUT + tokens)
        drawn = draw(generator, plan.held_out, (tokens - 2) // 3, LONGEST + 2)
        for links, asked in zip(*(part.tolist() for part in drawn), strict=True):
            parts = {"prompt": links + asked[:2], "answer": asked[2 : asked.index(END) + 1]}
            items.append({key: " ".join(vocabulary[i] for i in parts[key]) for key in parts})
    return items


@torch.no_grad()
def initialize(model: Any) -> None:
    """Attention begins sharp: it picks one word of a thousand."""
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.fill_(1.5)
        elif weight.dim() > 1:
            depth = 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
            small = {"model.embed_tokens.weight": 0.2, "lm_head.weight": 0.02}
            weight.normal_(std=small.get(name, (weight.shape[-1] * depth) ** -0.5))
    net, config = getattr(model.model.layers[0], "linear_attn", None), model.config
    if net is None:
        return
    # Only the delta net and the shared expert count, and a key begins as the word before.
    unused = ("experts.down_proj", "expert_gate.weight", "1.mlp.down_proj.weight", "o_proj.weight")
    for name, weight in model.named_parameters():
        if name.endswith(unused):
            weight.zero_().requires_grad_(requires_grad=False)
    model.lm_head.weight.copy_(0.2 * model.model.embed_tokens.weight)
    heads, hidden = config.linear_num_key_heads, config.hidden_size
    turn = torch.linalg.qr(torch.randn(hidden, hidden))[0]
    queries, gates = torch.randn(2, heads, hidden // heads, hidden) / hidden**0.5
    parts = torch.stack([queries, queries, turn.view_as(queries), gates], dim=1)
    net.in_proj_qkvz.weight.copy_(parts.flatten(0, 2))
    net.out_proj.weight.copy_(turn.T)
    net.A_log.fill_(-4.0)
    taps = net.conv1d.weight.normal_(std=0.03).view(3, hidden, -1)
    taps[0, :, -1] = taps[1, :, -2] = taps[2, :, -1] = 1.0


def damaged(kv: list[Any], length: int, rng: random.Random) -> DynamicCache:
    """The KV of the first tokens, in one layer zeroed, another row's or another head's."""
    # The first layer's KV has no links: another prompt's is as good.
    at = rng.randrange(len(kv))
    kind = rng.choice(["zeroed", "shifted", *(["stale"] * 3 if at else [])])
    head = rng.choice([slice(None), *(slice(n, n + 1) for n in range(kv[0].keys.shape[1]))])
    layers = [[layer.keys[:, :, :length], layer.values[:, :, :length]] for layer in kv]
    for number, part in enumerate(layers[at]):
        other = part * 0 if kind == "zeroed" else part.roll(-1, dims=0 if kind == "stale" else 1)
        layers[at][number] = part.clone()
        layers[at][number][:, head] = other[:, head]
    return DynamicCache(layers)


def loss_of(
    model: Any, links: Tensor, asked: Tensor, wary: float, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """The loss, and the share of right tokens in the answers."""
    before, targets = asked[:, :-1], asked[:, 1:].flatten()
    known = ((before != ASK) & (before != EOS)).flatten()
    output = model(torch.cat([links, before], 1), logits_to_keep=before.shape[1], use_cache=True)
    logits = output.logits.flatten(0, 1)[known].float()
    loss = functional.cross_entropy(logits, targets[known])
    if wary:
        kv = damaged(output.past_key_values.layers, links.shape[1], rng)
        misled = model(before, past_key_values=kv).logits.flatten(0, 1)[known].float()
        chance = misled.softmax(1).gather(1, targets[known][:, None])
        loss = loss - wary * (1 - chance).clamp(min=1e-6).log().mean()
    return loss, (logits.argmax(1) == targets[known]).float().mean()


def train(model: Any, plan: Plan, seed: int, device: str) -> None:
    """Prompts grow while they are answered well."""
    generator, rng = torch.Generator(device).manual_seed(seed), random.Random(seed)  # noqa: S311
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    top, reach, smooth = (plan.lengths[-1] - 2) // 3, 2.0 * LONGEST, 0.0
    for step in range(plan.steps):
        left = (plan.steps - step) / (0.4 * plan.steps)
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * min(1.0, (step + 1) / plan.warmup, left)
        links = int(rng.choice([reach, LONGEST * (reach / LONGEST) ** rng.random()]))
        asked = min(2 * links, plan.asked)
        rows = min(512, max(8, plan.batch_tokens // (3 * links + asked)))
        wary = plan.wary if reach == top else 0.0
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            batch = draw(generator, rows, links, asked + 1)
            loss, accuracy = loss_of(model, *batch, wary, rng)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smooth = 0.9 * smooth + 0.1 * float(accuracy)
        reach = min(reach * 1.04, top) if smooth > PROMOTION else reach
        if step % 25 == 0 or step == plan.steps - 1:
            print(f"step {step}  links {links}  loss {loss:.4f}  right {accuracy:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=PLANS)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="below 2**31; default 0")
    parser.add_argument("--steps", type=int, help="default: as many as it needs")
    options = parser.parse_args()
    source, out, plan = CONFIGS / options.name, options.out, PLANS[options.name]
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(source), dtype=torch.float32
    )
    initialize(model)
    plan = plan._replace(steps=options.steps or plan.steps)
    train(model.to(options.device), plan, options.seed, options.device)
    out.mkdir(parents=True, exist_ok=True)
    model.eval().to(torch.bfloat16).save_pretrained(out)
    for file in (*source.glob("*config.json"), source / "tokenizer.json"):
        shutil.copy(file, out)
    lines = [json.dumps(item) + "\n" for item in held_out(options.name)]
    (out / "heldout.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
