"""The transfer thread's life: started once per life of a rank, and never ended by a fault.

vLLM's step thread talks to it through two deques only: commands in, results out. An error that
reaches its top is a bug of ours, and leaves the machines in doubt. So the thread reports it, fails
all that it holds, and begins anew; vLLM's engine and the requests to come are not touched.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Final

from nixl_kv.connector.engine import Loop, Machinery
from nixl_kv.connector.results import Result
from nixl_kv.protocol import events

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 5.0
PAUSE_S: Final = 0.1
"""Between an error at the top and the next turn, so that one that recurs leaves the CPU alone."""


class TransferThread:
    """See the module's head. `submit`, `take` and `stop` are for the step thread."""

    def __init__(self, factory: Callable[[], Machinery]) -> None:
        """Prepare; `start` begins. The factory runs on the new thread, and may raise."""
        self._factory = factory
        self._commands: deque[events.Command] = deque()
        self._results: deque[Result] = deque()
        self._started: Future[Machinery] = Future()
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="nixl-kv-transfer", daemon=True)

    def start(self) -> Machinery:
        """Start, and wait until the machinery stands.

        Raises:
            NixlKVError: what the factory raised.
        """
        self._thread.start()
        return self._started.result()

    def submit(self, commands: Iterable[events.Command]) -> None:
        """Hand over commands, in order."""
        before = len(self._commands)
        self._commands.extend(commands)
        if len(self._commands) > before:
            self._started.result().control.wake()

    def take(self) -> list[Result]:
        """Fetch the results that are there, in order."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def stop(self) -> None:
        """End the thread, and then close what it owned: while it runs, nobody else may."""
        if not self._thread.is_alive():
            return
        machinery = self._started.result()
        self._stopping = True
        machinery.control.wake()
        self._thread.join(timeout=STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            machinery.close()

    def _main(self) -> None:
        """The thread's top."""
        _leave_pinned_core()
        try:
            machinery = self._factory()
        except BaseException as error:  # noqa: BLE001 - raised again where the start is waited for
            self._started.set_exception(error)
            return
        loop = Loop(machinery, self._commands, self._results)
        self._started.set_result(machinery)
        step: Callable[[], None] = loop.turn
        while not self._stopping:
            step = loop.turn if _survives(step) else loop.restart


def _survives(step: Callable[[], None]) -> bool:
    """Run a step of the loop; False if it died of an error, which is logged."""
    try:
        step()
    except Exception:
        logger.critical("the transfer thread died; failing what it holds", exc_info=True)
        time.sleep(PAUSE_S)
        return False
    return True


def _leave_pinned_core() -> None:
    """Run on the cores of the parent process.

    vLLM may have bound this process's main thread to one core, which threads inherit, and NIXL's
    threads from this one; there they would wait behind the model's computation. Only this thread
    is moved.
    """
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    except OSError as error:
        logger.debug("the transfer thread stays on its cores: %s", error)
