"""Asks engines as a router does, many requests at a time, and notes when each token came."""

import asyncio
import itertools
import json
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from typing_extensions import Self

from lab.cluster.client import COMPLETIONS, TIMEOUT_S, WANT_TICKET


@dataclass
class Stream:
    """What became of one request. Moments are of `time.perf_counter`."""

    begin: float
    decode_begin: float = 0.0
    """When decode was asked; where one engine does all, that is when it was asked."""

    moments: list[float] = field(default_factory=list)
    """Of each piece of the answer."""

    error: str = ""

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.moments[0] - self.begin

    @property
    def decode_leg(self) -> float:
        """Seconds from decode's request to its first token."""
        return self.moments[0] - self.decode_begin

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return _gaps(self.moments)


class Asker:
    """Connections to prefill and decode; or to what does all, if `prefill` is None."""

    def __init__(self, decode: str, prefill: str | None = None, model: str = "tiny") -> None:
        """For base URLs."""
        self._model = model
        self._has_prefill = prefill is not None
        self._decode, self._prefill = (
            httpx.AsyncClient(
                base_url=url,
                timeout=TIMEOUT_S,
                trust_env=False,
                verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
                limits=httpx.Limits(max_connections=None),
            )
            for url in (decode, prefill or decode)
        )

    async def __aenter__(self) -> Self:
        """Connections are closed at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close them."""
        await self._decode.aclose()
        await self._prefill.aclose()

    async def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        prefill_first: bool = True,
        ticket: Mapping[str, Any] | None = None,
        gaps: list[float] | None = None,
    ) -> Stream:
        """An answer of so many tokens; an error is part of what comes back.

        Prefill is asked first, but with its `ticket`, or without `prefill_first`: then decode
        computes what it has not cached. Seconds between tokens are added to `gaps` as they pass.
        """
        stream = Stream(time.perf_counter())
        try:
            extra = ticket or {}
            if prefill_first and self._has_prefill and ticket is None:
                extra = await self.ticket(prompt)
            stream.decode_begin = time.perf_counter()
            body = self._body(prompt, max_tokens) | {"stream": True, **extra}
            async with self._decode.stream("POST", COMPLETIONS, json=body) as reply:
                if reply.is_error:
                    await reply.aread()
                    stream.error = f"decode: HTTP {reply.status_code}: {reply.text[:200]}"
                async for line in reply.aiter_lines():
                    if line.startswith("data: {") and _has_token(line):
                        stream.moments.append(time.perf_counter())
                        if gaps is not None:
                            gaps += _gaps(stream.moments[-2:])
        except (httpx.HTTPError, ValueError) as error:
            stream.error = str(error) or repr(error)
        if not stream.error and not stream.moments:
            stream.error = "the stream ended without a token"
        return stream

    async def ticket(self, prompt: Sequence[int]) -> dict[str, Any]:
        """What prefill answers, to be sent to decode.

        Raises:
            httpx.HTTPError, ValueError: if it does not.
        """
        body = self._body(prompt, 1) | {"kv_transfer_params": WANT_TICKET}
        reply = await self._prefill.post(COMPLETIONS, json=body)
        if reply.is_error:
            raise ValueError(f"prefill: HTTP {reply.status_code}: {reply.text[:200]}")
        return {"kv_transfer_params": reply.json().get("kv_transfer_params")}

    def _body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


async def sleep_until(moment: float) -> None:
    """Of `time.perf_counter`."""
    await asyncio.sleep(max(0.0, moment - time.perf_counter()))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that so many of 100 do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 100) // 10_000) - 1)]


def _has_token(line: str) -> bool:
    choices = json.loads(line.removeprefix("data: ")).get("choices") or ()
    return any(choice.get("text") for choice in choices)


def _gaps(moments: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(moments)]
