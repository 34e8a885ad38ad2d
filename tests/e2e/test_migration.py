"""A fleet moves from vLLM's own NixlConnector engine by engine, under load.

A pair of unlike engines moves no KV. Decode computes every prompt, and both engines go on.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from harness.cluster.client import Answer, Client, RefusedError
from harness.cluster.cluster import PAIR_ROLES, Cluster
from harness.cluster.engines import KV_ROLES, Engine, EngineSpec, Role
from harness.cluster.metrics import LOADED_METRICS, LOADS, PREFIX, TICKETS_REFUSED, CountersSince
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.prompts import random_prompt
from harness.cluster.router import Router
from harness.cluster.waiting import wait_or_fail
from platforms.play import Played
from platforms.replays import REPLAYS
from support.asking import STUCK_S, Load, Rotation, judge
from support.engines import EVENT_S, PATIENT, expect_free, started

pytestmark = pytest.mark.e2e

CLIENTS = 8
NUM_PROMPTS = 120
ANSWER = 4  # tokens
LEASE_S = 6
"""An in-tree prefill engine holds the blocks of an unread prompt for this long."""


FLEET_LEASE_S = 120
"""For a fleet under load. On two busy processors a read between in-tree engines takes up to 24 s.
If their lease ends meanwhile, the reader gets blocks of another request, which vLLM only logs
("Potentially invalid KV blocks"). Prefill's cache must hold all prompts of that time, because our
decode engines do not read them."""
FLEET_CACHE_BYTES = 1 << 30

MOVED = LOADED_METRICS["in-tree"]["loads"]  # nixl_kv exports it with the same meaning
BEGUN = "vllm:time_to_first_token_seconds_count"
RECOMPUTED = f"{PREFIX}recomputed_requests_total"
BETWEEN = 4  # requests that end while all engines serve
TALKS = range(40, 81)  # tokens of an answer


def in_tree(role: Role, lease_s: int = LEASE_S) -> EngineSpec:
    """An engine as vLLM's guide starts it."""
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": KV_ROLES[role],
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": lease_s},
    }
    return EngineSpec(
        f"in-tree-{role}",
        ensure_tiny_model(),
        role,
        "in-tree",
        kv_cache_bytes=320 << 20,
        extra_args=("--kv-transfer-config", json.dumps(transfer)),  # the last one counts
    )


@pytest.fixture(scope="module")
def in_tree_decode(cluster: Cluster) -> Iterator[Engine]:
    with started(cluster, in_tree("decode")) as (engine,):
        yield engine


def prompts_from(seed: int, number: int) -> list[str]:
    return [random_prompt(20 + 37 * (n % 12), seed=seed + n) for n in range(number)]


