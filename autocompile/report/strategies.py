"""Ways to train on several GPUs side by side, where a study compares them: what each reached, and what it took."""

from __future__ import annotations

from dataclasses import dataclass

from autocompile.records import TrialRecord
from autocompile.report.study import Row, Study, best_rows
from autocompile.spec import Parallel


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """``best`` is its fastest config, ``eager`` its fastest eager one; ``failed`` its last slice if none was measured.
    ``of_one`` is the speed over that of one GPU alone, which would be ``n_ranks`` if nothing were lost."""

    way: str
    n_ranks: int
    best: Row | None
    eager: Row | None
    failed: TrialRecord | None
    of_one: float | None


def strategies(study: Study) -> list[Strategy]:
    """The fastest first; empty where the study compares none."""
    if study.spec.workload.parallel is not Parallel.AUTO:
        return []
    tried: dict[str, list[TrialRecord]] = {}
    for record in study.records:
        tried.setdefault(str(record.config["parallel"]), []).append(record)
    rows = {way: best_rows(records, limit=2) for way, records in tried.items()}
    alone = rows[Parallel.NONE][0].tokens_per_second if rows.get(Parallel.NONE) else None
    found = [
        Strategy(
            way=way,
            n_ranks=study.spec.workload.n_ranks(records[0].config),
            best=best,
            eager=next((row for row in rows[way] if row.config["scope"] == "none"), None),
            failed=None if best else records[-1],
            of_one=best.tokens_per_second / alone if best and alone else None,
        )
        for way, records in tried.items()
        for best in [rows[way][0] if rows[way] else None]
    ]
    return sorted(found, key=lambda one: -one.best.tokens_per_second if one.best else 0.0)


def in_words(study: Study) -> str | None:
    """How much each way reached of what one GPU alone did."""
    told = [f"{one.way} {one.of_one:.2f}x" for one in strategies(study) if one.of_one and one.n_ranks > 1]
    return f"of one GPU's speed {', '.join(told)}" if told else None
