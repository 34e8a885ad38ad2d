"""The GPUs that this process sees."""

import os


def visible(*numbers: int) -> dict[str, str]:
    """The environment of a child process that sees these of them alone."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(each) for each in range(max(numbers) + 1)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[each] for each in numbers)}
