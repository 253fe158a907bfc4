"""The import diagram and the sizes that keep the package readable, checked on its syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import autocompile

PACKAGE = Path(autocompile.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

LEVELS = {
    "__main__": 8,
    "cli": 7,
    "api": 6,
    "service": 6,
    "tuner": 5,
    "sampling": 4,
    "storage": 4,
    "executors": 4,
    "search": 3.5,
    "settings": 3,
    "export": 3,
    "report": 3,
    "records": 2.5,
    "best_file": 2.5,
    "assignments": 2.8,
    "spec": 2,
    "slice_plan": 2.2,
    "space": 1.5,
    "space_rules": 1.2,
    "knob_table": 1,
    "lengths": 1,
    "catalogue": 1,
    "processes": 1,
    "machine": 1,
    "deepspeed_settings": 1.2,
    "failure_texts": 1,
    "values": 0.5,
    "files": 0,
    "errors": 0,
    "place": 0,
    "": 0,  # the package itself: its version
}
ASIDE = ("slice", "workloads", "knobs", "applied")
HIGHEST_FOR_ASIDE = 3

OWNERS = {
    "torch": ASIDE,
    "triton": ASIDE,
    "transformers": ASIDE,
    "peft": ASIDE,
    "accelerate": ASIDE,
    "bitsandbytes": ASIDE,
    "sqlalchemy": ("storage", "sampling"),
    "alembic": ("storage", "sampling"),
    "optuna": ("storage", "sampling"),
    "subprocess": ("processes",),
    "multiprocessing": ("processes",),
    "fastapi": ("service",),
    "ray": ("executors",),
    "typer": ("cli",),
}


def noun(path: Path) -> str:
    """The part of the package that a file belongs to: `cli` for cli/tune.py, empty for the package's __init__."""
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every imported module with its line, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            assert node.module is not None
            if node.module == "autocompile":
                yield from ((f"autocompile.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield node.module, node.lineno


def target(module: str) -> str:
    """The part of the package that an import of ours reaches; names of the package's __init__ count as the package."""
    name = module.removeprefix("autocompile").removeprefix(".").split(".")[0]
    return name if name in LEVELS or name in ASIDE else ""


def allowed(importer: str, imported: str) -> bool:
    if importer == imported or importer == "":
        return True  # the package's own __init__ names its homes for type checkers only; see test_imports
    if imported in ASIDE:
        return importer in ASIDE
    return LEVELS[imported] <= HIGHEST_FOR_ASIDE if importer in ASIDE else LEVELS[imported] < LEVELS[importer]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(PACKAGE.parent)}:{line}"


def test_every_module_has_a_level():
    unknown = {noun(path) for path in MODULES} - set(LEVELS) - set(ASIDE)
    assert not unknown, f"give these a level: {unknown}"


@pytest.mark.parametrize(
    ("importer", "imported", "answer"),
    [
        pytest.param("cli", "tuner", True, id="the command line may use the coordinator"),
        pytest.param("tuner", "cli", False, id="the coordinator may not know the command line"),
        pytest.param("storage", "executors", False, id="equal levels do not know each other"),
        pytest.param("sampling", "search", True, id="the sampler may use canonical forms"),
        pytest.param("tuner", "slice", False, id="the coordinator may not import the slice"),
        pytest.param("slice", "knobs", True, id="the slice may use the knobs"),
        pytest.param("slice", "report", True, id="the slice may import level 3"),
        pytest.param("slice", "search", False, id="the slice may not import decisions"),
        pytest.param("applied", "knobs", True, id="apply configures as the slice does"),
    ],
)
def test_the_rule_itself(importer, imported, answer):
    assert allowed(importer, imported) is answer


def test_imports_go_to_a_smaller_number_only():
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in MODULES
        for module, line in imports(parsed(path))
        if module.split(".")[0] == "autocompile" and not allowed(noun(path), target(module))
    ]
    assert not wrong, "\n".join(wrong)


def test_each_outside_thing_has_one_owner():
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in MODULES
        for module, line in imports(parsed(path))
        if (owners := OWNERS.get(module.split(".")[0])) and noun(path) not in owners
    ]
    assert not wrong, "\n".join(wrong)


def test_only_commands_print_and_exit():
    wrong = [
        where(path, node.lineno)
        for path in MODULES
        if noun(path) != "cli" and path.name != "__main__.py"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.exit", "exit")
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_open_with_a_sentence():
    bare = [where(path, 1) for path in MODULES if not ast.get_docstring(parsed(path))]
    assert not bare, "\n".join(bare)


def test_modules_have_at_most_350_lines():
    long = [where(path, count) for path in MODULES if (count := len(path.read_text().splitlines())) > 350]
    assert not long, "\n".join(long)


def test_functions_have_at_most_40_lines():
    long = [
        f"{where(path, node.lineno)} {node.name}"
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - _first_line(path, node) + 1 > 40
    ]
    assert not long, "\n".join(long)


def _first_line(path, node):
    """A command's signature is the list of its flags, so its lines begin with its body."""
    return node.body[0].lineno if path.parent.name == "cli" and path.stem == node.name else node.lineno


def test_the_source_is_ascii():
    wrong = [str(path) for path in MODULES if not path.read_text().isascii()]
    assert not wrong, "\n".join(wrong)


def test_knobs_and_their_table_match_both_ways():
    from autocompile.knob_table import KNOBS
    from autocompile.knobs import REGISTRY

    assert set(REGISTRY) == set(KNOBS)


def test_the_wide_space_holds_every_knob():
    from autocompile.knob_table import KNOBS
    from autocompile.space import load_space

    assert {*load_space("wide").parameters, "parallel"} == set(KNOBS)  # which --parallel auto adds


def test_every_shipped_space_is_read():
    from autocompile.space import load_space, space_folder

    names = [path.stem for path in space_folder().glob("*.yaml")]
    assert {"default", "causal-lm", "qlora", "encoder", "vision", "wide", "quick"} <= set(names)
    for name in names:
        load_space(name)
