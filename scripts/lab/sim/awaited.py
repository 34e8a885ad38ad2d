"""What the code does not keep yet: profiles and endings that wait for it.

Random schedules leave them out unless they are named, and tests of them are expected to fail. A
name goes when the code keeps its promise; this file goes with the last one.
"""

from typing import Final

AWAITED: Final = frozenset(
    {
        "frozen",  # what an engine held when it fell asleep is never reported
    }
)
