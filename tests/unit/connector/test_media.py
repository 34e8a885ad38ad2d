"""Decode loads and computes prompts with media, whichever parts of them it has."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nixl_kv.connector.decode import DecodeScheduler, Prompt, Rows
from nixl_kv.connector.media import FAIL_REASONS, Media, MediaItem, MediaRules, MustLoads
from nixl_kv.connector.paging import Paging
from nixl_kv.errors import TicketRefused
from nixl_kv.ids import Nonce, RequestId
from nixl_kv.protocol.events import CancelLoad, PrepareLoad
from nixl_kv.protocol.ticket import SealedTicket, Ticket
from support.records import hex32, ticket

D1: Final = RequestId("d1")
IMAGE: Final = 3
"""The placeholder token."""
TOKENS: Final = [*range(10, 20), *[IMAGE] * 4, *range(30, 40)]
NONCE: Final = Nonce(hex32(7))


def picture(identifier: str = "picture", **changed: Any) -> MediaItem:
    return MediaItem(**{"begin": 10, "end": 14, "identifier": identifier, **changed})


PICTURE: Final = Media((picture(),))
STAND_IN: Final = Media((picture(is_data=False),))
OTHER: Final = Media((picture("another"),))
ABSENT: Final = Media((), (10, 11, 12, 13))
TEXT: Final = Media()


def prompt_with(media: Media, tokens: list[int] = TOKENS) -> Prompt:
    return Prompt(D1, len(tokens), tokens, media=media)


def sealed(media: Media, tokens: list[int] = TOKENS, **changed: Any) -> Ticket:
    """Prefill's ticket for a prompt."""
    context, hashed = prompt_with(media, tokens).hashes(NONCE)
    values = {"nonce": NONCE, "num_tokens": len(tokens), "context": context, "media": hashed}
    return ticket(**{**values, **changed})


@dataclass
class Decode:
    """A decode engine under one setting, and what becomes of a request there."""

    rules: MediaRules

    def __post_init__(self) -> None:
        self.scheduler = DecodeScheduler([Paging(0, 4, 0)], SealedTicket.parse, media=self.rules)

    def arrive(self, media: Media, params: Any, tokens: list[int] = TOKENS) -> str:
        prompt = prompt_with(media, tokens)
        try:
            self.scheduler.on_new_request(prompt, params)
        except TicketRefused as error:
            may_not = self.scheduler.why_not_computed(prompt, params)
            return f"{error.reason}: " + ("fails" if may_not else "computes")
        return "must load" if D1 in self.scheduler.must_load else "loads"


# Decode's parts of a prompt with a picture, and its decision under each setting.
TABLE: Final = {
    ("the picture", "auto"): "loads",
    ("the picture", "ticket"): "must load",
    ("the picture", "own"): "loads",
    ("the picture", "Dynamo"): "must load",
    ("a stand-in under its id", "auto"): "must load",
    ("a stand-in under its id", "ticket"): "must load",
    ("a stand-in under its id", "own"): "loads",
    ("a stand-in under its id", "Dynamo"): "must load",
    ("another picture", "auto"): "media: fails",
    ("another picture", "ticket"): "must load",
    ("another picture", "own"): "media: computes",
    ("another picture", "Dynamo"): "media: fails",
    ("placeholders alone", "auto"): "media: fails",
    ("placeholders alone", "ticket"): "must load",
    ("placeholders alone", "own"): "media: computes",
    ("placeholders alone", "Dynamo"): "media: fails",
    # The model's config names no placeholder token, so decode cannot tell where the media end.
    ("nothing", "auto"): "media: fails",
    ("nothing", "ticket"): "media: fails",
    ("nothing", "own"): "media: computes",
    ("nothing", "Dynamo"): "media: fails",
}
HAVING: Final = {
    "the picture": PICTURE,
    "a stand-in under its id": STAND_IN,
    "another picture": OTHER,
    "placeholders alone": ABSENT,
    "nothing": TEXT,
}
RULES: Final = {
    "auto": MediaRules("auto"),
    "ticket": MediaRules("ticket"),
    "own": MediaRules("own"),
    "Dynamo": MediaRules("auto", has_stand_ins=True),
}


@pytest.mark.parametrize(("case", "expected"), TABLE.items(), ids=map(", ".join, TABLE))
def test_a_prompt_with_a_picture(case: tuple[str, str], expected: str) -> None:
    name, setting = case
    decode = Decode(RULES[setting])
    assert decode.arrive(HAVING[name], sealed(PICTURE).params(None)) == expected
    is_given_back = expected.startswith("media")  # tokens, adapter and salt agree
    kinds = [type(each) for each in decode.scheduler.build_connector_meta()]
    assert kinds == ([PrepareLoad, CancelLoad] if is_given_back else [PrepareLoad])


