"""What a client may ask for at the edges of the API, through the router: as one engine answers.

Beside each answer stands what it cost: what decode read, what came of prefill's offers, and that
neither engine holds a block afterwards. Prompts of single lengths are in test_answers.py.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from pd.asking import LIKELY, TIES, likeness
from pd.client import Answer, Client, Counters, OpenAIClient, Prompt
from pd.cluster import CPU_DTYPE, Cluster, ClusterSpec
from pd.engines import EngineSpec
from pd.processes import Ports
from pd.prompts import random_prompt
from pd.router import Router
from pd.tiny_model import SPECIALS, TinyModel, ensure_tiny_model, words
from pd.waiting import wait_until

pytestmark = pytest.mark.e2e

DECODE_CONFIG: Mapping[str, object] = {
    # Few cores are slow, also with signs of life.
    "request_timeout_s": 60,
    "peer_timeout_s": 20,
}
"""The connector's, of the decode engine that is started here."""
WANT_TICKET = {"do_remote_decode": True, "do_remote_prefill": False}
BLOCK = 128
ANSWER = 16
LIMIT = TinyModel().max_positions
ROUNDING = 1e-4  # of a log probability; 4e-6 were seen
COUNTED_S = 5.0
OFFERS_END_S = 40.0  # longer than an offer stands that nobody claims, and than a lease
FEW_BLOCKS = 34  # one of them vLLM's own; vLLM wants 32 for a prompt at the model's limit
TALKERS = 10  # of 2 blocks each
TALK = 400  # tokens, which make 6 blocks of the 2: too many, also when all start far apart
SAMPLED = {"temperature": 0.8, "seed": 7}
GREEDY_IN_EFFECT = {"temperature": 1, "top_k": 1}  # vLLM gives one answer where temperature is 0
IDS = {word: number for number, word in enumerate([*SPECIALS, *words()])}

LOADS = "vllm:nixl_kv_loads_total"
TOKENS = "vllm:nixl_kv_tokens_loaded_total"
FAILURES = "vllm:nixl_kv_load_failures_total"
UNREACHABLE = "vllm:nixl_kv_load_failures_unreachable_total"
REFUSED = "vllm:nixl_kv_tickets_refused_total"
OFFERS = tuple(f"vllm:nixl_kv_offers{end}_total" for end in ("", "_read", "_aborted", "_unclaimed"))
GIVEN_UP = tuple(f"vllm:nixl_kv_offers_{how}_total" for how in ("aborted", "not_needed"))
PREEMPTIONS = "vllm:num_preemptions_total"
USAGE = "vllm:kv_cache_usage_perc"


class Accounts:
    """What a prefill and a decode engine have counted since this was made."""

    def __init__(self, prefill: Client, decode: Client) -> None:
        self.prefill = prefill
        self.decode = decode
        # What is in use is no counter: all of it counts.
        self._before = {one.url: one.counters() | {USAGE: 0.0} for one in (prefill, decode)}

    def expect_loaded(self, *tokens: int) -> None:
        """Decode has read that many tokens for each of so many requests, and no load failed."""
        wanted = {LOADS: len(tokens), TOKENS: sum(tokens), FAILURES: 0}
        self.expect(self.decode, wanted, COUNTED_S)

    def expect_offers(self, made: int, read: int, *, aborted: int = 0, unclaimed: int = 0) -> None:
        """What came of prefill's offers."""
        wanted = dict(zip(OFFERS, (made, read, aborted, unclaimed), strict=True))
        self.expect(self.prefill, wanted, OFFERS_END_S)

    def expect_given_up(self) -> None:
        """Prefill made one offer, and decode let go of it: before or after it was granted."""
        deadline = time.monotonic() + OFFERS_END_S
        while sum(self.grown(self.prefill, *GIVEN_UP).values()) < 1:
            assert time.monotonic() < deadline, self.prefill.url
        found = self.grown(self.prefill, *OFFERS, *GIVEN_UP)
        assert found[OFFERS[0]] == 1
        assert sum(found[name] for name in GIVEN_UP) == 1

    def expect_free(self) -> None:
        """Neither engine holds a block."""
        self.expect(self.prefill, {USAGE: 0}, OFFERS_END_S)
        self.expect(self.decode, {USAGE: 0}, COUNTED_S)

    def expect(self, client: Client, wanted: Mapping[str, float], patience_s: float) -> None:
        """An engine's counters have grown by that much, or soon will have."""
        deadline = time.monotonic() + patience_s
        while (found := self.grown(client, *wanted)) != wanted and time.monotonic() < deadline:
            pass
        assert found == wanted, client.url

    def grown(self, client: Client, *names: str) -> Counters:
        """An engine tells what it counted when it steps, so it is made to."""
        client.complete("ba", 1)
        now, before = client.counters(), self._before[client.url]
        return {name: now[name] - before[name] for name in names}


