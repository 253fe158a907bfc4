"""What torch says in warnings only: why an attention kernel cannot run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from autocompile.records import Failure, FailureKind


@contextmanager
def recorded_warnings(texts: list[str]) -> Iterator[None]:
    """Add the text of each warning to the list, and show it as always."""
    show = warnings.showwarning

    def keep(message: Warning | str, *rest: object, **named: object) -> None:
        texts.append(str(message))
        show(message, *rest, **named)  # type: ignore[arg-type]

    warnings.showwarning = keep
    try:
        yield
    finally:
        warnings.showwarning = show


def with_reasons(failure: Failure, texts: Sequence[str]) -> Failure:
    """A failure for want of a kernel says why there was none."""
    reasons = _reasons(texts)
    if failure.kind is not FailureKind.BACKEND_UNSUPPORTED or not reasons:
        return failure
    return failure.model_copy(update={"message": f"{failure.message} ({'; '.join(dict.fromkeys(reasons))})"})


def _reasons(texts: Sequence[str]) -> list[str]:
    """torch names a kernel in one warning and why it was not used in the next; those we switched off say just that."""
    found: list[str] = []
    heading = ""
    for text in (text.split("(Triggered")[0].strip() for text in texts if "sdp_utils" in text):
        if text.endswith("because:"):
            heading = f"{text} "
        elif "runtime disabled" not in text:
            found.append(f"{heading}{text}")
    return found
