"""Prefill without a server: vLLM's offline `LLM`, which has no `AsyncLLM`.

The argument is JSON: `engine` has the arguments of `LLM`, `prompts` the texts. For each prompt it
prints a line of JSON with the ticket and the answer's one token. It ends on SIGTERM.
"""

import json
import signal
import sys
import threading

from vllm import LLM, SamplingParams

from harness.cluster.client import WANT_TICKET


def main() -> None:
    """Generate one token for each prompt, and serve the KV until the end."""
    settings = json.loads(sys.argv[1])
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    engine = LLM(**settings["engine"])
    params = SamplingParams(
        max_tokens=1, temperature=0, extra_args={"kv_transfer_params": WANT_TICKET}
    )
    for output in engine.generate(settings["prompts"], params, use_tqdm=False):
        line = {"ticket": output.kv_transfer_params, "text": output.outputs[0].text}
        print(json.dumps(line), flush=True)
    is_over.wait()


if __name__ == "__main__":  # vLLM's processes import this file, too
    main()
