"""`autocompile export`: a best config in the format of a trainer, with what that format loses."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autocompile.cli.flags import StorageFlag
from autocompile.errors import UserError
from autocompile.place import STORAGE

if TYPE_CHECKING:
    from autocompile.best_file import BestConfig
    from autocompile.export import Export
    from autocompile.report import Study

Subject = Annotated[str, typer.Argument(metavar="STUDY|FILE", help="A study, or a best-config file.")]
To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help="hf-trainer, accelerate, deepspeed, axolotl, llama-factory, trl, python or env.",
    ),
]
Output = Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where to write it.")]


def export(subject: Subject, to: To, output: Output, storage: StorageFlag = STORAGE) -> None:
    """Write a best config as the file of a trainer; what the format cannot say is listed at its end."""
    from autocompile.best_file import load
    from autocompile.export import exported
    from autocompile.export.document import documents, summary
    from autocompile.values import write_aside

    file = _file(subject)
    study = None if file else _study(subject, storage)
    best = load(file or subject) if study is None else _best(study)
    found = exported(best, to)
    costs = [] if study is None else _costs(study, best, found, to)
    written = documents(best, found, output, costs)
    _refuse_others(written)
    for path, text in written.items():
        try:
            write_aside(path, text)
        except OSError as error:
            raise UserError(f"-o {path}: {error.strerror}") from error
        print(f"wrote {path}")
    print("\n".join(summary(best, found, output, costs)[1:]))


def _file(subject: str) -> Path | None:
    """A best-config file, or that of a folder; None: the name of a study."""
    path = Path(subject)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path
    return path / "best.yaml" if (path / "best.yaml").is_file() else None


def _refuse_others(paths: Iterable[Path]) -> None:
    """What somebody else wrote is not overwritten."""
    from autocompile.export.document import MARK

    existing = [path for path in paths if path.is_file()]
    if existing and not any(MARK in path.read_text(errors="replace") for path in existing):
        raise UserError(f"-o {existing[0]}: exists, and is no export; give another name")


def _study(name: str, storage: str) -> Study:
    from autocompile.cli.stored import read_study

    return read_study(name, storage)


def _best(study: Study) -> BestConfig:
    from autocompile.search import best_config

    best = best_config(study.name, study.spec, study.facts, study.records)
    if best is None:
        raise UserError(f"{study.name}: nothing was measured, so there is nothing to export")
    return best


def _costs(study: Study, best: BestConfig, found: Export, to: str) -> list[str]:
    """What the study itself knows of the config that the export runs, and of a config that the format holds whole."""
    from autocompile.export import lossy
    from autocompile.report.study import best_rows
    from autocompile.report.words import rate, short
    from autocompile.search.canonical import is_eager, key

    rows = {key(row.config): row for row in best_rows(study.records, limit=len(study.records))}
    own = rows[key(best.config)].tokens_per_second
    changed = {name: value for name in best.config if (value := found.runs.get(name)) is not None}
    runs = rows.get(key({**best.config, **changed}))
    if not [one for one in lossy(best, found) if one.instead is not None]:
        return []
    if runs is None:
        lines = ["cost: this study did not measure what is left"]
    else:
        share = runs.tokens_per_second / own
        lines = [
            f"cost: {rate(runs.tokens_per_second)} instead of {rate(own)} {runs.unit}/s ({share:.2f}x, {runs.state})"
        ]
    whole = next((row for row in rows.values() if _fits(study, best, row.config, to)), None)
    if whole and not is_eager(whole.config) and (runs is None or whole.tokens_per_second > runs.tokens_per_second):
        share = whole.tokens_per_second / own
        speed = f"{rate(whole.tokens_per_second)} {whole.unit}/s, {share:.2f}x of the best, {whole.state}"
        lines.append(f"runner-up: {short(whole.config)} fits this format ({speed})")
    return lines


def _fits(study: Study, best: BestConfig, config: dict[str, bool | int | float | str], to: str) -> bool:
    """Whether the format holds all of this config, trained in its own way."""
    from autocompile.export import exported, lossy

    workload = study.spec.workload.of_config(config)
    ranks = {"parallel": str(workload.parallel), "world_size": workload.gpus_per_trial}
    made_for = best.made_for.model_copy(update=ranks)
    other = best.model_copy(update={"config": config, "made_for": made_for})
    return all(one.instead is None for one in lossy(other, exported(other, to)))
