"""Blocks of confirmations: which records form one, who takes part, in which order, and when there are enough."""

from __future__ import annotations

from itertools import product

import pytest

from autocompile.records import FailureKind, Result
from autocompile.search import verdict
from autocompile.search.affordability import Means
from autocompile.search.canonical import key
from autocompile.search.history import History
from autocompile.search.rounds import MOST_ROUNDS, next_confirmation
from autocompile.spec import Paired, Role
from tests.unit.search_cases import (
    CPU,
    EAGER,
    GRAPHS,
    LAYER,
    MODEL,
    SMALL_SPACE,
    config,
    confirmations,
    confirmed,
    facts,
    failed,
    measured,
    running,
    spec,
    stopped,
)

K = FailureKind
INF = float("inf")
EAGER_8, LAYER_8 = config(micro_batch=8), config(scope="layer", micro_batch=8)
NAMES = {key(EAGER): "e", key(EAGER_8): "E", key(LAYER): "l", key(LAYER_8): "L", key(GRAPHS): "G", key(MODEL): "M"}
SPEEDS = {"e": 8000, "E": 8400, "l": 12000, "L": 11900, "G": 11800, "M": 11700}
CONFIGS = {"e": EAGER, "E": EAGER_8, "l": LAYER, "L": LAYER_8, "G": GRAPHS, "M": MODEL}
SLICE_SECONDS = 20.0  # of every confirmation here, as predicted and as observed


def name(settings):
    return NAMES[key(settings)]


def searched(*names, **speeds):
    """Without a compile to wait for, so that all slices take as long."""
    return [
        measured(n, CONFIGS[each], speeds.get(each, SPEEDS[each]), seconds=SLICE_SECONDS - 8, cold_seconds=0)
        for n, each in enumerate(names)
    ]


def play(records, study, *, left=INF, outcome=None, device=None, at_most=None):
    """Confirm until nothing more is asked for, or ``at_most`` slices; ``outcome`` makes a record of another kind."""
    records = list(records)
    first = len(records)
    while at_most is None or len(records) < first + at_most:
        assert len(records) < first + 200, "it never ends"
        known = facts(device) if device else facts()
        means = Means(History(study, known, tuple(records)), left)
        if (settings := next_confirmation(means)) is None:
            break
        record = outcome(len(records), settings, records) if outcome else None
        usual = confirmed(len(records), settings, SPEEDS[name(settings)], seconds=SLICE_SECONDS, cold_seconds=0)
        records.append(record or usual)
        left -= SLICE_SECONDS
    return records[first:]


def as_blocks(study, records):
    """The names in each block, blocks apart by |, phases by /."""
    found = History(study, facts(), tuple(records)).blocks
    phases = range(found[-1].phase + 1)
    texts = [["".join(map(name, (r.config for r in b.arms.values()))) for b in found if b.phase == p] for p in phases]
    return "/".join("|".join(blocks) for blocks in texts)


def confirm_each(names):
    return [confirmed(10 + n, CONFIGS[each], 9000) for n, each in enumerate(names)]


SEARCHED = searched("e", "l")
PROBED = measured(30, LAYER, 9000, role=Role.PROBE)


@pytest.mark.parametrize(
    ("records", "blocks"),
    [
        pytest.param([], "", id="nothing"),
        pytest.param(SEARCHED, "", id="only searched"),
        pytest.param([*SEARCHED, *confirm_each("le")], "le", id="one"),
        pytest.param([*SEARCHED, *confirm_each("leel")], "le|el", id="a config comes again"),
        pytest.param([*SEARCHED, *confirm_each("lEelEe")], "lEe|lEe", id="of three"),
        pytest.param([*SEARCHED, *confirm_each("lell")], "le|l|l", id="again before the others"),
        pytest.param(
            [*SEARCHED, *confirm_each("le"), measured(20, GRAPHS, 9000)], "le/", id="the search went on since"
        ),
        pytest.param(
            [*SEARCHED, *confirm_each("le"), measured(20, GRAPHS, 9000), confirmed(21, GRAPHS, 9000)],
            "le/G",
            id="a new phase after more search",
        ),
        pytest.param(
            [*SEARCHED, *confirm_each("l"), measured(20, GRAPHS, 9000), confirmed(21, EAGER, 9000)],
            "l/e",
            id="more search ends a block too",
        ),
        pytest.param(
            [*SEARCHED, *confirm_each("le"), stopped(20, GRAPHS, "interrupted"), confirmed(21, EAGER, 9000)],
            "le/e",
            id="a search slice without an outcome",
        ),
        pytest.param(
            [*SEARCHED, *confirm_each("lele"), PROBED, confirmed(31, EAGER, 9000)],
            "le|le|e",
            id="a sustained minute ends nothing",
        ),
        pytest.param(
            [*SEARCHED, *confirm_each("le"), failed(20, LAYER, K.OOM, role=Role.CONFIRM), confirmed(21, EAGER, 9000)],
            "le|e",
            id="a failure is in none",
        ),
        pytest.param(
            [
                *[*SEARCHED, *confirm_each("lee"), stopped(20, LAYER, "lost", role=Role.CONFIRM)],
                confirmed(21, LAYER, 9000),
            ],
            "le|el",
            id="the repeat of a lost slice takes its place",
        ),
        pytest.param(
            [*SEARCHED, *confirm_each("lee"), running(20, LAYER, role=Role.CONFIRM)], "le|e", id="one that runs"
        ),
        pytest.param(
            [*SEARCHED, *confirm_each("le"), confirmed(20, LAYER, 9000, reserved_gib=135)],
            "le",
            id="too little memory left",
        ),
    ],
)
def test_blocks(records, blocks):
    assert as_blocks(spec(), records) == blocks


