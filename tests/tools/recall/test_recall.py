"""The recall task says what it promises, and the committed model answers it from KV alone."""

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from harness.cluster.models.files import REPO
from lab.accuracy.recall.damage import DAMAGES, damaged, shifted, zeroed
from lab.accuracy.recall.evaluate import score, scores
from lab.accuracy.recall.folder import WEIGHTS, load, save
from lab.accuracy.recall.heldout import LENGTHS, mixed, read
from lab.accuracy.recall.loss import compute_loss, unlikeliness
from lab.accuracy.recall.model import Recall, Shape
from lab.accuracy.recall.task import (
    ASK,
    END,
    EOS,
    HELD_OUT,
    IGNORED,
    LONGEST,
    SHORTEST,
    VOCABULARY_SIZE,
    Item,
    batch,
    links_in,
    prompts,
    vocabulary,
)
from lab.accuracy.recall.train import Plan, train

FOLDER = REPO / "configs" / "recall"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On busy cores, two threads wait for each other longer than one takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained() -> Recall:
    return load(FOLDER)


def links_of(prompt: str) -> tuple[dict[str, str], str]:
    """The links of a prompt, and the word that its question begins at."""
    *body, mark, first = prompt.split()
    assert mark == "?"
    assert body[2::3] == [","] * (len(body) // 3)
    links = dict(zip(body[0::3], body[1::3], strict=True))
    assert len(links) == len(body) // 3, "a word leads to two others"
    return links, first


def _prompts(items: list[Item]) -> list[str]:
    return [item.prompt for item in items]


def _answers(items: list[Item]) -> list[str]:
    return [item.answer for item in items]


def followed(links: dict[str, str], word: str) -> list[str]:
    words = []
    while word != "end":
        word = links[word]
        words.append(word)
    return words


@pytest.mark.parametrize("tokens", [29, 100, 777, 1500])
def test_answers_follow_the_links_of_the_prompt(tokens: int) -> None:
    items = prompts(20, tokens=tokens, seed=3)
    for prompt, answer in items:
        links, first = links_of(prompt)
        assert followed(links, first) == answer.split()
        assert SHORTEST <= len(answer.split()) <= LONGEST
        assert tokens - 3 < len(prompt.split()) <= tokens
        assert set(prompt.split()) <= set(vocabulary())
    assert len({item.prompt for item in items}) == len(items)


def test_prompts_are_the_same_for_the_same_seed_and_others_for_another() -> None:
    first = prompts(5, tokens=200, seed=0)
    assert first == prompts(5, tokens=200, seed=0)
    assert not set(first) & set(prompts(5, tokens=200, seed=1))
    # Another length is another draw, no longer prompt on the same chains.
    assert {item.answer for item in first}.isdisjoint(
        item.answer for item in prompts(5, tokens=203, seed=0)
    )


def test_training_does_not_see_what_is_held_out() -> None:
    """Also with rows, length and a seed that would give the same, were they not kept apart."""
    drawn = batch(torch.Generator().manual_seed(200), 5, links_in(200), tokens=20)
    table = vocabulary()
    seen = {" ".join(table[token] for token in row) for row in drawn.links.tolist()}
    held_out = {item.prompt.rpartition(" ?")[0] for item in prompts(5, tokens=200, seed=0)}
    assert not seen & held_out


@pytest.mark.parametrize("tokens", [28, 4000])
def test_length_without_room_for_a_chain_or_words_is_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"tokens={tokens}"):
        prompts(1, tokens=tokens, seed=0)


def test_seed_of_training_is_refused_for_held_out_prompts() -> None:
    with pytest.raises(ValueError, match="seed=-1"):
        prompts(1, tokens=100, seed=-1)


def test_seed_of_held_out_prompts_is_refused_for_training() -> None:
    with pytest.raises(ValueError, match="seed="):
        Plan(seed=HELD_OUT)


def test_targets_are_what_follows_in_the_prompt() -> None:
    drawn = batch(torch.Generator().manual_seed(5), 8, 60, tokens=50)
    rows = zip(drawn.links.tolist(), drawn.asked.tolist(), drawn.targets.tolist(), strict=True)
    checked = 0
    for links, asked, targets in rows:
        follows = dict(zip(links[0::3], links[1::3], strict=True)) | {END: EOS}
        for token, target in zip(asked, targets, strict=True):
            assert target == (IGNORED if token in {ASK, EOS} else follows[token])
            checked += target != IGNORED
    assert checked > 8 * 30


