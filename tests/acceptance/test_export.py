"""From a study to a trainer's own file, as a user asks for it."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.acceptance.test_commands import FOLDER, ROOT, SPACE, STUDY, here, run, words  # noqa: F401  a fixture


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
        ((str(ROOT / "studies" / "h200-llama2-7b-lora" / "best.yaml"), "--to", "trl"), "ends with .yaml"),
    ):
        code, _, err = run(here, "export", *arguments, "-o", "out.env")
        assert (code, err.count("\n")) == (2, 1), err
        assert complaint in err
        assert not (here / "out.env").exists()


def test_an_export_leaves_alone_what_others_wrote_and_nothing_stale(here: Path) -> None:  # noqa: F811
    best = str(ROOT / "studies" / "h200-llama2-7b-lora-b4" / "best.yaml")
    (here / "mine.yaml").write_text("model: mine\n")
    code, _, err = run(here, "export", best, "--to", "hf-trainer", "-o", "mine.yaml")
    assert code == 2 and "mine.yaml: exists, and is no export" in err
    assert (here / "mine.yaml").read_text() == "model: mine\n"
    code, _, err = run(here, "export", best, "--to", "hf-trainer", "-o", "new.yaml")
    assert code == 0 and "MODE=reduce-overhead" in (here / "new.yaml.env").read_text(), err
    eager = yaml.safe_load(Path(best).read_text())
    eager["config"]["scope"] = "none"
    (here / "eager.yaml").write_text(yaml.safe_dump(eager))
    code, _, err = run(here, "export", "eager.yaml", "--to", "hf-trainer", "-o", "new.yaml")
    assert code == 0 and "MODE" not in (here / "new.yaml.env").read_text(), err