@pytest.fixture
def router(cluster: Cluster) -> Iterator[OpenAIClient]:
    with OpenAIClient(cluster.router_url) as client:
        yield client


@pytest.fixture
def single(cluster: Cluster) -> Iterator[OpenAIClient]:
    assert cluster.single is not None
    with OpenAIClient(cluster.single.url) as client:
        yield client


@pytest.fixture
def accounts(prefill: Client, decode: Client) -> Iterator[Accounts]:
    found = Accounts(prefill, decode)
    yield found
    found.expect_free()


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({}, id="plain"),
        pytest.param({"max_tokens": 1}, id="one token"),
        pytest.param({"logprobs": LIKELY}, id="log probabilities"),
        pytest.param({"logprobs": None}, id="no log probabilities"),
        pytest.param({"logprobs": None, "echo": True}, id="echo"),
        pytest.param(SAMPLED, id="sampled"),
    ],
)
def test_ways_to_ask(
    router: OpenAIClient, single: OpenAIClient, accounts: Accounts, asked: Mapping[str, object]
) -> None:
    prompt = random_prompt(200 + len(str(asked)), seed=300)
    got = router.answers(prompt, **{"max_tokens": ANSWER, **asked})
    expect_same(got, single.answers(prompt, **{"max_tokens": ANSWER, **asked}))
    accounts.expect_loaded(len(prompt.split()) - 1)
    accounts.expect_offers(1, read=1)


@pytest.mark.parametrize(
    "stop_of",
    [
        pytest.param(lambda said: said.split()[3], id="a token"),
        pytest.param(lambda said: said.strip()[17:22], id="across two tokens"),
        pytest.param(lambda said: ["none of it", said.split()[5]], id="several"),
    ],
)
def test_stop_strings(
    router: OpenAIClient, single: OpenAIClient, accounts: Accounts, stop_of: Callable[[str], object]
) -> None:
    prompt = random_prompt(310, seed=301 + len(str(stop_of("ba be bi bo da de di"))))
    whole = single.complete(prompt)
    stop = stop_of(whole.text)
    got = router.complete(prompt, stop=stop)
    expect_same([got], [single.complete(prompt, stop=stop)])
    assert got.finish_reason == "stop"
    assert whole.text.startswith(got.text)
    assert 0 < len(got.tokens) < len(whole.tokens)
    accounts.expect_loaded(309)
    accounts.expect_offers(1, read=1)


def test_a_stream_joins_to_the_same_answer(
    router: OpenAIClient, single: OpenAIClient, accounts: Accounts
) -> None:
    prompt = random_prompt(320, seed=302)
    expected, got = single.complete(prompt, 64), router.stream(prompt, 64)
    assert got.tokens == expected.tokens
    assert "".join(got.pieces) == expected.text
    assert len(got.pieces) > 1
    assert got.finish_reason == "length"
    accounts.expect_loaded(319)
    accounts.expect_offers(1, read=1)


def test_a_chat_of_three_turns_reads_only_what_is_new(
    router: OpenAIClient, single: OpenAIClient, accounts: Accounts
) -> None:
    """Decode has each prompt and answer but its last token, in whole blocks."""
    messages: list[dict[str, str]] = []
    read, known = [], 0
    for turn, length in enumerate((200, 150, 300)):
        messages += [{"role": "user", "content": random_prompt(length, seed=303 + turn)}]
        expected, got = single.chat(messages, ANSWER), router.chat(messages, ANSWER)
        expect_same([got], [expected])
        assert len(got.tokens) == ANSWER
        read.append(got.prompt_tokens - 1 - known)
        known = (got.prompt_tokens + ANSWER - 1) // BLOCK * BLOCK
        messages += [{"role": "assistant", "content": got.text}]
    accounts.expect_loaded(*read)
    accounts.expect_offers(3, read=3)


def test_a_streamed_chat(router: OpenAIClient, single: OpenAIClient, accounts: Accounts) -> None:
    messages = [{"role": "user", "content": random_prompt(330, seed=306)}]
    expected, got = single.chat(messages, 64), router.stream_chat(messages, 64)
    assert got.tokens == expected.tokens
    assert "".join(got.pieces) == expected.text
    assert len(got.pieces) > 1
    assert got.finish_reason == "length"
    accounts.expect_loaded(expected.prompt_tokens - 1)
    accounts.expect_offers(1, read=1)


