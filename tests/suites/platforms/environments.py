"""Environments for platforms that want other packages than ours, each in a folder of its own."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lab.results import say_on_stderr

REPO: Final = Path(__file__).resolve().parents[3]
ENVIRONMENTS: Final = REPO / ".environments"
INSTALLED: Final = ".nixl-kv-installed"
"""Written by scripts/install."""
STAMP: Final = ".platform-installed"
NEVER: Final = '; sys_platform == "never"'
"""A marker: the package is not installed. CPU builds stand in for some, and some are not needed."""
FOR_CPU: Final = (
    f"vllm {NEVER}",
    f"torchvision {NEVER}",
    f"torchaudio {NEVER}",
    f"torchcodec {NEVER}",
    "nixl==1.5.1",
    "nixl-cu12==1.5.1",
    "nixl-cu13==1.5.1",
)
"""What counts instead of what any platform's packages say."""


@dataclass(frozen=True)
class Environment:
    """vLLM's CPU build of some version, this checkout, and packages that do not ask for CUDA."""

    name: str
    vllm: str
    packages: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    """Such requirements beside FOR_CPU."""

    def ensure(self) -> Path:
        """Its interpreter; what is missing is installed now, in minutes at the first time."""
        folder = ENVIRONMENTS / self.name
        install = REPO / "scripts" / "install"
        subprocess.run([install, "--quiet", "--vllm", self.vllm, "--venv", folder], check=True)
        python, stamp = folder / "bin" / "python", folder / STAMP
        overridden = "\n".join((*FOR_CPU, *self.overrides))
        lines = [(folder / INSTALLED).read_text(), *self.packages, "overrides", overridden]
        wanted = "\n".join(lines)
        if not stamp.exists() or stamp.read_text() != wanted:
            say_on_stderr(f"installing {', '.join(self.packages)} into {folder}")
            overrides = folder / "platform-overrides"
            overrides.write_text(overridden + "\n")
            command = [str(folder / "bin" / "uv"), "pip", "install", "--quiet"]
            command += ["--python", str(python), "--compile-bytecode"]
            command += ["--override", str(overrides), *self.packages]
            subprocess.run(command, check=True)
            stamp.write_text(wanted)
        return python
