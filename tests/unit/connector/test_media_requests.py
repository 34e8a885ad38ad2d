"""The connector reads vLLM's requests with media, and changes some."""

import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import pytest
import torch
from msgspec.structs import replace
from vllm.v1.request import Request, RequestStatus

from nixl_kv.config import DYNAMO_VARIABLE
from nixl_kv.connector import plugin
from nixl_kv.connector.scheduler import Scheduler
from nixl_kv.connector.vllm_config import (
    MediaReader,
    check_hooks,
    keep_private,
    media_rules,
)
from nixl_kv.errors import ConfigError
from support.records import opened
from support.vllm_objects import kv_cache_config, new_request, vllm_config
from support.vllm_scheduler import make_request
from unit.connector.test_scheduler import TABLE, publish

IMAGE: Final = 3
TOKENS: Final = [*range(10, 20), *[IMAGE] * 4, *range(30, 40)]
GRID: Final = torch.tensor([1, 4, 4])


def element(value: object) -> Any:
    """A MultiModalFieldElem."""
    return SimpleNamespace(data=value)


def feature(offset: int = 10, identifier: str = "picture", **data: object) -> Any:
    """A MultiModalFeatureSpec."""
    return SimpleNamespace(
        mm_position=SimpleNamespace(offset=offset, length=4),
        identifier=identifier,
        data={name: element(value) for name, value in data.items()} or None,
    )


PIXELS: Final = torch.zeros(3, 8)


def with_media(*features: Any, params: Any = None, tokens: list[int] = TOKENS) -> Request:
    return new_request(params, prompt_token_ids=list(tokens), mm_features=list(features))


@pytest.mark.parametrize(
    ("data", "is_data"),
    [
        pytest.param({"pixel_values": PIXELS}, True, id="pixels"),
        pytest.param({"pixel_values": PIXELS, "image_grid_thw": GRID}, True, id="and sizes"),
        pytest.param({"input_features": PIXELS}, True, id="audio"),
        pytest.param({"image_embeds": PIXELS}, False, id="embeddings of an image"),
        pytest.param({"video_embeds": PIXELS, "video_grid_thw": GRID}, False, id="of a video"),
        pytest.param({"audio_embeds": PIXELS}, False, id="of an audio"),
        pytest.param({"address": 7, "monotonic_id": 1}, False, id="in shared memory"),
        pytest.param({}, False, id="nothing"),
    ],
)
def test_data_is_told_from_possible_stand_ins(data: dict[str, Any], *, is_data: bool) -> None:
    reader = MediaReader(frozenset({IMAGE}), has_geometry=False)
    (item,) = reader.media_of(with_media(feature(**data))).items
    assert (item.begin, item.end, item.identifier) == (10, 14, "picture")
    assert (item.is_data, item.geometry) == (is_data, b"")


def test_sizes_count_where_positions_depend_on_them() -> None:
    """A stand-in of other sizes would give the tokens after it other positions."""
    reader = MediaReader(frozenset({IMAGE}), has_geometry=True)
    cases: dict[str, dict[str, Any]] = {
        "the picture": {"pixel_values": PIXELS, "image_grid_thw": GRID},
        "a stand-in": {"image_embeds": PIXELS, "image_grid_thw": GRID},
        "another shape": {"image_embeds": PIXELS, "image_grid_thw": torch.tensor([1, 2, 8])},
        "nothing": {"image_embeds": PIXELS},
    }
    sizes = {
        name: tuple(reader.media_of(with_media(feature(**data))).geometries())
        for name, data in cases.items()
    }
    assert sizes["the picture"] == sizes["a stand-in"]
    assert len(set(sizes.values())) == 3


@pytest.mark.parametrize(
    ("features", "bare"),
    [
        pytest.param([feature()], (), id="all are the picture's"),
        pytest.param([], (10, 11, 12, 13), id="no picture"),
        pytest.param([feature(offset=12)], (10, 11), id="some"),
    ],
)
def test_placeholders_without_media_are_found(features: list[Any], bare: tuple[int, ...]) -> None:
    reader = MediaReader(frozenset({IMAGE}), has_geometry=False)
    assert reader.media_of(with_media(*features)).bare == bare
    no_placeholder = with_media(tokens=[1, 2, 4])
    assert not reader.media_of(no_placeholder)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7}, {5, 6}),
        ({"image_token_index": 5, "eos_token_id": 1}, {5}),
        ({"audio_config": {"audio_token_id": 5}, "id2label": {0: "a"}}, {5}),
        ({"image_token_id": None, "image_token_index": True, "image_seq_length": 4}, set()),
    ],
)
def test_placeholders_are_those_that_the_models_config_names(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, object], tokens: set[int]
) -> None:
    monkeypatch.setattr("nixl_kv.connector.vllm_config.takes_media", lambda _: True)
    model = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: config), uses_mrope=True)
    vllm: Any = SimpleNamespace(model_config=model)
    assert MediaReader.of(vllm) == MediaReader(frozenset(tokens), has_geometry=True)


def test_a_model_without_media_has_no_reader() -> None:
    assert MediaReader.of(vllm_config()) is None


def test_private_blocks_serve_no_other_request() -> None:
    requests = [make_request(name, range(48), cache_salt="tenant") for name in ("a", "b", "c")]
    shared = list(requests[0].block_hashes)
    assert requests[1].block_hashes == shared
    for request in requests[1:]:
        keep_private(request)
    hashes = [{*request.block_hashes} for request in requests]
    assert [len(each) for each in hashes] == [3, 3, 3]
    assert len(set.union(*hashes)) == 9


