"""How many tokens the texts of a data set have."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from transformers import AutoTokenizer

from autocompile.catalogue import tokenizer_of
from autocompile.lengths import Texts
from autocompile.spec import WorkloadSpec
from autocompile.workloads.job import WorkloadError


def token_counts(found: Texts, workload: WorkloadSpec) -> tuple[int, ...]:
    """By the tokenizer asked for, else the model's own. Raises WorkloadError where that cannot be loaded."""
    return _counted(tokenizer_of(workload.model, workload.tokenizer), found, workload.trust_remote_code)


@cache
def _counted(name: str | None, found: Texts, trust_remote_code: bool) -> tuple[int, ...]:
    if name is not None and name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise WorkloadError(f"tokenizer {name}: there is no such directory")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise WorkloadError(f"tokenizer {name}: {reason}") from error
    return tuple(len(ids) for ids in tokenizer(list(found.texts))["input_ids"])
