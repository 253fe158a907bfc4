"""Pure decisions: what to measure next, what it will cost, what failures teach, and the verdict."""

from autocompile.search.best import best_config
from autocompile.search.canonical import candidates, canonical
from autocompile.search.history import tight_memory
from autocompile.search.objective import objective
from autocompile.search.planner import (
    Ask,
    Finished,
    Measure,
    Step,
    Wait,
    admissible,
    compile_deadline,
    next_step,
)
from autocompile.search.skipped import derived
from autocompile.search.treatment import (
    abort_reason,
    brake_reason,
    needs_spare_cache,
    of_broken_machine,
    state_after,
    treatment,
)
from autocompile.search.verdict import verdict

__all__ = [
    "Ask",
    "Finished",
    "Measure",
    "Step",
    "Wait",
    "abort_reason",
    "admissible",
    "best_config",
    "brake_reason",
    "candidates",
    "canonical",
    "compile_deadline",
    "derived",
    "needs_spare_cache",
    "next_step",
    "objective",
    "of_broken_machine",
    "state_after",
    "tight_memory",
    "treatment",
    "verdict",
]
