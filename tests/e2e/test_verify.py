"""One wrong byte in each load between real engines: seen, named, counted, recomputed."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from counting import changed
from pd.asking import WANT_TICKET
from pd.client import Client, Counters
from pd.cluster import Cluster, ClusterSpec, one_pair
from pd.detect_planting import VARIABLE
from pd.prompts import random_prompt
from pd.tiny_model import REPO, ensure_tiny_model

pytestmark = pytest.mark.e2e

PREFIX = "vllm:nixl_kv_"
LENGTHS = (5, 129, 300, 500)
PLANTED = re.compile(
    r"planted byte in request (?P<request>\S+): "
    r"(?P<row>\w+ of head \d+ of layer \S+) and 0 more, tokens (?P<first>\d+) to (?P<last>\d+)"
)
SEEN = re.compile(
    r"request (?P<request>\S+): KV not loaded: what was read from prefill rank 0 is not what it "
    r"has: (?P<row>\w+ of head \d+ of layer \S+) differs in tokens (?P<first>\d+) to (?P<last>\d+) "
    r"\(blocks \d+ to \d+ of the request; 1 of \d+ columns of 64 tokens\) \(corrupt"
)


@dataclass(frozen=True)
class Pair:
    prefill: Client
    decode: Client
    plan: Path
    log: Path

    def ask(self, prompt: str) -> tuple[str, ...]:
        ticket = self.prefill.ticket(prompt, WANT_TICKET)
        assert ticket is not None
        return self.decode.complete(prompt, kv_transfer_params=ticket).tokens

    def counters(self) -> Counters:
        """Decode's, with all that it has counted: what its worker counts comes with a later step.

        So it makes another one, for a request without a ticket, and waits until that is counted.
        """
        before = self.decode.counters()
        self.decode.complete("ba", 1)
        changed(self.decode, before, f"{PREFIX}tickets_missing_total")
        return self.decode.counters()

    def counted(self, before: Counters) -> Counters:
        """All that has changed since."""
        return {name: value - before.get(name, 0.0) for name, value in self.counters().items()}


@pytest.fixture(scope="module")
def pair(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Of engines of which decode verifies all, and spoils what its file says."""
    del cluster  # after the others: two cores start no more at a time
    log_dir = tmp_path_factory.mktemp("planted")
    plan = log_dir / "plan"
    plan.write_text("byte")
    spec = one_pair(ensure_tiny_model(), "nixl-kv")
    decode = replace(
        spec.decode[0],
        module="pd.planted",
        connector_config={"verify": "all", "request_timeout_s": 60},
        extra_env={VARIABLE: f"@{plan}", "PYTHONPATH": str(REPO / "scripts")},
    )
    patient = replace(spec.prefill[0], connector_config={"lease_s": 30})
    engines = ClusterSpec([patient], [decode])
    with (
        Cluster(engines, log_dir=log_dir, route=False) as started,
        Client(started.prefill[0].url) as prefill,
        Client(started.decode[0].url) as serving,
    ):
        yield Pair(prefill, serving, plan, started.decode[0].log_path)


def test_a_wrong_byte_is_seen_named_counted_and_recomputed(pair: Pair, single: Client) -> None:
    prompts = [random_prompt(length, seed=71) for length in LENGTHS]
    before = pair.counters()
    assert [pair.ask(p) for p in prompts] == [single.complete(p).tokens for p in prompts]
    counted = pair.counted(before)
    assert counted[f"{PREFIX}load_failures_corrupt_total"] == len(prompts)
    assert counted[f"{PREFIX}load_failures_total"] == len(prompts)
    assert counted[f"{PREFIX}loads_total"] == 0
    assert counted[f"{PREFIX}digests_total"] == len(prompts)
    log = pair.log.read_text()
    planted = {found["request"]: found for found in PLANTED.finditer(log)}
    seen = {found["request"]: found for found in SEEN.finditer(log)}
    assert len(planted) == len(prompts)
    assert planted.keys() == seen.keys()
    for request, found in planted.items():
        told = seen[request]
        assert told["row"] == found["row"]
        assert int(told["first"]) <= int(found["first"])
        assert int(found["last"]) <= int(told["last"])


def test_loads_without_a_fault_are_proven(pair: Pair, single: Client) -> None:
    """The same engines, after all these failures."""
    pair.plan.write_text("")
    prompt = random_prompt(300, seed=72)
    before = pair.counters()
    assert pair.ask(prompt) == single.complete(prompt).tokens
    counted = pair.counted(before)
    assert counted[f"{PREFIX}loads_verified_total"] == 1
    assert counted[f"{PREFIX}load_failures_total"] == 0
    assert counted[f"{PREFIX}digests_total"] == 1
    assert counted[f"{PREFIX}digest_bytes_total"] == 299 * 4 * 4 * 64 * 2 * 4
