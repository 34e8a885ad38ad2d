"""The scenes that are explored exhaustively, and what may happen in each."""

from dataclasses import dataclass
from typing import Final

from sim.schedule import Setting
from sim.world import Shape


@dataclass(frozen=True)
class Scene:
    """Where to begin, and what may happen then, any of it at any time; steps are apart by ';'."""

    name: str
    setting: Setting
    begin: str
    alphabet: str
    end: str = "end calm"


OFFERED: Final = "prefill 5 1; step p; step p; turn p.0"
ASKED: Final = f"{OFFERED}; decode d0 0 0; step d0; turn d0.0; deliver 0; deliver 0; turn d0.0"
"""The description is there, and the ask is under way; the request has blocks."""
READING: Final = f"{ASKED}; deliver 0; turn p.0; deliver 0; turn d0.0"
"""The data read is posted."""

SCENES: Final = (
    Scene(
        "one reader, while its peer is joined",
        Setting(Shape(apart=True)),
        ASKED,
        "deliver 0; turn d0.0; turn p.0; join d0.0; balk d0.0; land 0 0; die d0.0 3; step d0;"
        "abort d0 0; kill p; report 0; wait 4.1",
    ),
    Scene(
        "one reader, from the ask on",
        Setting(Shape()),
        ASKED,
        "deliver 0; lose 0; repeat 0; turn d0.0; turn p.0; land 0 0; step d0; step p; abort d0 0;"
        "wait 1.1",
    ),
    Scene(
        "one reader, while it reads",
        Setting(Shape()),
        READING,
        "land 0 1; turn d0.0; turn p.0; deliver 0; wait 1.1; wait 4.1; abort d0 0; step d0; step p;"
        "work d0.0",
    ),
    Scene(
        "one reader, while threads and engines die",
        Setting(Shape()),
        READING,
        "land 0 0; turn d0.0; turn p.0; die d0.0 3; die p.0 3; step d0; kill p; start p; report 0;"
        "work d0.0",
    ),
    Scene(
        "two readers of one rank",
        Setting(Shape(1, 2)),
        f"{OFFERED}; decode d0 0 0; step d0; turn d0.0; turn d0.1;"
        "deliver 0; deliver 0; deliver 0; deliver 0; turn d0.0; turn d0.1",
        "deliver 0; deliver 1; repeat 0; turn d0.0; turn d0.1; turn p.0; land 0 0; abort d0 0;"
        "wait 1.1",
    ),
    Scene(
        "two engines and one ticket",
        Setting(Shape(1, 1, engines=2)),
        f"{ASKED}; decode d1 0 0; step d1; turn d1.0; deliver 1; deliver 1; turn d1.0",
        "deliver 0; deliver 1; turn d0.0; turn d1.0; turn p.0; land 0 0; abort d0 0; abort d1 0;"
        "wait 1.1",
    ),
)
