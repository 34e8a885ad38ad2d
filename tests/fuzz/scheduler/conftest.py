"""Where vLLM is not installed, there is nothing to test."""

import logging
import warnings
from collections.abc import Iterator

import pytest

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what its modules warn of while they are imported
        import vllm.v1.core.sched.scheduler  # noqa: F401
except ImportError:
    collect_ignore = ["test_lives.py", "test_reads.py"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Lives log thousands of lines, and a connector changes our logger."""
    logger = logging.getLogger("nixl_kv")
    before = logger.handlers, logger.level, logger.propagate
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])
