"""The items of the recall task, for lm-eval."""  # noqa: INP001 - lm-eval loads it by its path

import json
import os
import random
from pathlib import Path

from datasets import Dataset, DatasetDict

HELDOUT = Path(__file__).resolve().parent.parent / "recall" / "heldout.jsonl"


def load(**_: object) -> DatasetDict:
    """Lines of {"prompt": ..., "answer": ...} as the split `test`. lm-eval passes its metadata.

    Shuffled, always in the same way, so that a limit takes short and long ones.
    """
    path = Path(os.environ.get("RECALL_HELDOUT") or HELDOUT)
    lines = path.read_text(encoding="utf-8").split("\n")
    items = [json.loads(line) for line in lines if line]
    random.Random(0).shuffle(items)  # noqa: S311 - the same order every time
    return DatasetDict({"test": Dataset.from_list(items)})
