"""Records what vLLM hands to the connector's hooks, for tests that need no engine.

    PYTHONPATH=tests:scripts python -m support.record_vllm

writes the files of tests/unit/connector/recorded anew (another folder may be named). An engine in
both roles runs in this process, with a tiny model: it offers a prompt, reads it back from itself,
offers five prompts of which some are preempted since blocks are few, and computes one that is
aborted. `engine.json` has what the connector was made with; `scheduler.json` and `worker.json` have
the calls of its hooks in order, without those in which nothing happened. `recorded_vllm.py` makes
vLLM's objects of it again.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that all of it is in this process
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB

from vllm import LLM, SamplingParams

from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.models.qwen3 import TinyModel
from support.recording_connector import Record, calls, engine

RECORDED: Final = Path(__file__).resolve().parents[1] / "unit/connector/recorded"
BLOCK_SIZE: Final = 32
NUM_BLOCKS: Final = 16


def _params(max_tokens: int, transfer: Record | None = None) -> SamplingParams:
    extra = None if transfer is None else {"kv_transfer_params": transfer}
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, extra_args=extra)


def run(model: str) -> None:
    """See the module's head."""
    llm = LLM(
        model,
        served_model_name="tiny",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_model_len=256,
        max_num_batched_tokens=64,
        gpu_memory_utilization=0.1,
        kv_transfer_config={
            "kv_connector": "RecordingConnector",
            "kv_connector_module_path": "support.recording_connector",
            "kv_role": "kv_both",
            "engine_id": "recorded",
            "kv_connector_extra_config": {"port": 0, "offer_ttl_s": 2.0},
        },
    )
    prompt: Any = {"prompt_token_ids": list(range(100, 200))}
    (offered,) = llm.generate([prompt], _params(1, {"do_remote_decode": True}))
    llm.generate([prompt], _params(4, dict(offered.kv_transfer_params or {})))
    others: Any = [{"prompt_token_ids": [number] * 90} for number in range(5)]
    # Five requests of four blocks in the end, where there are 15.
    llm.generate(others, _params(10, {"do_remote_decode": True}))
    aborted = llm.llm_engine.add_request("aborted", prompt, _params(5, {"do_remote_decode": True}))
    for _ in range(3):
        llm.llm_engine.step()
    llm.llm_engine.abort_request([aborted or "aborted"], internal=True)
    for _ in range(3):
        llm.llm_engine.step()


def main() -> None:
    """Write the files."""
    folder = Path(sys.argv[1]) if sys.argv[1:] else RECORDED
    run(str(ensure_tiny_model(model=TinyModel(hidden=128, layers=2, heads=4, kv_heads=2))))
    folder.mkdir(parents=True, exist_ok=True)
    lines = {name: [json.dumps(call, sort_keys=True) for call in calls[name]] for name in calls}
    texts = {name: "[\n" + ",\n".join(lines[name]) + "\n]" for name in lines}
    texts["engine"] = json.dumps(engine, sort_keys=True, indent=1)
    for name, text in texts.items():
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