def answers(client: Client, prompts: Sequence[str]) -> list[tuple[str, ...]]:
    """Several clients ask at the same time."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        return [a.tokens for a in pool.map(lambda p: client.complete(p, ANSWER), prompts)]


def test_an_in_tree_decode_engine_computes_our_prefills_prompts(
    cluster: Cluster,
    base_engines: Sequence[Engine],
    in_tree_decode: Engine,
    single: Client,
) -> None:
    prefill, prompts = base_engines[0], prompts_from(610_000, 24)
    router = cluster.route([prefill], [in_tree_decode])
    with Client(router.url) as client:
        assert answers(client, prompts) == answers(single, prompts)
    for engine in (prefill, in_tree_decode):
        engine.check_alive()
        with Client(engine.url) as to_engine:
            expect_free(to_engine)


@pytest.mark.slow
def test_our_decode_engine_computes_an_in_tree_prefills_prompts(
    cluster: Cluster,
    base_engines: Sequence[Engine],
    single: Client,
) -> None:
    decode, prompts = base_engines[1], prompts_from(620_000, NUM_PROMPTS)
    start = decode.log_size()
    with started(cluster, in_tree("prefill")) as (prefill,), Client(decode.url) as to_decode:
        since = CountersSince(to_decode)
        with Client(cluster.route([prefill], [decode]).url) as client:
            assert answers(client, prompts) == answers(single, prompts)
        changed = since.wait_for(TICKETS_REFUSED, NUM_PROMPTS, EVENT_S)
        assert (changed[TICKETS_REFUSED], changed[LOADS]) == (NUM_PROMPTS, 0)
        prefill.check_alive()
    log = decode.log_text(start)
    assert "Traceback" not in log
    words = "prefill runs vLLM's own NixlConnector"
    assert 0 < log.count(words) <= 1 + NUM_PROMPTS // 24, "one line a minute"
    decode.check_alive()


def test_a_platform_that_sets_the_flags_anew_costs_a_request_not_the_engine(
    base_engines: Sequence[Engine], in_tree_decode: Engine, single: Client
) -> None:
    """llm-d's coordinator. vLLM's default is to fail a request whose KV cannot be read."""
    (coordinator,) = [replay for replay in REPLAYS if "coordinator" in replay.name]
    prefill, prompts = base_engines[0], prompts_from(630_000, 16)
    played = Played(coordinator, prefill, in_tree_decode)

    def ask(prompt: str) -> int:
        with pytest.raises(RefusedError) as refused:
            client.complete(prompt, ANSWER)
        return refused.value.status

    with Client(in_tree_decode.url, transport=played) as client, ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, prompts)) == {500}
    in_tree_decode.check_alive()
    with Client(in_tree_decode.url) as client:
        assert answers(client, prompts) == answers(single, prompts)
        expect_free(client)


def of_role(role: Role, engines: Sequence[Engine]) -> list[Engine]:
    return [engine for engine in engines if engine.spec.role == role]


class Fleet:
    """Two prefill and two decode engines behind vllm-router, which cannot add an engine.

    So each change takes a new router. The earlier one keeps its requests until they end.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.phases: dict[str, Counter[str]] = {}
        """The growth of decode's counters, by the engines that served meanwhile."""
        self.engines = cluster.start(
            *(
                replace(
                    in_tree(role, FLEET_LEASE_S),
                    name=f"in-tree-{role}-{number}",
                    kv_cache_bytes=FLEET_CACHE_BYTES,
                )
                for role in PAIR_ROLES
                for number in (1, 2)
            )
        )
        self.served: dict[str, str] = {}
        """The engines that could serve each prompt."""
        self._ours: list[str] = []  # their addresses
        self._cluster = cluster
        self._rotation = Rotation([self._route(self.engines)])
        self._before = self._counters()

    def complete(self, prompt: str, num_tokens: int) -> Answer:
        with self._rotation.next() as client:
            self.served[prompt] = self._names()
            return client.complete(prompt, num_tokens)

    def migrate(self, engine: Engine) -> None:
        """Replace an engine with the steps of docs/migrate.md."""
        self._serve([one for one in self.engines if one is not engine])
        engine.terminate()
        wait_or_fail(lambda: not engine.is_running(), STUCK_S, f"{engine.name} does not end")
        spec = replace(
            engine.spec,
            name=engine.name.replace("in-tree", "nixl-kv"),
            connector="nixl-kv",
            drop_in=True,
            connector_config=PATIENT,
            extra_args=(),
        )
        (ours,) = self._cluster.start(spec)
        self._ours.append(ours.url.removeprefix("http://"))
        self._serve([*self.engines, ours])

    def involves_ours(self, prompt: str, answer: Answer | None) -> bool:
        """Whether one of our engines served the request, or could have if it has no answer."""
        if answer is None:
            return "nixl-kv" in self.served[prompt]
        return any(address in answer.id for address in self._ours)

    def end_phase(self) -> None:
        served = self._names()
        self.phases[served] = self._counters()
        self.phases[served].subtract(self._before)

    def _names(self) -> str:
        return ", ".join(sorted(engine.name for engine in self.engines))

    def _serve(self, engines: list[Engine]) -> None:
        """New requests go to these engines. Returns when the earlier requests have ended."""
        (earlier,), later = self._rotation.servers, self._route(engines)
        self.end_phase()
        self.engines = engines
        self._rotation.servers = [later]
        wait_or_fail(partial(self._rotation.is_idle, earlier), STUCK_S, "a request does not end")
        earlier.stop()
        self._before = self._counters()

    def _route(self, engines: Sequence[Engine]) -> Router:
        return self._cluster.route(of_role("prefill", engines), of_role("decode", engines))

    def _counters(self) -> Counter[str]:
        """Those of all decode engines that serve."""
        total = Counter[str]()
        for engine in of_role("decode", self.engines):
            with Client(engine.url) as client:
                total.update(client.counters())
        return total


@pytest.mark.slow
@pytest.mark.parametrize("order", [("decode", "prefill"), ("prefill", "decode")], ids="-".join)
def test_a_fleet_migrates_under_load_and_no_request_fails(
    tmp_path: Path, order: tuple[Role, Role]
) -> None:
    with Cluster(tmp_path / "logs") as cluster:
        fleet = Fleet(cluster)
        engines = sorted(fleet.engines, key=lambda engine: order.index(engine.spec.role))
        with Load(fleet.complete, clients=4, lengths=TALKS) as load:
            for engine in engines:
                load.wait(BETWEEN)
                fleet.migrate(engine)
            load.wait(2 * BETWEEN)
            fleet.end_phase()
        for served, counted in fleet.phases.items():
            numbers = (f"{counted[name]:g}" for name in (BEGUN, MOVED, RECOMPUTED))
            print(*numbers, served)
        with Client(of_role("prefill", fleet.engines)[0].url) as alone:
            judged = judge(alone, load.ended, TALKS)
    by_pair: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for question, ended in judged:
        is_ours = fleet.involves_ours(question.prompt, ended.answer)
        by_pair[is_ours][ended.kind(question)] += 1
    print("pairs of in-tree engines:", dict(by_pair[False]))  # their failures are vLLM's
    print("pairs with one of ours:", dict(by_pair[True]))
    assert set(by_pair[True]) == {"right"}
    assert by_pair[False]["right"] > 0
    assert all(counted[BEGUN] > 0 for counted in fleet.phases.values())
    moved = [counted[MOVED] > 0 for counted in fleet.phases.values()]
    assert moved == [True] * 3 + [False] * 3 + [True] * 3, "like engines, unlike ones, like ones"
    *_, one_unlike, all_alike = fleet.phases.values()
    assert one_unlike[RECOMPUTED] == all_alike[RECOMPUTED] == 0
