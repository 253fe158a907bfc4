"""The preflight child on this machine: it finds facts, and names what the machine or the workload lacks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from autocompile.slice.preflight import GIB, needed_bytes
from autocompile.spec import Facts, Method, Precision, PreflightRequest, WorkloadSpec

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "tests" / "workload_examples"

CHILD = """
import json, resource, sys
from autocompile.slice.preflight import preflight
from autocompile.spec import PreflightRequest
from autocompile.workloads.job import MachineFault, WorkloadError
for request in sys.argv[1:]:
    stages = []
    try:
        facts = preflight(PreflightRequest.model_validate_json(request), stages.append)
        answer = {"facts": facts.model_dump(mode="json")}
    except (MachineFault, WorkloadError) as error:
        answer = {"fault": type(error).__name__, "message": error.message, "where": getattr(error, "where", None)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print("ANSWER", json.dumps({**answer, "stages": stages, "peak_bytes": peak}))
"""

Answer = dict[str, Any]

NO_PARTS = {"channels_last", "input_gradients"}  # of a model without images and without embeddings


def request(cache: Path, **workload: Any) -> PreflightRequest:
    return PreflightRequest(
        workload=WorkloadSpec(**workload), seed=0, devices=(), deadline_seconds=100, cache_folder=str(cache)
    )


def ask(*requests: PreflightRequest, **environment: str) -> list[Answer]:
    """The answers of one child, started with the caches of the first request."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *(one.model_dump_json() for one in requests)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": requests[0].cache_folder,
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return [json.loads(line.removeprefix("ANSWER")) for line in child.stdout.splitlines() if line.startswith("ANSWER")]


@pytest.fixture(scope="module")
def counting_compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ compiler, with a line in a file beside it for each thing it builds."""
    folder = tmp_path_factory.mktemp("compiler")
    compiler = folder / "g++"
    count = f'case "$*" in *" -o "*) echo "$*" >> {folder}/built ;; esac'
    compiler.write_text(f'#!/bin/sh\n{count}\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    return compiler


def n_built(compiler: Path) -> int:
    built = compiler.with_name("built")
    return len(built.read_text().splitlines()) if built.exists() else 0


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seed")


@pytest.fixture(scope="module")
def found(seed: Path, counting_compiler: Path) -> dict[str, Answer]:
    """What a preflight finds out about several workloads; `seed` is then the cache folder it leaves."""
    workloads: dict[str, Answer] = {
        "tiny": {"model": "tiny-llama"},
        "script": {"script": f"{EXAMPLES / 'blocks.py'}:build"},
        "frozen": {"script": f"{EXAMPLES / 'blocks.py'}:frozen"},
        "large": {"model": "llama3.2-1b", "precision": "bf16"},
    }
    requests = [request(seed, device="cpu", **workload) for workload in workloads.values()]
    return dict(zip(workloads, ask(*requests, CXX=str(counting_compiler)), strict=True))


def test_the_facts_of_a_catalogue_model(found: dict[str, Answer]) -> None:
    facts = Facts.model_validate(found["tiny"]["facts"])
    assert found["tiny"]["stages"] == ["preflight", "build", "compile"]
    assert (facts.layers, facts.parameters, facts.model_type) == (4, 4_212_992, "llama")
    assert (facts.method, facts.precision) == (Method.FULL, Precision.FP32)
    assert facts.regions["layer"] == "model.layers.*"
    device = facts.devices[0]
    assert (device.type, device.uuid) == ("cpu", "cpu")
    assert facts.free_memory_bytes is not None
    assert 0 < facts.free_memory_bytes <= device.memory_bytes
    assert device.name in Path("/proc/cpuinfo").read_text()
    assert facts.environment["torch"] == torch.__version__
    assert {"gpu", "python", "transformers", "peft", "cpu"} <= facts.environment.keys()
    assert facts.matmul_flops_per_second is not None and facts.matmul_flops_per_second > 1e8


def test_the_facts_of_a_script(found: dict[str, Answer]) -> None:
    facts = found["script"]["facts"]
    assert (facts["layers"], facts["parameters"], facts["model_type"]) == (3, 3 * 17 * 16, None)
    assert (facts["method"], facts["precision"], set(facts["frozen_knobs"])) == ("full", "fp32", NO_PARTS)
    assert facts["regions"] == {"layer": "blocks.*", "mlp": "blocks.*.mlp"}
    assert len(facts["environment"]["workload"]) == 16


def test_a_batch_that_does_not_grow_freezes_the_micro_batch(found: dict[str, Answer]) -> None:
    frozen = found["frozen"]["facts"]["frozen_knobs"]
    assert frozen.keys() == {"micro_batch", *NO_PARTS}
    assert frozen["micro_batch"].endswith("blocks.py:frozen gives batches of 8 for ctx.micro_batch=2 and of 8 for 4")


def test_a_large_model_is_described_without_its_weights(found: dict[str, Answer]) -> None:
    assert found["large"]["facts"]["parameters"] == 1_235_814_400
    assert found["large"]["facts"]["method"] == "lora"
    assert found["large"]["peak_bytes"] < 2 * 1_235_814_400


PROBE = "from torch._inductor.cpu_vec_isa import valid_vec_isa_list; valid_vec_isa_list()"


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize(
    ("seeded", "builds"),
    [
        pytest.param(True, False, id="a copy of the preflight's cache folder spares the probe"),
        pytest.param(False, True, id="an empty folder does not"),
    ],
)
def test_the_seed_holds_the_probe_of_vector_instructions(
    seed: Path, counting_compiler: Path, tmp_path: Path, seeded: bool, builds: bool
) -> None:
    cache = tmp_path / "copy"
    if seeded:
        shutil.copytree(seed, cache)
    before = n_built(counting_compiler)
    environment = {**os.environ, "CXX": str(counting_compiler), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    subprocess.run([sys.executable, "-c", PROBE], env=environment, check=True)
    assert (n_built(counting_compiler) > before) is builds


def test_a_compiler_that_builds_nothing_is_named_with_its_error(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    version = f'case "$*" in *--version*) exec {shutil.which("g++")} --version ;; esac'
    complaint = "kernel.cpp:1:10: fatal error: Python.h: No such file or directory"
    compiler.write_text(f'#!/bin/sh\n{version}\necho "{complaint}" >&2\nexit 1\n')
    compiler.chmod(0o755)
    (answer,) = ask(request(tmp_path / "cache", model="tiny-llama", device="cpu"), CXX=str(compiler))
    assert answer.get("fault") == "MachineFault"
    assert answer["message"] == f"the C++ compiler cannot build torch's kernels: {complaint}"


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="mounts file systems")
def test_a_cache_folder_on_a_disk_that_does_not_work_is_named(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "full", "size=64k") as full,
        mounted(tmp_path / "noexec", "size=2g,noexec") as noexec,
        mounted(tmp_path / "readonly", "size=2g,ro") as readonly,
    ):
        answers = ask(*(request(cache, model="tiny-llama", device="cpu") for cache in (full, noexec, readonly)))
    assert {answer.get("fault") for answer in answers} == {"MachineFault"}
    assert [answer["message"] for answer in answers] == [
        f"cache folder {full}: 0.00 GiB free on its disk, expected at least 1 GiB",
        f"cache folder {noexec}: on a file system mounted noexec, which compiled kernels cannot use",
        f"cache folder {readonly}: Read-only file system",
    ]


def test_a_plain_file_as_cache_folder_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    (answer,) = ask(request(file, model="tiny-llama", device="cpu"))
    assert (answer.get("fault"), answer["message"]) == ("MachineFault", f"cache folder {file}: File exists")


def test_what_cannot_work_is_named_before_anything_is_compiled(tmp_path: Path) -> None:
    huge = {"model": "llama2-13b", "method": "full", "precision": "bf16-mixed"}
    beyond, raising = ask(
        request(tmp_path, device="cpu", **huge),
        request(tmp_path, device="cpu", script=f"{EXAMPLES / 'blocks.py'}:raises"),
    )
    assert beyond.get("fault") == "MachineFault"
    assert "GiB free, llama2-13b (full, bf16-mixed) needs at least 195.0 GiB" in beyond["message"]
    assert raising.get("fault") == "WorkloadError"
    assert "blocks.py: raises: ValueError" in raising["message"]
    assert raising["where"].startswith("blocks.py:")
    assert [answer["stages"] for answer in (beyond, raising)] == [["preflight", "build"]] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_a_machine_without_a_gpu(tmp_path: Path) -> None:
    large, asked = ask(request(tmp_path, model="llama2-7b"), request(tmp_path, model="tiny-llama", device="cuda"))
    assert large == large | {
        "fault": "MachineFault",
        "message": "llama2-7b: needs a GPU, this machine has none (pass --device cpu to force it)",
    }
    assert asked == asked | {
        "fault": "MachineFault",
        "message": "device cuda: this machine has no GPU that torch can use (see nvidia-smi)",
    }


@pytest.mark.parametrize(
    ("method", "precision", "bytes_per_parameter"),
    [
        pytest.param(Method.FULL, Precision.BF16, 8, id="bf16: weights, gradients, two moments"),
        pytest.param(Method.FULL, Precision.BF16_MIXED, 16, id="mixed: the same in fp32"),
        pytest.param(Method.FULL, Precision.FP32, 16, id="fp32"),
        pytest.param(Method.LORA, Precision.BF16, 2, id="a frozen base is its weights"),
        pytest.param(Method.LORA, Precision.FP16_MIXED, 2, id="mixed: a frozen base in half precision"),
        pytest.param(Method.LORA, Precision.FP32, 4, id="a frozen fp32 base"),
        pytest.param(Method.QLORA, Precision.BF16, 0.5, id="four bits"),
    ],
)
def test_needed_bytes(method: Method, precision: Precision, bytes_per_parameter: float) -> None:
    assert needed_bytes(10**9, method, precision) == 10**9 * bytes_per_parameter + GIB
