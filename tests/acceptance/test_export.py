"""From a study to a trainer's own file, as a user asks for it."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.acceptance.test_commands import FOLDER, SPACE, STUDY, here, run, words  # noqa: F401  a fixture


def test_an_export_of_a_study_says_what_the_format_costs(here: Path) -> None:  # noqa: F811
    """Accelerate cannot leave dynamic open, which this study measured; what it measured beside it fits whole."""
    dynamic = "  dynamic: {choices: [auto, 'false'], default: auto, why: a test}\n"
    (here / "space.yaml").write_text(SPACE + dynamic)
    pins = ("--set", "scope=layer", "--set", "micro_batch=4")
    code, _, err = run(here, *words(here, "--budget", "60s", "--trials", 3, *pins))
    assert code == 0, err
    code, out, err = run(here, "export", STUDY, "--to", "accelerate", "-o", "launch.yaml")
    assert code == 0, err
    assert yaml.safe_load((here / "launch.yaml").read_text())["dynamo_config"]["dynamo_use_dynamic"] is False
    assert "wrote launch.yaml" in out
    assert "\ncost: " in out and "\n# cost: " in (here / "launch.yaml").read_text()


def test_an_export_of_a_file_needs_no_database(here: Path) -> None:  # noqa: F811
    code, _, err = run(here, *words(here, "--budget", "60s", "--trials", 2))
    assert code == 0, err
    code, out, _ = run(
        here, "export", str(FOLDER / "best.yaml"), "--to", "env", "-o", "compile.env", "--storage", "sqlite:///none.db"
    )
    assert code == 0
    assert "export ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true" in (here / "compile.env").read_text()
    assert "left to your script:\n  optimizer=adamw_torch_fused\n" in out


def test_what_cannot_be_exported_is_one_line(here: Path) -> None:  # noqa: F811
    (here / "broken.yaml").write_text("format: 1\n")
    for arguments, complaint in (
        (("absent.yaml", "--to", "env"), "absent.yaml"),
        (("broken.yaml", "--to", "env"), "broken.yaml: study: Field required"),
        (("nobody", "--to", "env"), "there are no studies yet"),
    ):
        code, _, err = run(here, "export", *arguments, "-o", "out")
        assert (code, err.count("\n")) == (2, 1), err
        assert complaint in err
        assert not (here / "out").exists()
