"""The files of an export as they are written: what is lost stands at the end, where whoever opens them sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote

from autocompile.best_file import BestConfig
from autocompile.errors import UserError
from autocompile.export.fields import Export, Lossy, lossy
from autocompile.values import shown

MARK = "autocompile: the config of study "


def documents(best: BestConfig, exported: Export, path: Path, costs: Sequence[str]) -> Mapping[Path, str]:
    """Text by path: the file itself, and beside it ``.env`` with what is to be in the environment.

    JSON has no comments, so its list stands in the other. UserError where the name does not suit the format.
    """
    if path.suffix != exported.suffix:
        raise UserError(f"-o {path}: expected a name that ends with {exported.suffix}")
    side = path.with_name(f"{path.name}.env")
    notes = _comment(summary(best, exported, path, costs))
    variables = "".join(f"export {name}={value}\n" for name, value in exported.environment.items())
    if exported.suffix == ".json":
        return {path: exported.text, side: f"{variables}{notes}"}
    found = {path: f"{exported.text}\n{notes}"}
    stale = side.exists()  # of an earlier export, and somebody may source it
    return {**found, side: variables or "# nothing to set\n"} if variables or stale else found


def summary(best: BestConfig, exported: Export, path: Path, costs: Sequence[str]) -> list[str]:
    """What was exported, how it is started, and the fields that the format loses."""
    lost = lossy(best, exported)
    lines = [f"{MARK}{best.study}, made for {best.made_for.gpu}"]
    if exported.about:
        lines.append(f"use: {exported.about}")
    if exported.environment:
        lines.append(f"first: source {quote(path.name)}.env")
    if exported.start:
        lines.append(f"start: {exported.start.replace('FILE', quote(path.name))}")
    left = [one for one in lost if one.instead is None]
    if left:
        lines += ["left to your script:", *(f"  {_asked(one)}{f': {one.why}' if one.why else ''}" for one in left)]
    changed = [one for one in lost if one.instead is not None]
    lines.append("lost, with what happens instead:" if changed else "lost: nothing")
    lines += [f"  {_asked(one)}: {_word(one.instead)}{f' ({one.why})' if one.why else ''}" for one in changed]
    named = {one.field for one in lost}
    lines += [f"note: {field}: {why}" for field, why in exported.why.items() if field not in named]
    return [*lines, *costs]


def _asked(one: Lossy) -> str:
    return f"{one.field}={_word(one.wanted)}"


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else value if isinstance(value, str) else shown(value)


def _comment(lines: Sequence[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)
