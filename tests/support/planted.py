"""What an engine with planted faults has logged: what was planted, and what `verify` has found."""

import re

from harness.cluster.engines import Engine

ROW = r"(?P<row>[\w ]+ of head \d+ of layer .+?)(?: and (?P<more>\d+) more(?: heads)?)?"
PLANTED = re.compile(
    r"planted \w+ in request (?P<request>\S+): "
    rf"{ROW}, tokens (?P<first>\d+) to (?P<last>\d+)"
)
SEEN = re.compile(
    r"request (?P<request>\S+): KV not loaded: the bytes from prefill rank 0 are wrong: "
    rf"{ROW} differs in tokens (?P<first>\d+) to (?P<last>\d+) "
    r"\(blocks \d+ to \d+ of the request; \d+ of \d+ columns of 64 tokens\) \(corrupt"
)


def expect_named(engine: Engine) -> list[str]:
    """Each planted fault was found, by its layer, part, head and tokens; those rows, in order."""
    log = engine.log_text()
    faults = {fault["request"]: fault for fault in PLANTED.finditer(log)}
    found = {failure["request"]: failure for failure in SEEN.finditer(log)}
    assert faults.keys() == found.keys()
    for request, fault in faults.items():
        failure = found[request]
        assert failure["row"] == fault["row"]
        assert int(failure["more"] or 0) == int(fault["more"] or 0)
        assert int(failure["first"]) <= int(fault["first"])
        assert int(fault["last"]) <= int(failure["last"])
    return [fault["row"] for fault in faults.values()]
