"""An engine's answers to others about its prefix cache, on vLLM's own scheduler."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from nixl_kv.config import Config
from nixl_kv.connector import unpromised
from nixl_kv.connector.conversations.content import check_cache, check_start
from nixl_kv.connector.plugin import Where, run_checks
from nixl_kv.conversations.runs import Run, open_run
from nixl_kv.errors import ConfigError
from nixl_kv.geometry.layout import Table
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import Found
from support.records import find
from support.vllm_objects import kv_cache_config, override, vllm_config
from support.vllm_scheduler import BLOCK, SteppedScheduler, make_config, make_request, ours

WRAPPED: Final = {"get_new_blocks", "cache_full_blocks", "reset_prefix_cache"}
PROMPT: Final = list(range(70))  # four blocks, and a part of one


class Owner(SteppedScheduler):
    def __init__(self, setting: str = "on", num_blocks: int = 64, **scheduling: Any) -> None:
        transfer = KVTransferConfig(**ours(conversations=setting))
        super().__init__(make_config(transfer, num_blocks, **scheduling))
        self.describe()

    def find(self, request: Request, first: int = 0, *, weights: str = "") -> Found:
        question = find(request.block_hashes[first:], first, weights)
        (answer,) = [part.find for part in self.connector._parts if part.find]
        found: Found = answer(question)
        assert found.nonce == question.nonce
        assert bool(found.run) is bool(found.num_blocks)
        return found

    def step(self) -> list[events.Command]:
        output = self.vllm.schedule()
        commands: list[events.Command] = output.kv_connector_metadata.commands
        self.end(output)
        return commands


Make = Callable[..., Owner]


@pytest.fixture
def make(engines_of: Callable[[type[Owner]], Make]) -> Make:
    return engines_of(Owner)


def only(commands: list[events.Command], kind: type) -> Any:
    (found,) = [each for each in commands if isinstance(each, kind)]
    return found


def test_without_the_setting_nothing_is_wrapped_or_sent(make: Make) -> None:
    owner = make("off")
    pool = owner.vllm.kv_cache_manager.block_pool
    assert not WRAPPED & vars(pool).keys()
    assert owner.connector._directory._look_up is None
    assert owner.connector._directory._published[0].content is None
    owner.add("a", PROMPT)
    kinds = {type(each) for each in owner.step()}
    assert kinds == {events.SetEngine}


def test_the_scheduler_finds_the_blocks_that_its_steps_fill(make: Make) -> None:
    owner = make()
    request = owner.add("a", PROMPT, max_tokens=30)
    assert not owner.find(request).num_blocks
    commands = owner.step()
    taken = only(commands, events.BlocksTaken)
    assert Table(0, taken.ids).block_ids.tolist() == owner.blocks_of("a")
    found, key = owner.find(request, 1), only(commands, events.SetContentKey).key
    run = open_run(found.run, found.offer, key)
    assert isinstance(run, Run)
    assert (run.first_block, run.steps, run.need, run.epoch) == (1, 1, 1, taken.epoch)
    assert Table(0, run.ids).block_ids.tolist() == owner.blocks_of("a")[1:4]
    assert found.num_blocks == 3
    assert open_run(found.run, owner.find(request).offer, key) is None, "sealed for one offer"
    while owner.vllm.has_unfinished_requests():
        owner.step()
    whole = make_request("next", [*request.all_token_ids, 1])
    assert owner.find(whole).num_blocks == (request.num_tokens - 1) // BLOCK, "the answer too"


def test_another_prompt_is_found_as_far_as_it_is_equal(make: Make) -> None:
    owner = make()
    owner.add("a", PROMPT)
    owner.step()
    assert owner.find(make_request("b", [*PROMPT[:40], *range(900, 940)])).num_blocks == 2
    assert not owner.find(make_request("c", PROMPT, cache_salt="other")).num_blocks


def test_a_reset_of_an_idle_engine_hides_everything(make: Make) -> None:
    owner = make()
    request = owner.add("a", PROMPT)
    owner.step()
    assert owner.find(request).num_blocks == 4
    assert owner.vllm.reset_prefix_cache()
    assert not owner.find(request).num_blocks


def test_a_reset_of_the_connector_hides_the_blocks_that_vllm_keeps(make: Make) -> None:
    owner = make()
    request = owner.add("a", PROMPT, max_tokens=9)
    epoch = only(owner.step(), events.BlocksTaken).epoch
    before = owner.find(request)
    assert owner.vllm.reset_connector_cache()
    after = owner.find(request)
    assert (before.num_blocks, before.epoch) == (4, 0)
    assert (after.num_blocks, after.epoch) == (0, 1)
    assert only(owner.step(), events.BlocksTaken).epoch == epoch + 1


def test_a_new_label_finds_nothing_of_the_former_weights(make: Make) -> None:
    """Also before the scheduler has followed it: an idle engine calls no hook."""
    owner = make()
    request = owner.add("a", PROMPT)
    owner.step()
    owner.connector._directory.weights = "step 8"
    assert not owner.find(request, weights="step 8").num_blocks
    assert not owner.find(request).num_blocks
    other = owner.add("b", range(500, 570))
    owner.step()
    assert not owner.find(request, weights="step 8").num_blocks
    owner.step()
    third = owner.add("c", range(600, 670))
    owner.step()
    found = owner.find(third, weights="step 8")
    assert (found.num_blocks, found.weights) == (4, "step 8")
    assert not owner.find(other).num_blocks


def test_a_new_description_after_a_wake_up_has_a_new_key(make: Make) -> None:
    owner = make()
    request = owner.add("a", PROMPT)
    first = only(owner.step(), events.SetContentKey)
    owner.describe()
    assert not owner.find(request).num_blocks, "the memory of the cache is new"
    commands = owner.step()
    assert only(commands, events.SetContentKey) != first
    assert commands.index(only(commands, events.SetEngine)) == 0
    assert isinstance(commands[1], events.SetContentKey)


def test_sessions_are_left_out(make: Make) -> None:
    owner = make()
    session = owner.add("a", PROMPT, resumable=True)
    owner.step()
    assert not owner.find(session).num_blocks


def test_finds_are_counted(make: Make) -> None:
    owner = make()
    request = owner.add("a", PROMPT)
    owner.step()
    for asked in (request, request, make_request("b", range(900, 940))):
        owner.find(asked)
    assert owner.connector.get_kv_connector_stats().data["finds"] == {"found": 2, "none": 1}
    owner.find(request)
    assert owner.connector.get_kv_connector_stats().data["finds"] == {"found": 1}


def test_an_untested_vllm_has_no_index(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unpromised, "version", lambda: "0.99.0")
    with caplog.at_level("WARNING", "vllm"):
        owner = make()
    assert not owner.connector._parts
    assert "conversations has no effect" in caplog.text
    assert not WRAPPED & vars(owner.vllm.kv_cache_manager.block_pool).keys()


# --- engines that cannot serve the setting

REFUSED: Final[dict[str, Callable[[Any], None]]] = {
    "kv_role 'kv_producer'": lambda vllm: setattr(
        vllm.kv_transfer_config, "kv_role", "kv_producer"
    ),
    "prefill context parallelism": lambda vllm: setattr(
        vllm.parallel_config, "prefill_context_parallel_size", 2
    ),
    "no prefix caching": lambda vllm: setattr(vllm.cache_config, "enable_prefix_caching", False),
    "other than sha256 and sha256_cbor": lambda vllm: setattr(
        vllm.cache_config, "prefix_caching_hash_algo", "xxhash"
    ),
    "recurrent state": lambda vllm: override(vllm, is_hybrid=True),
    "reuse a part of a block": lambda vllm: setattr(vllm.cache_config, "prefix_match_unit", 8),
}


def served() -> VllmConfig:
    config = vllm_config({"port": 0, "conversations": "on"})
    config.cache_config.enable_prefix_caching = True
    return config


@pytest.mark.parametrize("words", REFUSED)
def test_an_engine_that_cannot_serve_it_does_not_start(words: str) -> None:
    config = served()
    run_checks(config, Where.CONFIG)
    REFUSED[words](config)
    check_start(Config(conversations="off"), config)
    with pytest.raises(ConfigError, match=f"conversations is 'on', .*{words}.*; allowed"):
        check_start(Config(conversations="on"), config)
    with pytest.raises(ConfigError):
        run_checks(config, Where.CONFIG)


def cache(**changed: Any) -> KVCacheConfig:
    found = kv_cache_config()
    for name, value in changed.items():
        setattr(found, name, value)
    return found


def zeroed() -> KVCacheConfig:
    found: Any = kv_cache_config()
    found.__class__ = type("KVCacheConfig", (type(found),), {"needs_kv_cache_zeroing": True})
    return found


WINDOW: Final = SlidingWindowSpec(
    block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=64
)
CACHES: Final[dict[str, KVCacheConfig]] = {
    "several cache groups": cache(kv_cache_groups=2 * kv_cache_config().kv_cache_groups),
    "layers that do not keep all tokens": cache(
        kv_cache_groups=[KVCacheGroupSpec(["layer"], WINDOW)]
    ),
    "new blocks that vLLM fills with zeros": zeroed(),
}


@pytest.mark.parametrize("words", CACHES)
def test_a_cache_that_cannot_be_read_by_content_is_refused(words: str) -> None:
    check_cache(kv_cache_config())
    with pytest.raises(ConfigError, match=words):
        check_cache(CACHES[words])


# --- vLLM's own holes


def preempted_in_its_own_step(engine: SteppedScheduler) -> tuple[Request, int]:
    """A request that vLLM has scheduled and then preempted; how many tokens it has computed."""
    victim = engine.add("victim", range(166), priority=5)
    engine.end(engine.vllm.schedule())
    engine.add("urgent", range(1000, 1031), priority=0, max_tokens=40)
    while True:
        num_computed = victim.num_computed_tokens
        output = engine.vllm.schedule()
        if output.preempted_req_ids:
            assert output.preempted_req_ids == {"victim"}
            assert output.num_scheduled_tokens == {"urgent": 1}, "the step fills nothing else"
            engine.end(output)
            return victim, num_computed
        engine.end(output)


CROWDED: Final[dict[str, Any]] = {
    "policy": "priority",
    "max_num_batched_tokens": 48,
    "long_prefill_token_threshold": 32,
}


def test_vllm_finds_blocks_of_a_request_that_it_preempted_in_its_own_step() -> None:
    """docs/upstream/vllm-preempted-blocks.md. If this fails, vLLM has mended it: say so there."""
    engine = SteppedScheduler(make_config(None, 14, **CROWDED))
    victim, num_computed = preempted_in_its_own_step(engine)
    manager = engine.vllm.kv_cache_manager
    _, num_found, *_ = manager.get_computed_blocks(victim)
    assert (num_computed, num_found) == (144, 160)


def test_blocks_of_a_request_that_vllm_preempted_in_its_own_step_are_not_found(make: Make) -> None:
    owner = make(num_blocks=14, **CROWDED)
    victim, num_computed = preempted_in_its_own_step(owner)
    assert owner.find(victim).num_blocks * BLOCK == num_computed
