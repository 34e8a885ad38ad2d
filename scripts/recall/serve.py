"""Ask one vLLM engine held-out prompts over HTTP, and count the answers that are right."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from pd.client import Client
from pd.cluster import Cluster, ClusterSpec
from pd.engines import EngineSpec

from recall.heldout import read
from recall.task import LONGEST, Item

SPARE_TOKENS = 4  # so that an answer that does not end is seen


def ask(client: Client, items: Sequence[Item]) -> Iterator[tuple[int, bool]]:
    """Of each prompt its tokens, and whether the answer is right and ends by itself."""
    for prompt, expected in items:
        answer = client.complete(prompt, LONGEST + SPARE_TOKENS, ignore_eos=False)
        right = answer.text.strip() == expected and answer.finish_reason == "stop"
        yield answer.prompt_tokens, right


def main() -> int:
    """Start, ask, print; 1 if fewer than 99 of 100 answers are right."""
    parser = argparse.ArgumentParser(prog="python -m recall.serve", description=__doc__)
    parser.add_argument("model", type=Path, help="the model's folder, with heldout.jsonl")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    items = read(options.model / "heldout.jsonl")
    spec = EngineSpec("single", options.model, dtype=options.dtype)
    with Cluster(ClusterSpec(single=spec)) as cluster, Client(cluster.engines[0].url) as client:
        found = sorted(ask(client, items))
    lengths = Counter(tokens for tokens, _ in found)
    right = {tokens: sum(each for _, each in group) for tokens, group in groupby(found, key=_first)}
    print(json.dumps({"dtype": options.dtype, "prompts": lengths, "right": right}))
    return int(sum(right.values()) < 0.99 * len(items))


def _first(pair: tuple[int, bool]) -> int:
    return pair[0]


if __name__ == "__main__":
    sys.exit(main())