@pytest.mark.parametrize("where", ["here", "in the parent process", "nowhere"])
def test_dynamo_is_recognised_in_the_engines_process(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv(DYNAMO_VARIABLE, "")  # so that the end of the test undoes what follows
    monkeypatch.delenv(DYNAMO_VARIABLE)
    monkeypatch.delitem(sys.modules, "dynamo", raising=False)
    if where != "nowhere":
        monkeypatch.setitem(sys.modules, "dynamo", ModuleType("dynamo"))
    if where == "in the parent process":
        plugin.register()  # vLLM loads its plugins before it starts the engine's process
        assert os.environ[DYNAMO_VARIABLE] == "1"
        monkeypatch.delitem(sys.modules, "dynamo")
    assert media_rules("auto").has_stand_ins == (where != "nowhere")


# --- the scheduler's half

Make = Callable[..., Scheduler]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes schedulers of a model that takes images."""
    reader = MediaReader(frozenset({IMAGE}), has_geometry=False)
    monkeypatch.setattr(MediaReader, "of", lambda _: reader)
    monkeypatch.setattr("nixl_kv.connector.scheduler.check_hooks", lambda _: None)
    schedulers: list[Scheduler] = []

    def new(role: str, **extra: Any) -> Scheduler:
        config = vllm_config({"insecure": True, "port": 0, **extra}, kv_role=role)
        scheduler = Scheduler(config, kv_cache_config())
        schedulers.append(scheduler)
        publish(scheduler)
        return scheduler

    yield new
    for scheduler in schedulers:
        scheduler.shutdown()


PICTURE: Final = feature(pixel_values=PIXELS)
STAND_IN: Final = feature(image_embeds=PIXELS)
LEG: Final = {"do_remote_decode": True}
BAD_PARAMS: Final[list[Any]] = [{"nixl_kv_ticket": "?"}, {"do_remote_prefill": True}, 7, []]


def answer(prefill: Scheduler, request: Request) -> Any:
    """Prefill's answer if it does not offer a request."""
    prefill.on_new_request(request)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    request.num_computed_tokens = request.num_prompt_tokens
    keeps, params = prefill.request_finished_all_groups(request, (TABLE,))
    assert not keeps
    return params


def drain(scheduler: Scheduler) -> None:
    assert scheduler._directory is not None
    scheduler._directory.is_draining = True


def test_a_prompt_with_media_that_is_not_offered_has_a_ticket_that_says_why(make: Make) -> None:
    prefill = make("kv_producer")
    drain(prefill)
    params = answer(prefill, with_media(PICTURE, params=LEG))
    ticket = opened(params)
    assert (ticket.not_offered, ticket.num_tokens) == ("this engine is draining", len(TOKENS))
    assert len(ticket.media) == len(ticket.context) == 32
    assert prefill._not_offered == {}
    text = with_media(params=LEG, tokens=[1, 2, 4])
    assert answer(prefill, text) is None, "decode can compute a text"
    assert answer(prefill, with_media(PICTURE)) is None, "no router asked for a ticket"
    # A prefill leg at a decode engine.
    consumer = make("kv_consumer")
    assert opened(answer(consumer, with_media(PICTURE, params=LEG))).not_offered
    assert consumer.pop_failed({}) == []

    decode = make("kv_both")
    for features, fails in (([PICTURE], False), ([STAND_IN], True), ([], True)):
        request = with_media(*features, params=params)
        decode.on_new_request(request)
        failed = decode.pop_failed({request.request_id: request})
        assert failed == [request.request_id] * fails


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both", "kv_producer"])
def test_stand_ins_are_computed_in_no_role(make: Make, role: str) -> None:
    scheduler = make(role)
    for params in BAD_PARAMS:
        request = with_media(STAND_IN, params=params)
        scheduler.on_new_request(request)
        assert scheduler.pop_failed({request.request_id: request}) == [request.request_id]
    text = with_media(params={"nixl_kv_ticket": "?"}, tokens=[1, 2, 4])
    without_params = with_media(STAND_IN)
    for request in (text, without_params):
        scheduler.on_new_request(request)
        assert scheduler.pop_failed({request.request_id: request}) == []


@pytest.mark.parametrize(
    ("setting", "is_dynamo", "media", "is_private"),
    [
        ("auto", False, "the picture", False),
        ("auto", False, "a stand-in", False),
        ("auto", True, "a stand-in", True),
        ("ticket", False, "the picture", True),
        ("ticket", False, "a stand-in", True),
    ],
)
def test_only_media_that_may_differ_are_kept_private(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    media: str,
    *,
    is_dynamo: bool,
    is_private: bool,
) -> None:
    """vLLM would cache its KV under the id of the picture."""
    prefill = make("kv_producer")
    drain(prefill)
    ticket = opened(answer(prefill, with_media(PICTURE, params=LEG)))
    offered = prefill._trust.seal(replace(ticket, not_offered=""))
    if is_dynamo:
        monkeypatch.setenv(DYNAMO_VARIABLE, "1")
    decode = make("kv_consumer", media=setting)
    request = with_media(PICTURE if media == "the picture" else STAND_IN, params=offered)
    decode.on_new_request(request)
    assert (request.cache_salt is not None) is is_private


def test_the_hooks_are_required() -> None:
    with pytest.raises(ConfigError, match="hooks over vLLM's scheduler are missing"):
        check_hooks(vllm_config())