def test_file_of_held_out_prompts_is_what_its_command_makes() -> None:
    items = read(FOLDER / "heldout.jsonl")
    assert items == mixed(200, seed=0)
    assert len(items) == 200
    assert max(len(item.prompt.split()) for item in items) == max(LENGTHS) - 1


@pytest.mark.parametrize("tokens", [300, 1400])
def test_committed_model_answers(trained: Recall, tokens: int) -> None:
    assert score(trained, prompts(4, tokens=tokens, seed=11)).exact == 1.0


def test_committed_model_knows_nothing_without_its_kv(trained: Recall) -> None:
    changes = {"all": partial(damaged, damage=zeroed)}
    for head in range(trained.shape.kv_heads):
        changes[f"head {head}"] = partial(damaged, damage=shifted, layer=1, head=head)
    for name, measured in scores(trained, prompts(5, tokens=300, seed=12), changes).items():
        assert measured.exact == 0.0, name
        assert measured.tokens < 0.2, name


def test_wrong_words_are_counted_as_wrong(trained: Recall) -> None:
    right = prompts(4, tokens=100, seed=13)
    others = [*right[1:], right[0]]
    wrong = [Item(*pair) for pair in zip(_prompts(right), _answers(others), strict=True)]
    assert score(trained, wrong).exact == 0.0
    assert score(trained, [*right[:3], wrong[3]]).exact == 0.75


def test_wrong_first_word_makes_an_answer_wrong(trained: Recall) -> None:
    (item,) = prompts(1, tokens=100, seed=14)
    links, _ = links_of(item.prompt)
    final = next(word for word, follows in links.items() if follows == "end")
    assert item.answer.split()[0] != final
    measured = score(trained, [Item(item.prompt, f"{final} end")])
    assert measured == (0.0, 0.6667)  # what follows the wrong word is right


def test_answers_over_kept_kv_are_those_of_one_pass(trained: Recall) -> None:
    drawn = batch(torch.Generator().manual_seed(1), 2, 50, tokens=40)
    with torch.inference_mode():
        whole, _ = trained(torch.cat([drawn.links, drawn.asked], dim=1))
        _, kv = trained(drawn.links)
        apart, _ = trained(drawn.asked, kv)
    torch.testing.assert_close(whole[:, drawn.links.shape[1] :], apart, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_changes_one_head_of_one_layer(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    kv = [tuple(torch.randn(2, 4, 64, 8, generator=generator) for _ in "kv") for _ in range(3)]
    before = [[part.clone() for part in layer] for layer in kv]
    after = damaged(kv, DAMAGES[name], layer=1, head=2)
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        for was, now in zip(old, new, strict=True):
            changed = (was != now).any(dim=3).any(dim=2).any(dim=0)
            assert changed.tolist() == [layer == 1 and head == 2 for head in range(4)]
        assert all(map(torch.equal, old, kv[layer]))


def test_saved_model_is_loaded_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Recall(Shape(layers=3, rope_theta=5e5))
    save(tmp_path, model, torch.float32)
    again = load(tmp_path)
    assert again.shape == model.shape
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["vocab_size"] == VOCABULARY_SIZE


def test_training_depends_on_the_seed_and_nothing_else() -> None:
    small = Plan(steps=2, layers=1, tokens=60, batch_tokens=128, asked=32, warmup=1)
    (_, first), (_, again) = train(small, "cpu"), train(small, "cpu")
    assert first == again
    _, other = train(Plan(**(vars(small) | {"seed": 1})), "cpu")
    assert first != other


def test_being_sure_over_damaged_kv_costs_and_being_right_does_not(trained: Recall) -> None:
    drawn = batch(torch.Generator().manual_seed(2), 4, 20, tokens=30)
    ignorant = Recall(trained.shape)
    rng = random.Random(0)  # noqa: S311
    with torch.inference_mode():
        calm = compute_loss(trained, drawn, rng, wary=0.0)
        wary = compute_loss(trained, drawn, rng, wary=1.0)
        unsure = compute_loss(ignorant, drawn, rng, wary=1.0)
    assert calm.accuracy == 1.0
    assert calm.total == calm.answers < 0.2
    # A trained model is as good as silent over damage; one that knows nothing always is.
    assert 0 <= float(wary.total - wary.answers) < 0.2
    assert float(unsure.total - unsure.answers) < 0.1 < float(unsure.answers)


def test_only_the_right_token_must_not_be_likely() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0]])
    assert float(unlikeliness(logits, torch.tensor([0]))) > 5
    assert float(unlikeliness(logits, torch.tensor([1]))) < 0.001


def test_committed_model_is_small() -> None:
    assert (FOLDER / WEIGHTS).stat().st_size < 8_000_000