@pytest.mark.parametrize(
    ("planned", "records", "blocks"),
    [
        pytest.param("ll", "llll", "ll|ll", id="equal configs"),
        pytest.param("lel", "lellle", "lel|lle", id="equal ones beside another"),
        pytest.param("lel", "lelle", "lel|le", id="the last one lacks one of the equal ones"),
        pytest.param("le", "lle", "l|le", id="not planned twice"),
    ],
)
def test_a_paired_plan_may_hold_a_config_twice(planned, records, blocks):
    study = spec(plan=Paired(configs=tuple(CONFIGS[each] for each in planned)))
    assert as_blocks(study, confirm_each(records)) == blocks


STUDY = spec(space=SMALL_SPACE)
FOUR = searched("e", "E", "l", "L")  # the best l, eager's best E, l without compile e, then L


@pytest.mark.parametrize(
    ("left", "first", "blocks"),
    [
        pytest.param(79, "", 0, id="not even two blocks of the pair"),
        pytest.param(80, "lE", 2, id="two of the pair"),
        pytest.param(139, "lE", 3, id="three and a half"),
        pytest.param(439, "lE", 6, id="five rounds of a third and the sustained minute do not fit"),
        pytest.param(440, "lEe", 6, id="they do: the same without compile"),
        pytest.param(559, "lEe", 6, id="five rounds of a fourth do not fit"),
        pytest.param(560, "lEeL", 6, id="they do: the second finalist"),
        pytest.param(INF, "lEeL", 6, id="no budget"),
    ],
)
def test_the_first_block_takes_in_whom_the_time_can_confirm_often_enough(left, first, blocks):
    found = play(FOUR, STUDY, left=left)
    assert [name(record.config) for record in found[: len(first)]] == list(first)
    assert len(found) == blocks * len(first) and len(found) * SLICE_SECONDS <= left
    for start in range(0, len(found), max(1, len(first))):
        assert sorted(name(record.config) for record in found[start : start + len(first)]) == sorted(first)


@pytest.mark.parametrize(
    ("before", "first"),
    [
        pytest.param([*searched("l"), failed(1, EAGER, K.OOM)], "", id="nothing to compare with"),
        pytest.param(searched("e"), "", id="nothing compiled"),
        pytest.param(searched("e", "E"), "Ee", id="all compiled ones failed: the two best eager ones"),
        pytest.param(searched("e", "l", "L"), "leLE", id="eager never tried at a micro-batch may be"),
        pytest.param(searched("e", "l", "L", L=11399), "le", id="hopelessly slower"),
        pytest.param(searched("e", "l", "L", L=11401), "leLE", id="hardly hopeless"),
        pytest.param(
            [*searched("e", "l", "L"), failed(3, EAGER_8, K.OOM)], "leL", id="what does not fit is not confirmed"
        ),
        pytest.param(
            [*searched("e", "l", "L"), failed(3, EAGER_8, K.HANG), failed(4, EAGER_8, K.HANG)],
            "leL",
            id="nor what hangs",
        ),
        pytest.param([failed(0, EAGER, K.OOM), *searched("l", "L")], "lL", id="no eager config fits"),
    ],
)
def test_who_is_worth_a_confirmation(before, first):
    renumbered = [record.model_copy(update={"number": n}) for n, record in enumerate(before)]
    found = play(renumbered, STUDY)
    assert [name(record.config) for record in found[: len(first)]] == list(first)
    assert {name(record.config) for record in found} == set(first)


def orders(seed):
    found = play(FOUR, spec(space=SMALL_SPACE, seed=seed))
    return ["".join(name(record.config) for record in found[start : start + 4]) for start in range(0, len(found), 4)]


