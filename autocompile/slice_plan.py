"""How long a slice measures, by the role of its trial."""

from __future__ import annotations

from autocompile.spec import Role
from autocompile.values import Value


class SlicePlan(Value):
    """How one slice measures: see `autocompile.slice.measure`."""

    interval: float  # half-width of the median's interval, as a share of the median, at which the window ends
    window_seconds: float  # the window ends then at the latest
    min_cycles: int = 5  # optimizer cycles a window holds at least
    preheat_seconds: float = 2.0  # of steps on a GPU before the window, so that its clock has settled
    repeats: bool = True  # a window that was throttled or disturbed, once


SEARCH_SLICE = SlicePlan(interval=0.02, window_seconds=5.0)
CONFIRM_SLICE = SlicePlan(interval=0.01, window_seconds=10.0)
SUSTAINED_SLICE = SlicePlan(interval=0.0, window_seconds=60.0, repeats=False)  # it is to see the heat


def slice_plan(role: Role) -> SlicePlan:
    """A probe is the winner's sustained minute: clocks fall as a GPU heats up, which a short window does not show."""
    match role:
        case Role.CONFIRM:
            return CONFIRM_SLICE
        case Role.PROBE:
            return SUSTAINED_SLICE
        case _:
            return SEARCH_SLICE
