"""What came of one model: whether that is good, and how it is shown."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from lab.accuracy.evaluation import Job
from lab.results import Verdict, print_table, verdict_of

ROUNDING: Final = 1e-9
"""Of a difference that is just the tolerance."""
NONE_ALLOWED: Final[Mapping[str, str]] = {
    "load_failures_total": "loads failed: what decode recomputes proves nothing",
    "tickets_refused_total": "tickets were refused, and their prompts computed on decode",
    "tickets_missing_total": "prompts came to decode without a ticket, and were computed there",
}
NEEDED: Final = ("loads_total", "tokens_loaded_total", "bytes_read_total")


@dataclass(frozen=True)
class Outcome:
    """Of one model. In JSON it is all its fields, and its verdict."""

    model: str
    task: str
    instead_of: str
    """The names of models that could not be had."""
    expected: float | None
    tolerance: float
    verify: str | None
    ranks: int
    """Of a decode engine: each has loads of its own."""
    accuracy: float | None = None
    """Of prefill and decode apart; None if it was not evaluated."""
    items: int = 0
    errors: int = 0
    """Requests that failed, and were sent again."""
    computed: int = 0
    """How many tokens of the prompts decode neither had nor read."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """Of our connector, added up over the decode engines."""
    single: float | None = None
    """The accuracy of a single engine without connector; None if it was not evaluated."""
    differing: int | None = None
    """How many answers, right or wrong, are not the single engine's."""
    trouble: str = ""
    """What kept it from its end."""
    start_s: float = 0.0
    eval_s: float = 0.0
    single_eval_s: float = 0.0
    seconds: float = 0.0

    @classmethod
    def before(cls, job: Job) -> "Outcome":
        """Of a job that has not run."""
        subject, settings = job.subject, job.settings
        return cls(
            model=subject.name,
            task=subject.task,
            instead_of=subject.instead_of,
            expected=subject.expected,
            tolerance=subject.tolerance,
            verify=settings.verify,
            ranks=settings.decode.tensor_parallel,
        )

    @property
    def verdict(self) -> Verdict:
        """See `lab.results.Result`."""
        return verdict_of(*([self.trouble] if self.trouble else self._faults()))

    def cells(self) -> dict[str, str]:
        """See `lab.results.Result`."""
        shares = {"P/D": self.accuracy, "single": self.single, "expected": self.expected}
        return {
            "model": self.model,
            "task": self.task,
            **{name: "-" if share is None else f"{share:.4f}" for name, share in shares.items()},
            "tolerance": f"{self.tolerance:g}",
            "items": str(self.items),
            "differ": "-" if self.differing is None else str(self.differing),
            "errors": str(self.errors),
            "computed": str(self.computed),
            "start s": f"{self.start_s:.0f}",
            "eval s P/D": f"{self.eval_s:.0f}",
            "eval s single": "-" if self.single is None else f"{self.single_eval_s:.0f}",
            "wall s": f"{self.seconds:.0f}",
        }

    def print_details(self) -> None:
        """All counters, and what figures alone do not say."""
        counters = sorted(self.counters.items())
        rows = [
            {"name": name, "value": f"{value:,.0f}" if value == round(value) else f"{value:,.3f}"}
            for name, value in counters
            if value
        ]
        if rows:
            print_table(f"{self.model}: nixl_kv's counters, added up over decode engines", rows)
            print(f"0: {', '.join(name for name, value in counters if not value)}")
        if self.accuracy is not None and self.expected is None and self.single is None:
            print(
                f"{self.model}: {self.accuracy:.4f} was compared with NOTHING: no accuracy is "
                "known; set EXPECTED_ACCURACY, or compare with --single"
            )
        if self.instead_of:
            print(f"{self.instead_of}: NOT evaluated: no hub, and no local copy", flush=True)

    def _faults(self) -> Iterator[str]:
        if self.accuracy is None:
            yield "nothing was evaluated"
            return
        references = {"expected": self.expected, "the single engine": self.single}
        for name, value in references.items():
            if value is not None and abs(self.accuracy - value) > self.tolerance + ROUNDING:
                yield (
                    f"accuracy {self.accuracy:.4f} is not within {self.tolerance:g} of "
                    f"{value:.4f} ({name})"
                )
        yield from self._unproven()

    def _unproven(self) -> Iterator[str]:
        """What was not read over NIXL says nothing about it, however right it is."""
        for name, words in NONE_ALLOWED.items():
            if self.counters.get(name):
                yield f"{self.counters[name]:.0f} {words}"
        loads, verified = (
            round(self.counters.get(name, 0.0)) for name in ("loads_total", "loads_verified_total")
        )
        if not all(self.counters.get(name) for name in NEEDED):
            yield "nothing was loaded over NIXL: decode computed every prompt itself"
        else:
            wanted = self.items * self.ranks
            if loads < wanted:
                yield f"only {loads} of {wanted} loads: decode computed the other prompts"
            if self.computed > self.items:  # the last token of each is always computed
                yield f"decode computed {self.computed} tokens of {self.items} prompts itself"
        if self.verify == "all" and verified < loads:
            yield f"only {verified} of {loads} loads were verified by a digest"
        if self.errors:
            yield f"{self.errors} requests failed and were sent again"
