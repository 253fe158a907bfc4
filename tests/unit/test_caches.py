"""Compile caches under their cap, and what of a study's disk may go."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from autocompile.files import delete_folder, size_of
from autocompile.records import Role, State, TrialRecord
from autocompile.space import defaults
from autocompile.spec import Fidelity, MeasureRequest
from autocompile.tuner.caches import CappedCaches, evicted
from autocompile.tuner.folders import cache_folder
from autocompile.tuner.leftovers import abandoned, cache_names, in_use, of_study
from tests.unit.test_advice import FACTS, GRAPHS, LAYER, SPEC, K, failed, measured

A, B, C = Path("a"), Path("b"), Path("c")
BLOCK = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "worth", "busy", "gone"),
    [
        pytest.param({A: 40, B: 40}, {A: 0, B: 0}, [], [], id="all of it fits"),
        pytest.param({A: 60, B: 60, C: 60}, {A: 0, B: 0, C: 0}, [], [A, B], id="the longest unused go first"),
        pytest.param({A: 60, B: 60}, {A: 0, B: 0}, [A], [B], id="not one that a slice uses"),
        pytest.param({A: 60, B: 60}, {A: 9, B: 0}, [], [B], id="not one that may be confirmed"),
        pytest.param({A: 60, B: 60}, {A: 9, B: 8}, [], [], id="rather over the cap than without a finalist's"),
        pytest.param({A: 200, B: 1}, {A: 0, B: 0}, [], [A], id="no more than it takes"),
    ],
)
def test_what_is_evicted(sizes, worth, busy, gone):
    assert evicted(sizes, worth, in_use=busy, cap_bytes=100) == gone


def test_only_the_fastest_are_kept_for_confirmation():
    folders = [Path(str(number)) for number in range(40)]
    sizes, worth = dict.fromkeys(folders, 10), {folder: float(folder.name) + 1 for folder in folders}
    gone = evicted(sizes, worth, in_use=[], cap_bytes=0)
    assert gone == folders[:24], "the 16 fastest stay"


class Compiling:
    """Answers with what it is given, and leaves a megabyte in the cache."""

    def __init__(self, **answers):
        self.answers = answers

    def run(self, request, folder):
        cache = Path(request.cache_folder)
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "kernel.so").write_bytes(os.urandom(BLOCK))
        return self.answers[cache.name]


def request_for(cache):
    return MeasureRequest(
        workload=SPEC.workload,
        config=dict(LAYER),
        role=Role.SEARCH,
        fidelity=Fidelity(),
        seed=0,
        devices=(),
        deadline_seconds=9,
        cache_folder=str(cache),
    )


def test_a_study_s_caches_stay_under_their_cap(tmp_path):
    spec = SPEC.model_copy(update={"cache_bytes": round(2.5 * BLOCK)})
    good, bad = measured(LAYER).outcome, failed(LAYER, K.COMPILE_ERROR).outcome
    executor = Compiling(one=bad, two=good, three=bad, four=bad, five=bad)
    caches = CappedCaches(executor, spec, FACTS, folder=tmp_path, records=())
    (tmp_path / "foreign").mkdir()
    for name in ("one", "two", "three", "four", "five"):
        assert caches.run(request_for(tmp_path / name), tmp_path) is executor.answers[name]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["five", "foreign", "four", "two"]


def test_caches_of_an_earlier_run_count(tmp_path):
    spec = SPEC.model_copy(update={"cache_bytes": BLOCK // 2})
    old = failed(GRAPHS, K.COMPILE_ERROR)
    cache = cache_folder(spec, FACTS, old.config, study_folder=tmp_path)
    cache.mkdir(parents=True)
    (cache / "kernel.so").write_bytes(os.urandom(BLOCK))
    caches = CappedCaches(Compiling(new=old.outcome), spec, FACTS, folder=tmp_path, records=[old])
    caches.run(request_for(tmp_path / "new"), tmp_path)
    assert not cache.exists() and (tmp_path / "new").is_dir()


def test_the_cap_is_no_part_of_a_study_s_identity():
    assert SPEC.model_copy(update={"cache_bytes": 1}).hash() == SPEC.hash()


def folder_with_file(path):
    path.mkdir(parents=True)
    (path / "file").write_bytes(os.urandom(BLOCK))
    return path


def leftovers(found):
    return {path for one in found for path in one.folders}


def test_what_of_a_study_may_go(tmp_path):
    trial = measured(LAYER, number=3)
    cache = folder_with_file(tmp_path / "cache" / "0123")
    stray = folder_with_file(tmp_path / "trials" / "4")
    folder_with_file(tmp_path / "trials" / "3")
    folder_with_file(tmp_path / "trials" / "notes")
    found = of_study(SPEC, FACTS, [trial], folder=tmp_path)
    assert leftovers(found) == {cache, stray}
    assert sum(one.n_bytes for one in found) >= 2 * BLOCK


@pytest.mark.parametrize("shared", [False, True])
def test_in_a_cache_root_of_several_studies_only_its_own_may_go(tmp_path, shared):
    root, study = tmp_path / "root", tmp_path / "study"
    spec = SPEC.model_copy(update={"cache_root": str(root)})
    trial = measured(LAYER)
    own = cache_folder(spec, FACTS, trial.config, study_folder=study)
    folder_with_file(own)
    fresh = folder_with_file(own.with_name(f"{own.name}-1"))
    folder_with_file(root / "seed")
    folder_with_file(root / ("f" * 32))
    names = cache_names(spec, FACTS, [trial]) if shared else ()
    assert leftovers(of_study(spec, FACTS, [trial], folder=study, shared=names)) == (set() if shared else {own, fresh})


def test_a_workplace_is_abandoned_when_nobody_is_in_it(tmp_path):
    place = folder_with_file(tmp_path / ".autocompile-abc")
    folder_with_file(tmp_path / "study")
    with in_use(place):
        assert leftovers(abandoned([tmp_path])) == set()
    assert leftovers(abandoned([tmp_path, tmp_path])) == {place}


def test_a_copy_under_way_is_left_alone(tmp_path):
    copy, old = (
        folder_with_file(tmp_path / ".autocompile_copy.abc"),
        folder_with_file(tmp_path / ".autocompile_deleted.abc"),
    )
    long_ago = time.time() - 7200
    os.utime(old, (long_ago, long_ago))
    assert leftovers(abandoned([tmp_path])) == {old}
    assert copy.is_dir()


def test_folders_are_measured_and_deleted_whole(tmp_path):
    folder = folder_with_file(tmp_path / "one")
    (folder / "link").symlink_to(tmp_path)
    assert BLOCK <= size_of(folder) < 2 * BLOCK
    delete_folder(folder)
    assert list(tmp_path.iterdir()) == []
    delete_folder(folder)
    assert size_of(folder) == 0


def test_a_config_that_was_not_compiled_has_a_cache_too():
    eager = TrialRecord(number=0, role=Role.BASELINE, state=State.COMPLETE, config=defaults(), outcome=None)
    assert len(cache_names(SPEC, FACTS, [eager, measured(LAYER)])) == 2