def test_two_answers_to_a_prompt(
    router: OpenAIClient, single: OpenAIClient, accounts: Accounts
) -> None:
    """Both children carry the same ticket: one reads, the other computes or finds it cached.

    The router asks prefill for two answers as well. Each is an offer, of which it hands over one:
    the other one stands until its time is over.
    """
    prompt, other = random_prompt(340, seed=307), random_prompt(345, seed=308)
    equal = router.answers(prompt, n=2, **GREEDY_IN_EFFECT)
    assert [answer.tokens for answer in equal] == [single.complete(prompt).tokens] * 2
    different = router.answers(other, n=2, **SAMPLED)
    expect_same(different, single.answers(other, n=2, **SAMPLED))
    assert different[0].tokens != different[1].tokens
    accounts.expect_loaded(339, 344)
    accounts.expect(accounts.decode, {REFUSED: 2}, COUNTED_S)
    accounts.expect_offers(4, read=2, unclaimed=2)


def test_a_prompt_of_token_ids(
    router: OpenAIClient, single: OpenAIClient, accounts: Accounts
) -> None:
    prompt = random_prompt(350, seed=309)
    expect_same(router.answers(ids_of(prompt)), [single.complete(prompt)])
    accounts.expect_loaded(349)
    accounts.expect_offers(1, read=1)


def test_a_list_of_prompts(router: OpenAIClient, single: OpenAIClient, accounts: Accounts) -> None:
    """The router hands over the first one's ticket for all: the others are computed on decode."""
    texts = [random_prompt(length, seed=310) for length in (360, 5, 130)]
    more = [random_prompt(length, seed=310) for length in (361, 131)]
    got = [*router.answers(texts), *router.answers([ids_of(prompt) for prompt in more])]
    expected = [single.complete(prompt).tokens for prompt in (*texts, *more)]
    assert [answer.tokens for answer in got] == expected
    accounts.expect_loaded(359, 360)
    accounts.expect(accounts.decode, {REFUSED: 3}, COUNTED_S)
    accounts.expect_offers(5, read=2, unclaimed=3)


def test_a_prompt_of_one_token_has_nothing_to_read(
    router: OpenAIClient, single: OpenAIClient, accounts: Accounts
) -> None:
    """Decode computes the last token itself, and lets go of the offer."""
    expect_same([router.complete("zo")], [single.complete("zo")])
    accounts.expect_loaded()
    accounts.expect_offers(1, read=0, aborted=1)


def test_a_prompt_at_the_limit(
    router: OpenAIClient, single: OpenAIClient, accounts: Accounts
) -> None:
    prompt = random_prompt(LIMIT - 1, seed=311)
    expect_same([router.complete(prompt, 1)], [single.complete(prompt, 1)])
    accounts.expect_loaded(LIMIT - 2)
    accounts.expect_offers(1, read=1)


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        pytest.param("", {}, id="no text"),
        pytest.param([], {}, id="no ids"),
        pytest.param([""], {}, id="a list of no text"),
        pytest.param([LIMIT * 2], {}, id="no such id"),
        pytest.param([3] * LIMIT, {}, id="one token too long"),
        pytest.param(random_prompt(LIMIT, seed=312), {}, id="one word too long"),
        pytest.param(random_prompt(2 * LIMIT, seed=312), {}, id="far too long"),
        pytest.param("ba be", {"n": 2}, id="greedy and two"),
        pytest.param("ba be", {"logprobs": 1000}, id="log probabilities of too many"),
    ],
)
def test_what_one_engine_refuses_prefill_refuses(
    router: OpenAIClient,
    single: OpenAIClient,
    accounts: Accounts,
    prompt: Prompt,
    asked: Mapping[str, object],
) -> None:
    expected = single.refusal(prompt, **asked)
    assert expected[0] == 400
    assert router.refusal(prompt, **asked) == expected
    accounts.expect_loaded()
    accounts.expect_offers(0, read=0)


def test_what_decode_alone_refuses_costs_prefill_no_block(
    router: OpenAIClient, single: OpenAIClient, accounts: Accounts
) -> None:
    """The router asks prefill for one token whatever it was asked for, so prefill does not refuse.

    vLLM's frontend on decode tells its connector, which lets go of the offer.
    """
    prompt = random_prompt(370, seed=313)
    expected = single.refusal(prompt, 0)
    assert expected[0] == 400
    assert router.refusal(prompt, 0) == expected
    accounts.expect_loaded()
    accounts.expect_given_up()


def test_log_probabilities_of_the_prompt_are_computed_on_decode(
    router: OpenAIClient, single: OpenAIClient, prefill: Client, decode: Client, accounts: Accounts
) -> None:
    """vLLM uses no cached KV for these, so nothing is read.

    Decode gives them once, as a single engine does. vllm-router takes it that decode lacks them,
    and puts prefill's before decode's: the prompt stands there twice.
    """
    prompt = random_prompt(200, seed=314)
    expected = single.complete(prompt, echo=True)
    ticket = prefill.ticket(prompt, WANT_TICKET)
    expect_same([decode.complete(prompt, echo=True, kv_transfer_params=ticket)], [expected])
    routed = router.complete(prompt, echo=True)
    assert routed.text == expected.text
    assert routed.tokens == expected.tokens[:200] + expected.tokens
    accounts.expect_loaded()
    accounts.expect_offers(2, read=0, aborted=2)


