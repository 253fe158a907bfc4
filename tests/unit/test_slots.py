"""How CPUs are divided between slots."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pynvml
import pytest

from autocompile.space import defaults
from autocompile.spec import FULL_DEPTH, MeasureRequest, Role, WorkloadSpec
from autocompile.tuner import slots
from autocompile.tuner.slots import Slot, shares, side_by_side


def alone(*cpus):
    return [frozenset([cpu]) for cpu in cpus]


def paired(n, *first):
    """Cores of two CPUs, as Linux numbers them: the second ones after all first ones."""
    return [frozenset([cpu, cpu + n]) for cpu in first]


LEFT, RIGHT = frozenset([0, 1, 4, 5]), frozenset([2, 3, 6, 7])
ALL = LEFT | RIGHT


@pytest.mark.parametrize(
    ("cores", "near", "found"),
    [
        pytest.param(alone(0, 1), [ALL, ALL], ((0,), (1,)), id="one CPU each"),
        pytest.param(alone(0, 1, 2, 3, 4), [ALL, ALL], ((0, 1), (2, 3, 4)), id="none is left over"),
        pytest.param(alone(1, 3, 5, 7), [ALL, ALL], ((1, 3), (5, 7)), id="only those that we may use"),
        pytest.param(paired(4, 0, 1, 2, 3), [ALL, ALL], ((0, 1, 4, 5), (2, 3, 6, 7)), id="both CPUs of a core"),
        pytest.param(paired(4, 0, 1, 2, 3), [RIGHT, LEFT], ((2, 3, 6, 7), (0, 1, 4, 5)), id="each its own side"),
        pytest.param(paired(4, 0, 1, 2, 3), [RIGHT, RIGHT], ((2, 6), (3, 7)), id="one side for both"),
        pytest.param(
            paired(4, 0, 1, 2, 3), [LEFT, RIGHT, RIGHT], ((0, 1, 4, 5), (2, 6), (3, 7)), id="one side for two of three"
        ),
        pytest.param(
            paired(4, 0, 1, 2, 3), [ALL, RIGHT], ((0, 1, 4, 5), (2, 3, 6, 7)), id="sides that overlap are ignored"
        ),
        pytest.param(
            paired(4, 0, 1, 2, 3), [LEFT, LEFT, LEFT], ((0, 4), (1, 5), (2, 3, 6, 7)), id="too few on their side"
        ),
        pytest.param(alone(0, 1), [frozenset(), frozenset()], ((0,), (1,)), id="nothing is near"),
        pytest.param(paired(1, 0), [ALL, ALL], ((0,), (1,)), id="too few cores: one CPU each"),
        pytest.param(alone(0), [ALL, ALL], ((), ()), id="too few CPUs: everybody uses all"),
    ],
)
def test_shares(cores, near, found):
    assert shares(cores, near) == found


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        pytest.param("0,52\n", {0, 52}, id="a list"),
        pytest.param("0-1\n", {0, 1}, id="a range"),
        pytest.param("0-1,8-9\n", {0, 1, 8, 9}, id="four a core"),
        pytest.param(None, {0}, id="the kernel does not say"),
    ],
)
def test_siblings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, cpus: set[int]):
    monkeypatch.setattr(slots, "_TOPOLOGY", str(tmp_path / "cpu{}"))
    if text is not None:
        (tmp_path / "cpu0").write_text(text)
    assert slots._siblings(0) == cpus


@pytest.mark.parametrize(
    ("mask", "names", "answers", "found"),
    [
        pytest.param(None, [0, 1], {0: [0, 0b11], 1: [0b11, 0]}, ((64, 65), (0, 1)), id="each its own side"),
        pytest.param("2,GPU-5", [2, "GPU-5"], {2: [0, 0b11], "GPU-5": [0b11, 0]}, ((64, 65), (0, 1)), id="as masked"),
        pytest.param(None, [0], {}, ((0, 1), (64, 65)), id="the driver does not tell"),
        pytest.param("none", [], {}, ((0, 1), (64, 65)), id="it does not know the GPU"),
    ],
)
def test_the_driver_tells_which_cpus_are_near_a_gpu(monkeypatch: pytest.MonkeyPatch, mask, names, answers, found):
    asked = []

    def affinity(handle, n_words):
        asked.append(handle)
        if handle not in answers:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return (ctypes.c_ulonglong * n_words)(*answers[handle])

    def by_uuid(name):
        if not name.startswith("GPU-"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return name

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", by_uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCpuAffinity", affinity)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 64, 65})
    monkeypatch.setattr(slots, "_TOPOLOGY", "nowhere{}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert tuple(slot.cpus for slot in side_by_side([(0,), (1,)])) == found
    assert asked[: len(names)] == names


def test_a_machine_that_cannot_tell_or_set_cpus_goes_on_without(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert side_by_side([(0,), (1,)]) == (Slot(devices=(0,)), Slot(devices=(1,)))


def test_a_request_of_before_slots_had_cpus_still_loads():
    request = MeasureRequest(
        workload=WorkloadSpec(model="tiny-llama"),
        config=defaults(),
        role=Role.SEARCH,
        fidelity=FULL_DEPTH,
        seed=0,
        devices=(),
        deadline_seconds=30,
        cache_folder="cache",
    )
    assert MeasureRequest.model_validate_json(request.model_dump_json(exclude={"cpus"})) == request
    assert request.cpus == ()
