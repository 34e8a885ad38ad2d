"""Lets vLLM serve DeepSeek-V4 on CPU: Triton's interpreter, and repairs of vLLM.

Python imports this file at its start where PYTHONPATH names its folder. TRITON_INTERPRET must be 1.
"""

import runpy
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parent

REPAIRS: Final = runpy.run_path(str(FOLDER / "repairs.py"))["REPAIRS"]
runpy.run_path(str(FOLDER.parent / "after_import.py"))["change"](REPAIRS)
runpy.run_path(str(FOLDER.parent / "triton_on_cpu" / "sitecustomize.py"))
