"""lm-eval's command line, with the tasks of --include_path alone.

lm-eval reads its own 14,000 files of tasks at each start: 33 of the 53 s of CPU time that it used
before its first request, on two busy cores. Transformers, for a tokenizer, were 16 s more.

    python -m lab.accuracy.lm_eval_cli run --include_path configs/lm_eval --tasks recall ...
"""

from functools import partial

from lm_eval import tasks  # type: ignore[import-untyped]
from lm_eval.__main__ import cli_evaluate  # type: ignore[import-untyped]

if __name__ == "__main__":
    tasks.TaskManager = partial(tasks.TaskManager, include_defaults=False)
    cli_evaluate()
