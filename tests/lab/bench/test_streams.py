"""Requests as a router sends them, when they arrive, and what is counted of their answers."""

import asyncio
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import Self

from lab.bench import load, vllm_client
from lab.bench.arrivals import Arrival, poisson, prompts, recorded
from lab.bench.streams import Asker, Stream, percentile

TICKET = {"ticket": "abc"}


class Server:
    """Stands for prefill and for decode: two tokens to whoever asks, and a ticket."""

    def __init__(self, status: int = 200) -> None:
        self.asked: list[dict[str, Any]] = []
        self._status = status

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        (length,) = (int(line[15:]) for line in head.splitlines() if "content-length" in line)
        body = json.loads(await reader.readexactly(length))
        self.asked.append(body)
        pieces = [{"choices": [{"text": text}]} for text in ("a", "", "b")]
        if body.get("stream"):
            text = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]"
        else:
            text = json.dumps({"kv_transfer_params": TICKET})
        writer.write(
            f"HTTP/1.1 {self._status} X\r\nconnection: close\r\n"
            f"content-length: {len(text)}\r\n\r\n{text}".encode()
        )
        await writer.drain()
        writer.close()


def ask(prefill: Server | None, decode: Server, **options: Any) -> Stream:
    async def run() -> Stream:
        async with decode:
            if prefill is None:
                async with Asker(decode.url) as asker:
                    return await asker.ask([5, 6], 2, **options)
            async with prefill, Asker(decode.url, prefill.url) as asker:
                return await asker.ask([5, 6], 2, **options)

    return asyncio.run(run())


def test_decode_gets_the_ticket_of_prefill() -> None:
    prefill, decode = Server(), Server()
    stream = ask(prefill, decode)
    assert not stream.error
    assert len(stream.moments) == 2  # a piece without text is no token
    assert stream.first > stream.decode_leg > 0
    assert [body["max_tokens"] for body in (*prefill.asked, *decode.asked)] == [1, 2]
    assert prefill.asked[0]["kv_transfer_params"]["do_remote_decode"] is True
    assert decode.asked[0]["kv_transfer_params"] == TICKET


@pytest.mark.parametrize("prefill", [None, Server()], ids=["one engine", "a pair"])
def test_decode_may_be_asked_alone(prefill: Server | None) -> None:
    decode, gaps = Server(), list[float]()
    stream = ask(prefill, decode, prefill_first=False, gaps=gaps)
    assert "kv_transfer_params" not in decode.asked[0]
    assert gaps == stream.gaps
    assert len(gaps) == 1


@pytest.mark.parametrize("failing", ["prefill", "decode"])
def test_failure_is_what_comes_back(failing: str) -> None:
    prefill, decode = (Server(500 if role == failing else 200) for role in ("prefill", "decode"))
    assert ask(prefill, decode).error.startswith(f"{failing}: HTTP 500")


def test_arrivals_are_the_same_for_the_same_seed() -> None:
    first, again, other = (poisson(50, 100, (1024, 16384), 128, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert 4500 < len(first) < 5500
    assert all(0 < one.second < 100 for one in first)
    lengths = [one.prompt_tokens for one in first]
    assert 1024 <= min(lengths) < 1100
    assert 10_000 < max(lengths) <= 16384
    assert 4500 < statistics.mean(lengths) < 5100


def test_no_two_prompts_begin_alike() -> None:
    arrivals = [Arrival(0, 40, 1)] * 20
    every = prompts(arrivals, 0)
    assert every == prompts(arrivals, 0)
    assert len({tuple(one[:16]) for one in every}) == 20


def test_recorded_arrivals_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.jsonl"
    path.write_text(
        '{"second": 0.5, "prompt_tokens": 7, "answer_tokens": 2}\n\n'
        '{"second": 1, "prompt_tokens": 8, "answer_tokens": 3}\n',
        encoding="utf-8",
    )
    assert recorded(path) == [Arrival(0.5, 7, 2), Arrival(1, 8, 3)]


@pytest.mark.parametrize(
    ("share", "expected"), [(50, 50), (99, 99), (99.9, 100), (100, 100), (0, 1)]
)
def test_percentile_is_one_of_the_values(share: float, expected: int) -> None:
    assert percentile(range(100, 0, -1), share) == expected


def test_load_counts_what_was_answered() -> None:
    streams = [
        Stream(0.0, 0.25, [0.5, 0.75, 1.0]),
        Stream(1.0, 1.5, [2.0, 3.0]),
        Stream(1.0, error="gone"),
    ]
    assert load.figures_of(streams, [Arrival(0, 10, 3), Arrival(1, 20, 2), Arrival(1, 30, 2)]) == {
        "prompt tokens": 20,
        "TTFT p50 ms": 500,
        "TTFT p99 ms": 1000,
        "leg p50 ms": 250,
        "leg p99 ms": 500,
        "gap p50 ms": 250,
        "gap p99 ms": 1000,
        "gap max ms": 1000,
        "tokens/s": pytest.approx(5 / 3),
    }


def test_trace_for_vllms_client_has_each_prompt_in_one_chunk() -> None:
    lines = vllm_client.trace_lines([Arrival(0.5, 700, 8), Arrival(1, 9, 3)], 3)
    first, second = map(json.loads, lines)
    assert first == {
        "timestamp": 0.5,
        "input_length": 700,
        "output_length": 8,
        "hash_ids": ["3/0"],
    }
    assert second["hash_ids"] == ["3/1"]


def test_result_of_vllms_client_is_read_by_our_headings() -> None:
    result = {
        "p50_ttft_ms": 1.0,
        "p99_ttft_ms": 2.0,
        "p50_itl_ms": 3.0,
        "p99_itl_ms": 4.0,
        "itls": [[0.001, 0.005], []],
        "output_throughput": 9.0,
        "completed": 3,
    }
    figures, faults = vllm_client.figures_of(result, 4)
    assert figures["gap max ms"] == 5
    assert figures["TTFT p99 ms"] == 2
    assert faults == ["1 failed"]