def refused(media: Media) -> dict[str, tuple[Any, str]]:
    """Parameters that decode refuses for a prompt that prefill saw with these media."""
    changed = {
        "not_offered": sealed(media, not_offered="it drains"),
        "prompt": sealed(media, [0, *TOKENS[1:]]),
        "weights": sealed(media, weights="step 8"),
    }
    return {
        "no ticket": ({}, "malformed"),
        "a forged ticket": ({"nixl_kv_ticket": "x"}, "malformed"),
        "another version": ({"nixl_kv_ticket": "9..AAAA"}, "version"),
        **{reason: (each.params(None), reason) for reason, each in changed.items()},
    }


REASONS: Final = refused(PICTURE)


@pytest.mark.parametrize("setting", RULES)
@pytest.mark.parametrize("name", HAVING)
@pytest.mark.parametrize("reason", REASONS)
def test_a_refused_request_is_computed_only_with_prefills_media(
    setting: str, name: str, reason: str
) -> None:
    params, expected = REASONS[reason]
    is_sealed = expected in ("not_offered", "prompt", "weights")  # decode can read its hashes
    has_media = name == "the picture"
    is_hidden = name == "nothing" and not is_sealed  # as a text: nothing says otherwise
    may = setting == "own" or is_hidden or (setting == "auto" and has_media and is_sealed)
    outcome = f"{expected}: {'computes' if may else 'fails'}"
    assert Decode(RULES[setting]).arrive(HAVING[name], params) == outcome


@pytest.mark.parametrize("setting", RULES)
@pytest.mark.parametrize("reason", REASONS)
def test_a_text_is_computed_whatever_its_ticket(setting: str, reason: str) -> None:
    params, expected = refused(TEXT)[reason]
    assert Decode(RULES[setting]).arrive(TEXT, params) == f"{expected}: computes"
    assert Decode(RULES[setting]).arrive(TEXT, sealed(TEXT).params(None)) == "loads"


@pytest.mark.parametrize("setting", ["ticket", "Dynamo"])
def test_media_that_decode_would_have_to_compute_are_refused(setting: str) -> None:
    """Decode always computes the last token."""
    tokens = TOKENS[:14]
    decode = Decode(RULES[setting])
    assert decode.arrive(PICTURE, sealed(PICTURE, tokens).params(None), tokens) == "media: fails"
    assert Decode(RULES["auto"]).arrive(PICTURE, sealed(PICTURE, tokens).params(None), tokens) == (
        "loads"
    )


@pytest.mark.parametrize("setting", ["auto", "ticket"])
def test_a_literal_placeholder_in_a_text_is_the_same_on_both_sides(setting: str) -> None:
    decode = Decode(RULES[setting])
    assert (
        decode.arrive(ABSENT, sealed(ABSENT).params(None))
        == {
            "auto": "loads",
            "ticket": "must load",
        }[setting]
    )


@pytest.mark.parametrize("setting", RULES)
@pytest.mark.parametrize("theirs", [TEXT, PICTURE, ABSENT], ids=["text", "picture", "absent"])
@pytest.mark.parametrize("own", [TEXT, PICTURE, ABSENT], ids=["text", "picture", "absent"])
def test_an_early_ticket_counts_as_any_other(setting: str, theirs: Media, own: Media) -> None:
    """Its prompt has been read, so it says what media prefill has."""
    late, early = sealed(theirs), replace(sealed(theirs), is_early=True)
    rules = RULES[setting]
    assert Decode(rules).arrive(own, early.params(None)) == (
        Decode(rules).arrive(own, late.params(None))
    )


# --- a prompt that extends prefill's


@pytest.mark.parametrize("more", [0, 1, 2, 30])
@pytest.mark.parametrize("num_tokens", [7, 8, 9, 24])
def test_a_prompt_may_go_on_after_prefills(num_tokens: int, more: int) -> None:
    tokens = [*TOKENS, *range(100, 140)]
    decode = Decode(RULES["auto"])
    short = tokens[:num_tokens]
    assert decode.arrive(TEXT, sealed(TEXT, short).params(None), tokens[: num_tokens + more]) == (
        "loads"
    )
    loaded = num_tokens if more else num_tokens - 1
    assert decode.scheduler.get_num_new_matched_tokens(D1, 0) == (loaded, True)


def test_media_after_prefills_prompt_are_decodes_alone() -> None:
    tokens = [*TOKENS, *[IMAGE] * 4, 50]
    both = Media((picture(), picture("more", begin=24, end=28)))
    params = sealed(PICTURE).params(None)
    assert Decode(RULES["own"]).arrive(both, params, tokens) == "loads"
    for setting in ("auto", "ticket", "Dynamo"):
        assert Decode(RULES[setting]).arrive(both, params, tokens) == "media: fails"


prompts = st.integers(1, 12).flatmap(
    lambda length: st.builds(
        Prompt,
        st.just(D1),
        st.just(length),
        st.none() | st.lists(st.integers(0, 3), min_size=length, max_size=length),
        st.sampled_from([(), (b"lora a",), (b"salt b",)]),
        st.binary(min_size=2 * length, max_size=2 * length).map(
            lambda data: (Rows(b"embeds", memoryview(data), 2),)
        ),
        st.lists(
            st.builds(
                lambda begin, size, name: MediaItem(
                    begin, begin + size, name, geometry=b"g" + (bytes([size]))
                ),
                st.integers(0, length - 1),
                st.integers(1, 3),
                st.sampled_from("ab"),
            ),
            max_size=2,
        ).map(lambda items: Media(tuple(items))),
    )
)