def test_each_second_block_is_the_one_before_backwards():
    blocks = orders(0)
    assert len(blocks) > 4
    assert all(blocks[n + 1] == blocks[n][::-1] for n in range(1, len(blocks) - 1, 2))


def test_equal_configs_take_turns_in_coming_first():
    study = spec(plan=Paired(configs=(LAYER, LAYER)))
    found = History(study, facts(), tuple(confirm_each("llllll"))).blocks
    assert [[copy for (_, copy), _ in sorted(b.arms.items(), key=lambda arm: arm[1].number)] for b in found] == [
        [0, 1],
        [1, 0],
        [0, 1],
    ]


def test_later_blocks_come_in_an_order_of_the_seed():
    seeds = [orders(seed) for seed in range(5)]
    assert [orders(seed) for seed in range(5)] == seeds
    assert {blocks[0] for blocks in seeds} == {"lEeL"}
    assert len({tuple(blocks) for blocks in seeds}) == 5
    assert all(len(set(blocks)) > 2 for blocks in seeds)
    firsts = {block[0] for blocks in seeds for block in blocks[1:]}
    assert firsts == set("lEeL")  # none is favoured


def test_a_restart_in_the_middle_changes_nothing():
    whole = play(FOUR, STUDY)
    for done in range(len(whole)):
        begun = [*FOUR, *whole[:done]]
        assert [r.config for r in play(begun, STUDY, at_most=1)] == [whole[done].config]
        lost = stopped(len(begun), whole[done].config, "lost", role=Role.CONFIRM)
        assert [r.config for r in play([*begun, lost], STUDY, at_most=1)] == [whole[done].config]


def wavering(noise):
    """Compiled runs that lie above and below their mean in turns."""

    def outcome(number, settings, records):
        k = sum(record.role is Role.CONFIRM and record.config == settings for record in records)
        speed = SPEEDS[name(settings)]
        speed *= 1 + noise * (-1) ** k * (settings["scope"] != "none")
        return confirmed(number, settings, speed, seconds=SLICE_SECONDS, cold_seconds=0)

    return outcome


@pytest.mark.parametrize(
    ("noise", "rounds"),
    [
        pytest.param(0.0, 5, id="five suffice"),
        pytest.param(0.01, 5, id="still"),
        pytest.param(0.012, 6, id="a little noise, one more"),
        pytest.param(0.016, 8, id="more noise, more rounds"),
        pytest.param(0.04, MOST_ROUNDS, id="much noise: twelve are enough"),
    ],
)
def test_rounds_end_when_the_interval_is_narrow(noise, rounds):
    found = play(searched("e", "l"), STUDY, outcome=wavering(noise))
    assert len(found) == 2 * (1 + rounds)
    assert verdict(STUDY, facts(), [*searched("e", "l"), *found]).rounds == rounds


@pytest.mark.parametrize(
    ("left", "study", "device", "slices"),
    [
        pytest.param(6 * 40 + 40 + 80, STUDY, None, 14, id="a seventh block and the minute"),
        pytest.param(6 * 40 + 40 + 79, STUDY, None, 12, id="else the minute comes first"),
        pytest.param(5 * 40 + 39, STUDY, None, 10, id="but the first five rounds come before it"),
        pytest.param(7 * 40, STUDY, CPU, 14, id="a CPU has none"),
        pytest.param(7 * 40, spec(plan=Paired(configs=(LAYER, EAGER))), None, 14, id="nor has a comparison"),
    ],
)
def test_time_is_kept_for_the_sustained_minute(left, study, device, slices):
    before = [] if isinstance(study.plan, Paired) else searched("e", "l")
    assert len(play(before, study, left=left, outcome=wavering(0.04), device=device)) == slices


def failing(*names, after=0, kind=K.OOM):
    """These fail from so many slices on."""

    def outcome(number, settings, records):
        n = sum(record.role is Role.CONFIRM for record in records)
        return failed(number, settings, kind, role=Role.CONFIRM) if name(settings) in names and n >= after else None

    return outcome


def test_a_finalist_that_fails_midway_is_out_and_the_others_go_on():
    found = play(FOUR, STUDY, outcome=failing("l", after=9))
    names = [name(record.config) for record in found]
    last = max(n for n, each in enumerate(names) if each == "l")
    assert 9 <= last < 16 and names.count("l") == 1 + last // 4
    assert names.count("L") == names.count("E") == 6
    told = verdict(STUDY, facts(), [*FOUR, *found])
    assert (told.result, told.config, told.confirmed, told.rounds) == (Result.WIN, LAYER_8, True, 5)


