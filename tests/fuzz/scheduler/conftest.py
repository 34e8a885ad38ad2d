"""Where vLLM is not installed, there is nothing to test."""

import warnings

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what its modules warn of while they are imported
        import vllm.v1.core.sched.scheduler  # noqa: F401
except ImportError:
    collect_ignore = ["test_lives.py"]