def naive(prompt: Prompt, count: int) -> tuple[Any, ...]:
    """The inputs of the KV of the first tokens, token by token, without media."""
    ids = None if prompt.token_ids is None else tuple(prompt.token_ids[:count])
    rows = tuple(bytes(rows.data[: count * rows.size]) for rows in prompt.rows)
    sizes = tuple((one.begin, one.geometry) for one in prompt.media.items if one.begin < count)
    return ids, prompt.extras, rows, sizes


@given(first=prompts, second=prompts, count=st.integers(1, 12))
def test_prefixes_hash_alike_if_and_only_if_they_are_equal(
    first: Prompt, second: Prompt, count: int
) -> None:
    count = min(count, first.num_tokens, second.num_tokens)
    hashes = [each.context(NONCE, num_tokens=count) for each in (first, second)]
    assert (hashes[0] == hashes[1]) == (naive(first, count) == naive(second, count))


@given(first=prompts, second=prompts)
def test_media_hash_alike_if_and_only_if_they_are_equal(first: Prompt, second: Prompt) -> None:
    def plain(media: Media) -> list[tuple[int, int, str]]:
        return [(one.begin, one.end, one.identifier) for one in media.items]

    one, other = first.media, second.media
    assert (one.hash(NONCE) == other.hash(NONCE)) == (plain(one) == plain(other))
    assert bool(one.hash(NONCE)) == bool(one)


# --- requests that must load


class Story:
    """A request that decode may not compute, from its arrival on."""

    def __init__(self) -> None:
        decode = Decode(RULES["ticket"])
        assert decode.arrive(STAND_IN, sealed(PICTURE).params(None)) == "must load"
        self.scheduler = decode.scheduler
        self.asked = self.scheduler.get_num_new_matched_tokens(D1, 0)

    def allocate(self, num_tokens: int = 23) -> None:
        self.scheduler.update_state_after_alloc(D1, [[1, 2, 3, 4, 5, 6]], num_tokens)

    def end(self, *, is_good: bool) -> None:
        self.scheduler.update_connector_output({D1}, set() if is_good else {D1})

    def failed(self) -> list[str]:
        return [reason for reason, _ in self.scheduler.must_load.pop_failed().values()]


@pytest.fixture
def story() -> Iterator[Story]:
    yield (story := Story())
    story.scheduler.request_finished(D1)
    assert D1 not in story.scheduler.must_load
    assert story.failed() == []


def test_a_good_load_runs_until_vllm_preempts_it(story: Story) -> None:
    assert story.asked == (23, True)
    story.allocate()
    assert story.scheduler.must_load.loaded == {}
    story.end(is_good=True)
    assert story.scheduler.must_load.loaded == {D1: 23}
    story.scheduler.must_load.fail(D1, "preempted", "vLLM preempted it")
    assert story.failed() == ["preempted"]
    assert story.failed() == [], "vLLM hears of it once"


def test_a_failed_load_fails_the_request(story: Story) -> None:
    story.allocate()
    story.end(is_good=False)
    assert story.failed() == ["load"]


def test_a_load_that_another_connector_takes_fails_the_request(story: Story) -> None:
    story.allocate(0)
    assert story.failed() == ["other_load"]


def test_a_prompt_that_vllm_has_cached_needs_no_load(story: Story) -> None:
    assert story.scheduler.get_num_new_matched_tokens(D1, 23) == (0, False)
    story.allocate(0)
    assert story.scheduler.must_load.loaded == {D1: 23}


@pytest.mark.parametrize("has_blocks", [False, True])
def test_a_cache_reset_fails_the_request(story: Story, *, has_blocks: bool) -> None:
    if has_blocks:
        story.allocate()
    story.scheduler.reset_cache()
    if has_blocks:
        story.end(is_good=True)  # the workers had not heard of it
        assert story.failed() == []
        story.end(is_good=False)
    assert story.failed() == ["load" if has_blocks else "cancelled"]


@pytest.mark.parametrize("has_failed_before", [False, True])
def test_a_failed_request_gets_no_blocks_before_vllm_ends_it(
    story: Story, *, has_failed_before: bool
) -> None:
    """A label may change while vLLM asks: the request would be computed in the same step."""
    if has_failed_before:
        story.failed()
    story.scheduler.reset_cache()
    for _ in range(2):
        assert story.scheduler.get_num_new_matched_tokens(D1, 0) == (None, False)
        story.failed()


def test_only_a_request_that_must_load_fails() -> None:
    must_load = MustLoads()
    for reason in FAIL_REASONS:
        must_load.fail(D1, reason, "words")
    must_load.on_loaded(D1, 23)
    assert (must_load.pop_failed(), must_load.loaded) == ({}, {})
