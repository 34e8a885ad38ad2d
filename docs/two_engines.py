"""Two processes move one request's KV with nixl_kv, without vLLM: `python docs/two_engines.py`.

They do what a prefill and a decode engine do; docs/library.md explains it. The caches are as
FlashInfer has them: [blocks, 2, heads, tokens, head size] for each layer.
"""

import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from nixl_kv.config import Config
from nixl_kv.engine.directory import DirectoryServer, describe_engine
from nixl_kv.engine.engine import RankSpec, TransferEngine
from nixl_kv.engine.trust import Trust
from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span, Table
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.ids import EngineId, Rank, RequestId, new_claim, new_nonce
from nixl_kv.protocol.events import (
    LoadEnded,
    OfferEnded,
    PrepareLoad,
    PrepareOffer,
    PublishOffer,
    StartLoad,
)
from nixl_kv.protocol.messages import RankDescription
from nixl_kv.protocol.ticket import Ticket, context_hash
from nixl_kv.transport.nixl import nixl_transports

CONFIG = Config()  # one machine; between machines: Config(host="10.0.0.1", key_file="/etc/kv.key")
TRUST = Trust.of(CONFIG)
MODEL = {"served_model_name": "my-model", "dtype": "float32"}  # facts that both engines share
SHAPE = (2, 12, 2, 4, 16, 32)  # layers, blocks, K and V, heads, tokens, head size
PROMPT = list(range(40))  # token ids
PREFILL_BLOCKS, DECODE_BLOCKS = [3, 4, 0], [7, 2, 9]  # of the prompt, on either side

_Result = TypeVar("_Result", LoadEnded, OfferEnded)


def describe(cache: torch.Tensor, first_head: int = 0) -> CacheLayout:
    """Describe a cache of the shape above. Its heads are `first_head` and following."""
    size = cache.element_size()
    block, kv, head, token = (stride * size for stride in cache.stride()[1:5])
    content = cache.shape[5] * size  # bytes of K, and of V, of one head of one token
    regions = tuple(
        Region(
            layer=f"layer.{number}",
            base=layer.data_ptr(),
            block_stride=block,
            head_stride=head,
            token_stride=token,
            first_head=first_head,
            num_heads=cache.shape[3],
            parts=(Part(0, content), Part(kv, content)),
            element=str(cache.dtype),
        )
        for number, layer in enumerate(cache)
    )
    group = Group(cache.shape[4], cache.shape[1], blocks_per_entry=1, regions=regions)
    span = Span(cache.data_ptr(), cache.nbytes)
    return CacheLayout(
        (group,), "VRAM" if cache.is_cuda else "DRAM", cache.device.index or 0, (span,)
    )


def start(
    name: str, cache: torch.Tensor, *, is_prefill: bool
) -> tuple[TransferEngine, RankDescription]:
    """Start the transfer engine of an engine's only rank. Others need its description."""
    layout = describe(cache)
    make_transport, ports = nixl_transports(CONFIG, layout.memory)
    spec = RankSpec(
        engine=EngineId(name),
        rank=Rank(0),
        layout=layout,
        model=MODEL,
        config=CONFIG,
        host=CONFIG.host,
        is_prefill=is_prefill,
        is_decode=not is_prefill,
        make_transport=make_transport,
        ports=ports,
        make_control=TRUST.control,
    )
    engine = TransferEngine(spec)
    return engine, engine.start()


def wait(engine: TransferEngine, kind: type[_Result]) -> _Result:
    """Wait for a result. An inference engine looks for results between two steps of its model."""
    while True:
        for result in engine.pop_results():
            if isinstance(result, kind):
                return result
        time.sleep(0.001)


def computed_cache() -> torch.Tensor:
    """Return a cache as after the computation of the prompt."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


def prefill(pipe: Connection) -> None:
    """Offer the prompt's blocks, send the ticket, and keep the blocks until the offer ends."""
    cache = computed_cache()
    engine, rank = start("prefill", cache, is_prefill=True)
    description = describe_engine(engine.spec.engine, MODEL, ParallelShape(tp=1, pp=1), [rank])
    directory = DirectoryServer(TRUST.control(), CONFIG.host, port=0)
    directory.publish(description)
    directory.start()

    nonce, request = new_nonce(), RequestId("p1")
    context = context_hash(nonce, PROMPT, extras=[])
    tables = (Table.of(PREFILL_BLOCKS),)  # one block table for each cache group
    engine.submit([PrepareOffer(nonce, request, context, len(PROMPT), tables)])
    # Compute the prompt here. From now on its blocks must not change.
    engine.submit([PublishOffer(nonce, request)])
    ticket = Ticket(
        engine=engine.spec.engine,
        host=directory.host,
        port=directory.port,
        incarnation=description.incarnation,
        nonce=nonce,
        num_tokens=len(PROMPT),
        context=context,
    )
    pipe.send(TRUST.seal(ticket))  # a dict of JSON types, for the request to decode
    pipe.send(wait(engine, OfferEnded).end)
    directory.stop()
    engine.stop()


def decode(pipe: Connection) -> tuple[torch.Tensor, LoadEnded]:
    """Read the blocks that a ticket offers into other blocks."""
    cache = torch.zeros(SHAPE)
    engine, _ = start("decode", cache, is_prefill=False)
    ticket = TRUST.check(pipe.recv()).open()
    if ticket.context != context_hash(ticket.nonce, PROMPT, extras=[]):
        raise ValueError("the ticket is of another prompt")
    request = RequestId("d1")
    engine.submit([PrepareLoad(request, ticket, new_claim())])
    # The request may wait here for free blocks; prefill holds its own meanwhile.
    tables = (Table.of(DECODE_BLOCKS),)
    engine.submit([StartLoad(request, 0, len(PROMPT), tables, verify=True)])
    ended = wait(engine, LoadEnded)  # after a failure, compute the prompt here
    engine.stop()
    return cache, ended


def main() -> tuple[torch.Tensor, LoadEnded]:
    """Run both."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=prefill, args=(there,))
    process.start()
    there.close()  # so that `recv` raises if the other process ends
    cache, ended = decode(here)
    print(f"load: {ended.failure or 'good'}, offer: {here.recv().value}")
    process.join()
    return cache, ended


if __name__ == "__main__":
    main()
