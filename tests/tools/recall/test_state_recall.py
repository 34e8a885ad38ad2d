"""The recall model that has a state: its maths, and what was trained."""

from pathlib import Path

import pytest
import torch

from harness.cluster.models.files import REPO
from lab.accuracy.recall.heldout import read
from lab.accuracy.recall.task import EOS, batch, vocabulary
from lab.accuracy.recall_state.model import StateRecall
from lab.accuracy.recall_state.train import Plan, save, train

FOLDER = REPO / "configs" / "recall-state"
NUMBERS = {word: number for number, word in enumerate(vocabulary())}


def loaded(folder: Path) -> torch.nn.Module:
    """By another implementation."""
    transformers = pytest.importorskip("transformers")
    model = transformers.Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, torch.nn.Module)
    return model.eval()


def logits_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(input_ids=tokens, use_cache=False).logits
    assert isinstance(logits, torch.Tensor)
    return logits


def test_transformers_computes_the_same(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = StateRecall()
    with torch.no_grad():
        for weight in model.parameters():  # as in the file
            weight.copy_(weight + 0.01 * torch.randn_like(weight))
            weight.copy_(weight.bfloat16())
    save(tmp_path, model)
    tokens = torch.randint(3, 1024, (2, 90))
    with torch.inference_mode():
        mine = model(tokens)
    assert torch.allclose(mine, logits_of(loaded(tmp_path), tokens), atol=1e-3)


@pytest.mark.slow
def test_a_lookup_is_learned_in_few_steps(capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    model = train(Plan(steps=60, tokens=32, batch_tokens=1024))
    capsys.readouterr()
    drawn = batch(torch.Generator().manual_seed(5), 8, 10, tokens=20)
    with torch.inference_mode():
        logits = model(torch.cat([drawn.links, drawn.asked], 1))[:, drawn.links.shape[1] :]
    known = drawn.targets >= 0
    assert (logits.argmax(-1) == drawn.targets)[known].float().mean() > 0.6


def test_the_bundled_model_answers_held_out_prompts() -> None:
    model = loaded(FOLDER)
    items = read(FOLDER / "heldout.jsonl")[::8]
    right = 0
    for item in items:
        prompt, answer = ([NUMBERS[word] for word in text.split()] for text in item)
        logits = logits_of(model, torch.tensor([[*prompt, *answer]]))[0, len(prompt) - 1 :]
        right += logits.argmax(-1).tolist() == [*answer, EOS]
    assert right >= len(items) - 1
