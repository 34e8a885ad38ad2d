"""An engine of one rank, with the scheduler's halves of the connector: all but vLLM and NIXL.

    PYTHONPATH=... python -m support.scheduled_engine NAME KEY_FILE

is one in a process of its own, of whichever nixl_kv is found first: it is told on its standard
input what to do, in JSON, a line each.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import nixl_kv
from harness.local.caches import Cache, Sizes
from harness.local.engine import HOST, LocalEngine
from harness.local.memory import Fabric, MemoryTransport
from nixl_kv.config import Config
from nixl_kv.connector.decode import DecodeScheduler, Prompt
from nixl_kv.connector.paging import Paging, RequestBlocks
from nixl_kv.connector.prefill import Address, PrefillScheduler
from nixl_kv.engine.trust import Trust
from nixl_kv.errors import RemoteProtocolError
from nixl_kv.ids import RequestId
from nixl_kv.protocol.ticket import WIRE_VERSION
from support.cache_manager import CacheManager

WAIT_S: Final = 60.0
TOKENS: Final = tuple(range(100, 111))  # of every prompt
TABLE: Final = (7, 3, 4)


class ScheduledEngine:
    """Prefill and decode. Steps happen when `step` is called, and while it waits."""

    def __init__(self, name: str, key_file: str) -> None:
        """Start it; nobody can read what it offers."""
        sizes = Sizes()
        self._cache = Cache(sizes)
        config = Config(host=HOST, key_file=key_file, offer_ttl_s=5.0, request_timeout_s=600.0)
        trust = Trust.of(config)
        self.local = LocalEngine(
            name,
            [self._cache.layout()],
            lambda: MemoryTransport(Fabric()),
            config=config,
        )
        self._manager = CacheManager()
        blocks = RequestBlocks([Paging(0, sizes.tokens, 0)], sizes.blocks, self._manager)
        self._prefill = PrefillScheduler(blocks, 1.0, trust.seal)
        description, port = self.local.description, self.local.directory.port
        self._prefill.address = Address(description.engine, description.incarnation, HOST, port)
        self._decode = DecodeScheduler([Paging(0, sizes.tokens, 0)], trust.check)

    def about(self) -> dict[str, Any]:
        """Its wire version, where its code is, and where it listens."""
        return {
            "version": WIRE_VERSION,
            "file": nixl_kv.__file__,
            "port": self.local.directory.port,
            "rank": self.local.description.ranks[0].endpoint,
        }

    def offer(self, request: str) -> dict[str, Any]:
        """Compute a prompt, and give its ticket out."""
        name = RequestId(request)
        self._manager.tables[request] = [TABLE]
        prompt = Prompt(name, len(TOKENS), TOKENS)
        self._prefill.on_new_request(name, len(TOKENS), prompt.context)
        self.step((name, range(len(TOKENS))))
        is_pinned, params = self._prefill.request_finished(name, [TABLE], reason="")
        self.step()
        assert is_pinned
        assert params is not None
        return params

    def ask(self, request: str, params: Mapping[str, Any]) -> str | None:
        """A request brings a ticket; why it is computed here, None if it is not."""
        refusal = None
        try:
            self._decode.on_new_request(Prompt(RequestId(request), len(TOKENS), TOKENS), params)
        except RemoteProtocolError as error:
            refusal = str(error)
        self.step()
        return refusal

    def matched(self, request: str) -> Sequence[object]:
        """How many tokens are to be loaded for it, and whether it waits for them."""
        return list(self._decode.get_num_new_matched_tokens(RequestId(request), 0))

    def failure(self, request: str) -> str | None:
        """It gets blocks: why its load fails."""
        name = RequestId(request)
        num_tokens, _ = self._decode.get_num_new_matched_tokens(name, 0)
        self._decode.update_state_after_alloc(name, [TABLE], num_tokens)
        self.step()
        return self.local.wait_failure(request, WAIT_S)

    def finish(self, request: str) -> None:
        self._decode.request_finished(RequestId(request))
        self.step()

    def offer_end(self, request: str) -> str:
        """How an offer ends. As vLLM does while blocks are held, it steps each millisecond."""
        (rank,) = self.local.ranks

        def has_ended() -> bool:
            self.step()
            return RequestId(request) in rank.offers

        self.local.wait(has_ended, WAIT_S)
        self._prefill.update_connector_output([RequestId(request)])
        return rank.offers[RequestId(request)].value

    def step(self, *scheduled: tuple[RequestId, range]) -> None:
        commands = self._prefill.build_connector_meta(scheduled)
        self.local.submit(*commands, *self._decode.build_connector_meta())

    def close(self) -> None:
        self.local.close()


class EngineProcess:
    """The same in another process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> Any:
            print(json.dumps([method, *arguments]), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())  # type: ignore[union-attr]

        return call


@contextmanager
def engine_process(name: str, key_file: str, package: Path) -> Iterator[EngineProcess]:
    """An engine of the nixl_kv in the folder `package`; it is ended whatever happens."""
    tests = Path(__file__).resolve().parents[1]
    paths = (package, tests, tests.parent / "scripts")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "support.scheduled_engine", name, key_file],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield EngineProcess(process)
            process.stdin.close()  # type: ignore[union-attr]
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


def main() -> None:
    name, key_file = sys.argv[1:]
    engine = ScheduledEngine(name, key_file)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        sys.stdout.write(json.dumps(getattr(engine, method)(*arguments)) + "\n")
        sys.stdout.flush()
    engine.close()


if __name__ == "__main__":
    main()
