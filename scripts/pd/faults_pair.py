"""A prefill and a decode engine that faults happen to."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from typing_extensions import Self

from pd.client import Answer, Client
from pd.engines import Engine, EngineSpec
from pd.faults_asking import PrefillClient, Ticket
from pd.faults_deck import Question
from pd.netns import WIRE, Namespace, Wire
from pd.processes import GRACE_S, Ports
from pd.router import Router
from pd.waiting import wait_until

LOADS: Final = "vllm:nixl_kv_loads_total"
USAGE: Final = "vllm:kv_cache_usage_perc"
POKE: Final = "ba"  # one token
POLL_S: Final = 0.05
NUM_BLOCKS: Final = 81
"""Of either engine, one of them vLLM's own: few enough to run out."""


class Victim(Engine):
    """An engine that is killed, stopped and started again, as the same engine on the same ports."""

    def __init__(
        self, spec: EngineSpec, log_dir: Path, ports: Ports, *, host: Namespace | None = None
    ) -> None:
        """With a namespace it runs there, and its peer reads over the wire alone."""
        super().__init__(spec, log_dir, ports)
        self._host = host
        if host is not None:
            self.url = f"http://{host.address}:{self.port}"

    def command(self) -> list[str]:
        """The command line; of two addresses the last one counts."""
        command = [*super().command(), "--num-gpu-blocks-override", str(NUM_BLOCKS)]
        if self._host is None:
            return command
        return self._host.inside([*command, "--host", self._host.address])

    def environment(self) -> dict[str, str]:
        """TCP on the wire is the only transport between two hosts."""
        overridden = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": WIRE, "VLLM_HOST_IP": "127.0.0.1"}
        return super().environment() | (overridden if self._host else {})

    def kv_transfer_config(self) -> dict[str, object] | None:
        """An operator who names engines keeps the name over a restart."""
        config = super().kv_transfer_config()
        return config and config | {"engine_id": self.name}

    def freeze(self) -> None:
        """Stop all its processes where they are."""
        os.killpg(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        os.killpg(self.pid, signal.SIGCONT)

    def unplug(self) -> None:
        """Take its interface to the wire down."""
        self._the_host.ip("link", "set", WIRE, "down")

    def plug(self) -> None:
        """Take it up again."""
        self._the_host.ip("link", "set", WIRE, "up")

    @property
    def _the_host(self) -> Namespace:
        if self._host is None:
            raise RuntimeError(f"{self.name} is no host of its own")
        return self._host

    def end(self) -> None:
        """Ask it to end, as an operator does who updates it."""
        self.terminate()
        wait_until(lambda: not self.is_running(), GRACE_S)
        self.kill()

    def revive(self) -> None:
        """Start it again, and wait until it answers."""
        self.start()
        self.wait_ready()


@dataclass(frozen=True)
class Pair:
    """Both engines, as clients and routers see them. `wire` joins them if they are two hosts."""

    prefill: Victim
    decode: Victim
    wire: Wire | None = None
    router: Router | None = None


class Clients:
    """Connections to a pair: `source` to prefill, `target` to decode, `front` to the router."""

    def __init__(self, pair: Pair, patience_s: float) -> None:
        """How long a client waits for an answer before it counts as none."""
        self.source = PrefillClient(pair.prefill.url, timeout_s=patience_s)
        self.target = Client(pair.decode.url, timeout_s=patience_s)
        self.front = Client(pair.router.url if pair.router else "", timeout_s=patience_s)

    def __enter__(self) -> Self:
        """Connections are made when they are needed."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close them."""
        for client in (self.source, self.target, self.front):
            client.__exit__(*error)

    def apart(self, question: Question) -> Answer:
        """Prefill, then decode, as a router asks."""
        return self.decoded(question, self.source.offer(question))

    def decoded(self, question: Question, ticket: Ticket) -> Answer:
        """Decode alone, with a ticket that was taken before."""
        return self.target.complete(question.prompt, question.tokens, kv_transfer_params=ticket)

    def loads(self) -> float:
        """How many requests have read their KV since decode was started."""
        return self.target.counters().get(LOADS, 0.0)


def blocks_in_use(client: Client) -> int:
    """How many blocks of its cache an engine holds, for requests or for readers.

    The gauge is as of the last step, and an idle engine makes none: so one is made.
    """
    client.complete(POKE, 1)
    return round(client.counters()[USAGE] * (NUM_BLOCKS - 1))


def wait_until_free(client: Client, patience_s: float) -> tuple[int, float]:
    """Wait until it holds no block: how many it still does, and the seconds that passed."""
    begin = time.monotonic()
    while True:
        held = blocks_in_use(client)
        passed = time.monotonic() - begin
        if not held or passed > patience_s:
            return held, passed
        time.sleep(POLL_S)
