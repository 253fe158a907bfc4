"""Read and write the best-config file."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import ValidationError

from autocompile.errors import UserError
from autocompile.spec import BestConfig
from autocompile.values import parse_yaml, read_text, write_aside


def load(path: str | Path) -> BestConfig:
    """Raises UserError with the file and the field for anything that is not a best-config file."""
    try:
        return BestConfig.model_validate(parse_yaml(read_text(Path(path)), source=str(path)))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from error


def save(best: BestConfig, path: Path) -> None:
    """Written aside and renamed; OSError where the disk does not take it."""
    write_aside(path, yaml.safe_dump(best.model_dump(mode="json"), sort_keys=False))
