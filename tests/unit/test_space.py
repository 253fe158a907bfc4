"""Search spaces: what is read, what is refused and in which words, and the configs of a space."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autocompile.errors import UserError
from autocompile.knob_table import KNOBS
from autocompile.space import choose, configs, default_config, load_space, order, parse_space
from autocompile.space_rules import FACTS
from autocompile.spec import Method, Task, traits
from tests.unit.search_cases import facts, spec

SCOPE = "scope: {choices: [none, layer], default: none, why: tests}"
CUDA = {"device": "cuda", "method": "lora", "gpu_capability": "9.0"}
CPU = {"device": "cpu", "method": "lora"}


def space(*parameters: str):
    return parse_space("\n  ".join(["format: 1\nparameters:", *parameters]), source="tests.yaml")


def block(name: str, **changes: str | None) -> str:
    """One parameter in flow style; None takes a key out."""
    usual = {"choices": "[none, layer]", "default": "none", "why": "tests"}
    if name == "micro_batch":
        usual = {"low": "1", "high": "8", "scale": "log2", "default": "4", "why": "tests"}
    found = {key: value for key, value in {**usual, **changes}.items() if value is not None}
    return f"{name}: {{{', '.join(f'{key}: {value}' for key, value in found.items())}}}"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param("", "1: expected a mapping with format and parameters, found nothing", id="an empty file"),
        pytest.param("- 1", "1: expected a mapping with format and parameters, found a list", id="a list"),
        pytest.param("a: [", "1: not YAML: expected the node content, but found '<stream end>'", id="no YAML"),
        pytest.param("format: 1\nx: \0", "2: not YAML: expected text, found character U+0000", id="a NUL"),
        pytest.param("format: 1", "1: expected parameters, found only format", id="no parameters"),
        pytest.param("parameters: {}", "1: expected format, found only parameters", id="no format"),
        pytest.param("parameters: {}\nformat: 2", "2: format: expected 1, found 2", id="another format"),
        pytest.param("format: true\nparameters: {}", "1: format: expected 1, found true", id="a format like 1"),
        pytest.param(
            "format: 1\nparameter: {}", '2: parameter: unknown key "parameter"; did you mean parameters?', id="a slip"
        ),
        pytest.param(
            "format: 1\nparameters: []",
            "2: parameters: expected a mapping from knobs to blocks, found an empty list",
            id="parameters that are no mapping",
        ),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(text, complaint):
    with pytest.raises(UserError) as caught:
        parse_space(text, source="tests.yaml")
    assert str(caught.value) == f"tests.yaml:{complaint}"


def conditional(when: str) -> str:
    return block("mode", choices="[default]", default="default", when=when)


WRONG_BLOCKS = [
    pytest.param(
        block("micro_bach"), 'micro_bach: unknown knob "micro_bach"; did you mean micro_batch?', id="an unknown knob"
    ),
    pytest.param(
        "mode: []", "mode: expected a block or a list of blocks, found an empty list", id="an empty list of blocks"
    ),
    pytest.param(
        "mode: fast",
        'mode: expected a mapping with choices, or low, high and scale, and default and why, found "fast"',
        id="a value instead of a block",
    ),
    pytest.param(
        block("scope", chioces="[none]"), 'scope.chioces: unknown key "chioces"; did you mean choices?', id="key"
    ),
    pytest.param(block("scope", choices=None), "scope: expected choices, found only default and why", id="no choices"),
    pytest.param(
        block("micro_batch", low=None, high=None, scale=None),
        "micro_batch: expected choices, or low, high and scale, found only default and why",
        id="neither choices nor a range",
    ),
    pytest.param(
        block("micro_batch", low=None),
        "micro_batch: expected low, found only high, scale, default and why",
        id="no low",
    ),
    pytest.param(
        block("micro_batch", scale=None),
        "micro_batch: expected scale, found only low, high, default and why",
        id="scale",
    ),
    pytest.param(
        block("scope", low="1"), "scope.low: expected choices or a range, found choices and low", id="both of them"
    ),
    pytest.param(
        "scope: {low: 1, high: 2, scale: log2, default: none, why: tests}",
        "scope: expected choices, found only low, high, scale, default and why",
        id="a range of what is no number",
    ),
    pytest.param(block("scope", default=None), "scope: expected default, found only choices and why", id="no default"),
    pytest.param(block("scope", why=None), "scope: expected why, found only choices and default", id="no why"),
    pytest.param(block("scope", why='" "'), 'scope.why: expected a sentence, found " "', id="an empty why"),
    pytest.param(block("scope", why="3"), "scope.why: expected a sentence, found 3", id="a why that is no text"),
    pytest.param(
        block("mode", choices="default", default="default"),
        'mode.choices: expected a list of values, found "default"',
        id="choices that are a word",
    ),
    pytest.param(
        block("scope", choices="[]"), "scope.choices: expected a list of values, found an empty list", id="no values"
    ),
    pytest.param(
        block("scope", choices="[none, layr]"),
        "scope.choices.1: expected one of none, model, nested, layer, attention, qkv, mlp, lora or a "
        "pattern such as *.q_proj, "
        'found "layr"',
        id="an illegal choice",
    ),
    pytest.param(
        block("scope", choices="[none, layer, none]"),
        'scope.choices.2: expected each choice once, found "none" again',
        id="a choice twice",
    ),
    pytest.param(
        block("scope", default="model"),
        'scope.default: expected one of the choices none, layer, found "model"',
        id="a default outside the choices",
    ),
    pytest.param(
        block("micro_batch", low="ten"), 'micro_batch.low: expected a whole number from 1, found "ten"', id="a word"
    ),
    pytest.param(block("micro_batch", low="0"), "micro_batch.low: expected a whole number from 1, found 0", id="zero"),
    pytest.param(
        block("micro_batch", high="true"), "micro_batch.high: expected a whole number from 1, found true", id="true"
    ),
    pytest.param(
        block("micro_batch", low="9"), "micro_batch.high: expected 9 (low) or more, found 8", id="low above high"
    ),
    pytest.param(
        block("micro_batch", scale="log"), 'micro_batch.scale: expected log2 or linear, found "log"', id="the scale"
    ),
    pytest.param(
        block("micro_batch", default="16"),
        "micro_batch.default: expected one of 1, 2, 4, 8, found 16",
        id="a default above high",
    ),
    pytest.param(
        block("micro_batch", default="3"),
        "micro_batch.default: expected one of 1, 2, 4, 8, found 3",
        id="a default between the powers",
    ),
    pytest.param(
        block("micro_batch", scale="linear", low="5"),
        "micro_batch.default: expected a whole number from 5 to 8, found 4",
        id="a default below low",
    ),
    pytest.param(
        conditional("[scope]"),
        "mode.when: expected a mapping from knobs or facts to lists of values, found a list",
        id="a list of conditions",
    ),
    pytest.param(
        conditional("null"),
        "mode.when: expected a mapping from knobs or facts to lists of values, found nothing",
        id="an empty when",
    ),
    pytest.param(
        conditional("{scop: [layer]}"),
        'mode.when.scop: unknown condition "scop"; did you mean scope or sdpa?',
        id="condition",
    ),
    pytest.param(
        conditional("{scope: layer}"),
        'mode.when.scope: expected a list of values, found "layer"',
        id="a condition that is a word",
    ),
    pytest.param(
        conditional("{scope: []}"), "mode.when.scope: expected a list of values, found an empty list", id="never holds"
    ),
    pytest.param(
        conditional("{scope: [layr]}"),
        "mode.when.scope.0: expected one of none, model, nested, layer, attention, qkv, mlp, lora or a "
        "pattern such as *.q_proj, "
        'found "layr"',
        id="a condition with an illegal value",
    ),
    pytest.param(
        conditional("{world_size: 1}"), "mode.when.world_size: expected a list of values, found 1", id="a number"
    ),
    pytest.param(
        conditional("{world_size: [two]}"),
        'mode.when.world_size.0: expected a whole number from 1, found "two"',
        id="a world size that is no number",
    ),
    pytest.param(
        conditional("{device: [gpu]}"),
        'mode.when.device.0: expected one of cuda, cpu, found "gpu"',
        id="a fact's value",
    ),
    pytest.param(
        conditional("{gpu_capability: [9]}"),
        "mode.when.gpu_capability.0: expected a compute capability such as 9.0, found 9",
        id="half a compute capability",
    ),
]


@pytest.mark.parametrize(("parameter", "complaint"), WRONG_BLOCKS)
def test_a_wrong_block_is_refused_in_one_line(parameter, complaint):
    with pytest.raises(UserError) as caught:
        space(parameter)
    assert str(caught.value) == f"tests.yaml:3: parameters.{complaint}"


def test_a_complaint_about_one_of_several_blocks_names_its_line():
    with pytest.raises(UserError) as caught:
        parse_space(
            """format: 1
