"""The transfer thread's life: started once per life of a rank, and never ended by a fault.

The caller's thread talks to it through two queues only: commands in, results out. An error that
reaches its top is a bug of ours, and leaves the machines in doubt. So the thread logs it, fails all
that it holds, and starts again with new machines; the caller and the requests to come are not
touched.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from nixl_kv.transfer.loop import Loop

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 5.0
PAUSE_S: Final = 0.1
"""Between an error at the top and the next turn, so that one that recurs leaves the CPU alone."""


class TransferThread:
    """Runs a `Loop` on a thread of its own."""

    def __init__(self, build_loop: Callable[[], Loop]) -> None:
        """Prepare; `start` starts it. `build_loop` runs on the new thread, and may raise."""
        self._build_loop = build_loop
        self._started: Future[Loop] = Future()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._main, name="nixl-kv-transfer", daemon=True)

    def start(self) -> Loop:
        """Start, and wait until the loop is built.

        Raises:
            NixlKVError: what `build_loop` raised.
        """
        self._thread.start()
        return self._started.result()

    @property
    def was_started(self) -> bool:
        """Whether there is, or was, a thread."""
        return self._thread.ident is not None

    def stop(self) -> None:
        """End the thread, and then close what it owned: while it runs, nobody else may."""
        if not self._thread.is_alive():
            return
        loop = self._started.result()
        self._is_stopping = True
        loop.wake()
        self._thread.join(timeout=STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the transfer thread hangs, and is left; no grant is valid any more")
            loop.parts.slots.clear_all()
        else:
            loop.close()

    def _main(self) -> None:
        """The thread's top."""
        _leave_pinned_core()
        try:
            loop = self._build_loop()
        except BaseException as error:  # noqa: BLE001 - raised again where the start is waited for
            self._started.set_exception(error)
            return
        self._started.set_result(loop)
        step: Callable[[], None] = loop.turn
        while not self._is_stopping:
            lived = survives(step, "the transfer thread died; failing what it holds")
            step = loop.turn if lived else loop.restart


def survives(step: Callable[[], object], words: str) -> bool:
    """Run a step of a thread, at its top; False if it died of an error, logged with these words."""
    try:
        step()
    except Exception:
        logger.critical(words, exc_info=True)
        time.sleep(PAUSE_S)
        return False
    return True


def _leave_pinned_core() -> None:
    """Run on the cores of the parent process.

    The caller may have bound this process's main thread to one core, as vLLM does on CPU. Threads
    inherit that, and NIXL's threads from this one; there they would wait behind the model's
    computation. Only this thread is moved.
    """
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    except OSError as error:
        logger.debug("the transfer thread stays on its cores: %s", error)