def test_the_next_finalist_takes_the_place_of_one_that_failed():
    found = play(FOUR, STUDY, left=400, outcome=failing("l", after=6))
    names = "".join(name(record.config) for record in found)
    assert set(names[:4]) == {"l", "E"}
    assert set(names[names.rindex("l") + 1 :]) == {"L", "E"}
    assert verdict(STUDY, facts(), [*FOUR, *found]).config == LAYER_8


def test_eager_that_fails_midway_is_replaced_too():
    found = play(FOUR, STUDY, left=400, outcome=failing("E", after=6))
    told = verdict(STUDY, facts(), [*FOUR, *found])
    assert told.confirmed and told.speedup_vs_best_eager == pytest.approx(1.5)  # over e


PAIRED = spec(plan=Paired(configs=(LAYER, GRAPHS, MODEL)))


@pytest.mark.parametrize("kind", list(K))
@pytest.mark.parametrize(
    ("before", "study"),
    [
        pytest.param(FOUR, STUDY, id="a search"),
        pytest.param([], PAIRED, id="a comparison"),
        pytest.param([], spec(plan=Paired(configs=(LAYER, LAYER))), id="of equal configs"),
    ],
)
def test_what_can_never_be_confirmed_is_given_up(kind, before, study):
    found = play(before, study, outcome=failing(*NAMES.values(), kind=kind))
    assert 0 < len(found) <= 2 * 4
    assert not verdict(study, facts(), [*before, *found]).confirmed


@pytest.mark.parametrize(
    ("broken", "after"), list(product(["l", "E", "e", "L", "lL", "Ee", "lE", "lEe", "LEe"], [0, 3, 6, 13]))
)
def test_whatever_fails_whenever_it_ends(broken, after):
    found = play(FOUR, STUDY, outcome=failing(*broken, after=after))
    assert len(found) <= 4 * (1 + MOST_ROUNDS)
    told = verdict(STUDY, facts(), [*FOUR, *found])
    assert told.config is not None and name(told.config) not in broken


def test_without_eager_the_best_of_the_compiled_is_confirmed():
    before = [*searched("l", "L"), failed(2, EAGER, K.OOM, role=Role.BASELINE)]
    found = play(before, STUDY)
    told = verdict(STUDY, facts(), [*before, *found])
    assert len(found) == 2 * 6
    assert (told.result, told.config, told.confirmed, told.rounds) == (Result.WIN, LAYER, True, 5)
    assert told.speedup_vs_best_eager is told.speedup_low is told.speedup_high is None


@pytest.mark.parametrize(
    ("outcome", "left", "names"),
    [
        pytest.param(None, INF, "lGM", id="all, again and again"),
        pytest.param(None, 3.5 * SLICE_SECONDS, "lGM", id="time for one block: each once"),
        pytest.param(None, 2.5 * SLICE_SECONDS, "lG", id="time for two slices"),
        pytest.param(failing("l"), INF, "lGM", id="the first fails"),
        pytest.param(failing("l", "G"), INF, "lGM", id="only the last works"),
    ],
)
def test_a_paired_plan_hears_all_its_configs(outcome, left, names):
    found = play([], PAIRED, left=left, outcome=outcome)
    assert [name(record.config) for record in found[: len(names)]] == list(names)
    assert len(found) * SLICE_SECONDS <= left


def test_more_search_starts_a_phase_of_its_own():
    first = play(FOUR, STUDY)
    more = [*FOUR, *first, measured(len(FOUR) + len(first), config(scope="layer", micro_batch=2), 13000)]
    means = Means(History(STUDY, facts(), tuple(more)), INF)
    assert next_confirmation(means) == config(scope="layer", micro_batch=2)


def test_a_slice_lost_in_an_earlier_phase_is_not_owed():
    lost = stopped(4, LAYER_8, "budget", role=Role.CONFIRM)
    fast = measured(5, config(scope="layer", micro_batch=2), 20000, seconds=SLICE_SECONDS - 8, cold_seconds=0)
    means = Means(History(STUDY, facts(), (*FOUR, lost, fast)), INF)
    assert next_confirmation(means) == fast.config


@pytest.mark.parametrize(
    "second",
    [
        pytest.param([12100.0, 12100, 11900, 11900, 12100, 12100], id="noise"),
        pytest.param([12200.0, 12210, 12200, 12210, 12200, 12210], id="whoever runs second is faster"),
    ],
)
def test_equal_configs_are_judged_like_others(second):
    study = spec(plan=Paired(configs=(LAYER, LAYER)))
    same = confirmations(0, (LAYER, [12000.0] * 6), (LAYER, second))
    told = verdict(study, facts(), same)
    assert (told.result, told.confirmed, told.rounds) == (Result.TIE, True, 5)
    assert told.speedup_low < 1 < told.speedup_high