parameters:
  micro_batch:
    - low: 1
      high: 8
      scale: log2
      default: 4
      when: {device: [cpu]}
      why: tests
    - low: 1
      high: ten
      scale: log2
      default: 4
      why: tests
""",
            source="qlora.yaml",
        )
    assert (
        str(caught.value) == 'qlora.yaml:11: parameters.micro_batch.1.high: expected a whole number from 1, found "ten"'
    )


def test_conditions_in_a_circle_are_refused():
    sdpa = block("sdpa", choices="[auto]", default="auto", when="{mode: [default]}")
    mode = conditional("{sdpa: [auto]}")
    with pytest.raises(UserError, match="yaml:2: parameters: the conditions of mode, sdpa depend on each other in a"):
        space(sdpa, mode)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        pytest.param(b"format: 1\nparameters: {} # \xff", ":2: expected UTF-8 text, found byte 0xff", id="no UTF-8"),
        pytest.param(b"format: 1\n\0", ":2: not YAML: expected text, found character U+0000", id="a NUL"),
        pytest.param(b"at: 2026-02-30", ": not YAML: day is out of range for month", id="a day that does not exist"),
    ],
)
def test_a_file_that_is_no_text_is_named_with_the_line(tmp_path, content, complaint):
    path = tmp_path / "space.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_space(str(path))
    assert str(caught.value) == f"{path}{complaint}"


def test_a_name_that_means_nothing_is_refused_with_the_shipped_ones():
    names = "causal-lm, default, encoder, qlora, quick, vision, wide"
    with pytest.raises(UserError, match=f'expected a file or one of {names}, found "tiny"'):
        load_space("tiny")


@pytest.mark.parametrize("name", ["default", "qlora", "quick"])
@pytest.mark.parametrize("known", [pytest.param(CUDA, id="on a GPU"), pytest.param(CPU, id="on a CPU")])
def test_the_defaults_of_a_shipped_space_are_plain_eager_training(name, known):
    assert default_config(load_space(name), known, {}) == {name: knob.default for name, knob in KNOBS.items()}


def values_of(name: str, knob: str, known) -> set[object]:
    return {config[knob] for config in configs(load_space(name), known, {})}


@pytest.mark.parametrize(
    ("known", "knob", "default", "qlora"),
    [
        pytest.param(CUDA, "micro_batch", 64, 128, id="larger batches"),
        pytest.param(CPU, "micro_batch", 8, 8, id="but not on a CPU"),
    ],
)
def test_4_bit_weights_leave_room_for_larger_batches(known, knob, default, qlora):
    assert (max(values_of("default", knob, known)), max(values_of("qlora", knob, known))) == (default, qlora)


def test_the_space_of_qlora_is_small_and_its_own():
    assert "math" not in values_of("qlora", "sdpa", CUDA)
    assert values_of("qlora", "scope", CUDA) == {"none", "layer", "model"}
    found = [sum(1 for _ in configs(load_space(name), CUDA, {})) for name in ("qlora", "default")]
    assert 5 * found[0] < found[1]


@pytest.mark.parametrize(
    ("when", "known", "holds"),
    [
        pytest.param("{}", CUDA, True, id="no condition"),
        pytest.param("{scope: [layer]}", CUDA, True, id="a knob's value"),
        pytest.param("{scope: [model, none]}", CUDA, False, id="none of the values"),
        pytest.param('{scope: ["*"]}', CUDA, False, id="a star is no scope with a name"),
        pytest.param("{device: [cuda], method: [lora, qlora]}", CUDA, True, id="two facts"),
        pytest.param("{device: [cuda], method: [lora]}", CPU, False, id="one of two facts"),
        pytest.param("{gpu_capability: [9.0]}", CUDA, True, id="a capability that YAML reads as a number"),
        pytest.param('{gpu_capability: ["9.0"]}', CUDA, True, id="a capability in quotes"),
        pytest.param("{gpu_capability: [8.9]}", CUDA, False, id="another capability"),
        pytest.param("{gpu_capability: [9.0]}", CPU, False, id="a fact that nobody knows"),
        pytest.param("{dynamic: [auto]}", CUDA, True, id="a knob at its default"),
        pytest.param("{dynamic: [true]}", CUDA, False, id="dynamic's values are strings"),
    ],
)
def test_a_block_counts_where_all_its_conditions_hold(when, known, holds):
    found = space(block("mode", choices="[max-autotune]", default="max-autotune", when=when))
    config = default_config(found, known, {"scope": "layer"})
    assert config["mode"] == ("max-autotune" if holds else "default")


def test_in_a_condition_a_star_is_every_pattern():
    found = space(block("mode", choices="[max-autotune]", default="max-autotune", when='{scope: ["*"]}'))
    assert default_config(found, CUDA, {"scope": "*.q_proj"})["mode"] == "max-autotune"


def test_of_several_blocks_the_first_that_holds_counts():
    found = space(
        "sdpa:",
        "- {choices: [math], default: math, when: {device: [cpu]}, why: tests}",
        "- {choices: [flash], default: flash, why: tests}",
    )
    assert [default_config(found, known, {})["sdpa"] for known in (CPU, CUDA)] == ["math", "flash"]


MODE_OF_LAYERS = block("mode", choices="[default, max-autotune]", default="default", when="{scope: [layer]}")


@pytest.mark.parametrize(
    ("pinned", "pairs"),
    [
        pytest.param({}, [("none", "default"), ("layer", "default"), ("layer", "max-autotune")], id="all"),
        pytest.param(
            {"mode": "max-autotune"}, [("none", "max-autotune"), ("layer", "max-autotune")], id="a pinned knob"
        ),
        pytest.param({"scope": "model"}, [("model", "default")], id="pinned to a value outside the space"),
    ],
)
def test_configs_are_all_values_where_conditions_hold(pinned, pairs):
    found = list(configs(space(MODE_OF_LAYERS, SCOPE), CUDA, pinned))
    assert [(config["scope"], config["mode"]) for config in found] == pairs
    assert all(set(config) == set(KNOBS) for config in found)


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        pytest.param({}, [1, 2, 4, 8], id="powers of two"),
        pytest.param({"low": "3", "high": "20", "default": "6"}, [3, 6, 12], id="low times powers of two"),
        pytest.param({"scale": "linear", "low": "3", "high": "5"}, [3, 4, 5], id="every number"),
        pytest.param({"low": "8", "default": "8"}, [8], id="one"),
    ],
)
def test_the_values_of_a_range(changes, values):
    assert [config["micro_batch"] for config in configs(space(block("micro_batch", **changes)), CUDA, {})] == values


def test_choose_asks_for_what_hangs_on_a_condition_only_where_it_holds():
    found = space(MODE_OF_LAYERS, SCOPE)
    asked: list[tuple[str, int]] = []

    def last(name, index, parameter):
        asked.append((name, index))
        return parameter.values()[-1]

    assert order(found) == ("scope", "mode")
    assert choose(found, CUDA, {}, last)["mode"] == "max-autotune"
    assert asked == [("scope", 0), ("mode", 0)]
    asked.clear()
    assert choose(found, CUDA, {"scope": "none"}, last)["mode"] == "default"
    assert asked == []


def test_every_fact_of_a_study_may_be_named():
    known = facts().model_copy(update={"task": Task.CAUSAL_LM})
    assert set(FACTS) == set(traits(spec(), known))
    assert FACTS["method"] == tuple(str(method) for method in Method)


def test_every_fact_has_a_legal_value():
    def conditions() -> Iterator[str]:
        for name, value in traits(spec(), facts()).items():
            yield f"{name}: [{value}]"

    found = space(
        block("mode", choices="[max-autotune]", default="max-autotune", when=f"{{{', '.join(conditions())}}}")
    )
    assert default_config(found, traits(spec(), facts()), {})["mode"] == "max-autotune"
