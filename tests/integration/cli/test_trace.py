"""`nixl-kv trace` asks engines that run."""

import json
from pathlib import Path

from support.integration import MakeEngine, address
from support.nixl_kv_command import nixl_kv

TOKENS = 8
TABLE = [1, 2]


def test_a_request_is_followed_through_prefill_and_both_ranks_of_decode(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    prefill, decode = make_engine("P", 1), make_engine("D", 2)
    for number in (1, 2):
        decode.prepare_load(f"d{number}", prefill.offer(f"p{number}", [TABLE], TOKENS))
        decode.start_load(f"d{number}", [TABLE], range(TOKENS))
        assert decode.wait_failure(f"d{number}") is None
        prefill.wait_offer(f"p{number}")

    out = tmp_path / "trace.json"
    engines = f"--at {address(prefill)} --at {address(decode)}"
    result = nixl_kv(f"trace {engines} --out {out}")
    assert result.exit_code == 0, result.output
    events = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    ranks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [*ranks.values()] == ["engine P, rank 0", "engine D, rank 0", "engine D, rank 1"]
    slices = [event for event in events if event["ph"] == "X"]
    states = {(ranks[e["pid"]], e["args"]["request"], e["name"]) for e in slices}
    assert states >= {
        *[("engine P, rank 0", f"p{number}", "GRANTED") for number in (1, 2)],
        *[(f"engine D, rank {rank}", f"d{n}", "READING") for rank in (0, 1) for n in (1, 2)],
    }
    for one in slices:
        assert one["dur"] >= 0
    ended = [e for e in events if e["ph"] == "i" and e["name"] == "DONE"]
    assert len(ended) == 4
    assert all(event["args"]["num_bytes"] > 0 for event in ended)

    nixl_kv(f"trace {engines} --request d2 --out {out}")
    events = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    requests = {event["args"].get("request") for event in events if event["ph"] != "M"}
    assert requests - {""} == {"d2"}
