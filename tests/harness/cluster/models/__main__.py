"""Make a tiny model with random weights in a folder.

The flags are those of the family: --family FAMILY --help shows them.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from harness.cluster.models import FAMILIES
from harness.cluster.models.files import write_model
from harness.cluster.models.qwen3 import TinyModel


def main() -> None:
    """Write it, from the command line."""
    parser = argparse.ArgumentParser(
        prog="harness.cluster.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("--family", choices=list(FAMILIES), default=TinyModel.family)
    family = FAMILIES[parser.parse_known_args()[0].family]
    parser.add_argument("--help", "-h", action="help")
    parser.add_argument("folder", type=Path)
    for name, value in asdict(family()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(value), default=value, help=f"default {value}")
    options = vars(parser.parse_args())
    folder, _ = options.pop("folder"), options.pop("family")
    write_model(folder, family(**options))
    print(folder)


if __name__ == "__main__":
    main()