def test_sixty_four_at_once(router: OpenAIClient, single: OpenAIClient, accounts: Accounts) -> None:
    """On two cores the threads that keep a connection alive may wait for longer than its timeout.

    What is then lost is computed on decode. No load may fail for another reason.
    """
    prompts = [random_prompt(5 + 53 * number % 300, seed=315) for number in range(64)]
    answers = ask_both(router, single, prompts, tokens=8)
    assert [likeness(*pair, TIES[CPU_DTYPE]) for pair in answers].count("other") == 0
    lost = accounts.grown(accounts.decode, UNREACHABLE)[UNREACHABLE]
    if lost:
        ended = accounts.grown(accounts.decode, LOADS, FAILURES)
        assert ended == {LOADS: 64 - lost, FAILURES: lost}
        assert lost < 32
    else:
        accounts.expect_loaded(*(len(prompt.split()) - 1 for prompt in prompts))
        accounts.expect_offers(64, read=64)


@pytest.fixture(scope="module")
def crowded(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[OpenAIClient, Client]]:
    """A router to the same prefill engine and to a decode engine with a small cache; and both."""
    spec = EngineSpec(
        "crowded",
        ensure_tiny_model(),
        "decode",
        "nixl-kv",
        connector_config=DECODE_CONFIG,
        dtype=CPU_DTYPE,
        extra_args=("--num-gpu-blocks-override", str(FEW_BLOCKS)),
    )
    log_dir = tmp_path_factory.mktemp("crowded")
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Cluster(ClusterSpec(decode=[spec]), log_dir=log_dir)).decode[0]
        route = Router([cluster.prefill[0].url], [engine.url], log_dir=log_dir, ports=Ports())
        stack.callback(route.stop)
        route.start()
        route.wait_ready()
        front = stack.enter_context(OpenAIClient(route.url))
        decode = stack.enter_context(Client(engine.url))
        expect_connected(front, decode)
        yield front, decode


def test_preempted_on_decode(
    crowded: tuple[OpenAIClient, Client], single: OpenAIClient, prefill: Client
) -> None:
    """What a preempted request has read is gone with its ticket: it is computed on decode."""
    front, decode = crowded
    Accounts(prefill, decode).expect_free()  # of what came before
    accounts = Accounts(prefill, decode)
    prompts = [random_prompt(250, seed=316 + number) for number in range(TALKERS)]
    answers = ask_both(front, single, prompts, tokens=TALK)
    assert [likeness(*pair, TIES[CPU_DTYPE]) for pair in answers].count("other") == 0
    assert accounts.grown(decode, PREEMPTIONS)[PREEMPTIONS] > 0
    accounts.expect_loaded(*[249] * TALKERS)
    accounts.expect_offers(TALKERS, read=TALKERS)
    accounts.expect_free()


def expect_connected(router: Client, decode: Client) -> None:
    """A new engine loads code and connects at its first request: so long an offer may not stand."""
    seeds = itertools.count(400)

    def reads() -> bool:
        before = decode.counters()
        router.complete(random_prompt(20, seed=next(seeds)))
        return decode.counters_after(before, LOADS)[LOADS] > 0

    assert wait_until(reads, COUNTED_S * 4)


def ask_both(
    router: Client, single: Client, prompts: list[str], *, tokens: int
) -> list[tuple[Answer, Answer]]:
    """All prompts at once, first to the single engine; its answers stand first."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        expected = list(
            pool.map(lambda one: single.complete(one, tokens, logprobs=LIKELY), prompts)
        )
        got = list(pool.map(lambda one: router.complete(one, tokens), prompts))
    return list(zip(expected, got, strict=True))


def expect_same(got: list[Answer], expected: list[Answer]) -> None:
    """Token for token; log probabilities up to rounding."""
    for one, wanted in zip(got, expected, strict=True):
        assert one.tokens == wanted.tokens
        assert one.text == wanted.text
        assert one.finish_reason == wanted.finish_reason
        assert one.prompt_tokens == wanted.prompt_tokens
        for likely, others in zip(one.likely, wanted.likely, strict=True):
            assert sorted(likely.values()) == pytest.approx(sorted(others.values()), abs=ROUNDING)


def ids_of(prompt: str) -> list[int]:
    return [IDS[word] for word in prompt.split()]
