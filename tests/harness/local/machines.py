"""Names the counts of a rank."""

from nixl_kv.protocol import events


def by_name(counts: events.Counts) -> dict[str, float]:
    """Amounts by `name` or `name label`; of durations, how many there are. Without the peers."""
    numbers = counts.amounts | {series: len(times) for series, times in counts.seconds.items()}
    return {" ".join(series).strip(): n for series, n in numbers.items() if series[0] != "peers"}
