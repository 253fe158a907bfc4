"""The slots of a study: which GPUs and which CPUs each slice that may run beside others has for itself.

Covered: the CPUs this process may use, cores that are two CPUs, GPUs whose CPUs the driver names.
Not covered: a container's quota of CPU time, which is one for all slots.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from autocompile.executors.local import visible_names

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_WORD_BITS = 64  # of a CPU set as NVML writes it

Core: TypeAlias = frozenset[int]  # the CPUs that share it


@dataclass(frozen=True, kw_only=True)
class Slot:
    """No ``devices`` is a CPU study's; no ``cpus`` are all."""

    devices: tuple[int, ...]
    cpus: tuple[int, ...] = ()


def side_by_side(devices: Sequence[tuple[int, ...]]) -> tuple[Slot, ...]:
    """Slots with these GPUs, between which our CPUs are divided; one alone has all, as before."""
    if len(devices) < 2 or not hasattr(os, "sched_getaffinity"):
        return tuple(Slot(devices=gpus) for gpus in devices)
    ours = frozenset(os.sched_getaffinity(0))
    sets = shares(_cores(ours), [_near(gpus, ours) for gpus in devices])
    return tuple(Slot(devices=gpus, cpus=cpus) for gpus, cpus in zip(devices, sets, strict=True))


def shares(cores: Sequence[Core], near: Sequence[frozenset[int]]) -> tuple[tuple[int, ...], ...]:
    """Disjoint CPUs for each slot, given those that are near its GPUs.

    Slots share what is near them alone; where that cannot be, everything; where cores are too few, one core's CPUs go
    to several slots; where CPUs are too few, nobody has any of its own.
    """
    slots = range(len(near))
    single = tuple(Core([cpu]) for core in cores for cpu in sorted(core))
    for usable in (
        {slot: tuple(core for core in cores if core <= near[slot]) for slot in slots},
        dict.fromkeys(slots, tuple(cores)),
        dict.fromkeys(slots, single),
    ):
        if (found := _divided(usable)) is not None:
            return tuple(found[slot] for slot in slots)
    return tuple(() for _ in slots)


def _divided(usable: Mapping[int, tuple[Core, ...]]) -> dict[int, tuple[int, ...]] | None:
    """Equal parts for all slots that can use the same; None where these overlap with others' or are too few."""
    together: dict[tuple[Core, ...], list[int]] = {}
    for slot, cores in usable.items():
        together.setdefault(cores, []).append(slot)
    if len({core for cores in together for core in cores}) < sum(map(len, together)):
        return None
    found: dict[int, tuple[int, ...]] = {}
    for cores, slots in together.items():
        if len(cores) < len(slots):
            return None
        ends = pairwise(len(cores) * k // len(slots) for k in range(len(slots) + 1))
        found |= {slot: _cpus(cores[first:last]) for slot, (first, last) in zip(slots, ends, strict=True)}
    return found


def _cpus(cores: Iterable[Core]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core))


def _cores(ours: frozenset[int]) -> list[Core]:
    found = {_siblings(cpu) & ours for cpu in ours}
    return sorted(found, key=min)


def _siblings(cpu: int) -> Core:
    """The CPUs of this one's core, itself among them; it alone where the kernel does not say."""
    text = str(cpu)
    with suppress(OSError):
        text = Path(_TOPOLOGY.format(cpu)).read_text()
    spans = [part.split("-") for part in text.strip().split(",")]  # as "0,52" or "0-1"
    return Core(number for span in spans for number in range(int(span[0]), int(span[-1]) + 1))


def _near(gpus: Sequence[int], ours: frozenset[int]) -> frozenset[int]:
    """Of our CPUs, those on the side of the machine where these GPUs are; all where the driver does not tell."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ours
    n_words = 1 + max(ours) // _WORD_BITS
    try:
        sets = [pynvml.nvmlDeviceGetCpuAffinity(_handle(name), n_words) for name in visible_names(gpus, os.environ)]
    except (pynvml.NVMLError, ValueError):
        return ours
    finally:
        pynvml.nvmlShutdown()
    return frozenset(cpu for cpu in ours if any(words[cpu // _WORD_BITS] >> cpu % _WORD_BITS & 1 for words in sets))


def _handle(name: str) -> Any:
    """By UUID, or by number, which for GPUs of one kind is CUDA's too."""
    import pynvml

    if name.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)
