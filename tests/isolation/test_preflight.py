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
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")

CHILD = """
import json, resource, sys
from autocompile.slice.preflight import preflight
from autocompile.spec import PreflightRequest
from autocompile.workloads.job import MachineFault, WorkloadError
stages = []
try:
    facts = preflight(PreflightRequest.model_validate_json(sys.argv[1]), stages.append)
    answer = {"facts": facts.model_dump(mode="json")}
except (MachineFault, WorkloadError) as error:
    answer = {"fault": type(error).__name__, "message": error.message, "where": getattr(error, "where", None)}
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({**answer, "stages": stages, "peak_bytes": peak}))
"""


def ask(cache: Path, environment: dict[str, str] | None = None, **workload: Any) -> dict[str, Any]:
    """The answer of a preflight in a child whose caches lie where the request says."""
    request = PreflightRequest(
        workload=WorkloadSpec(**workload), seed=0, devices=(), deadline_seconds=100, cache_folder=str(cache)
    )
    child = subprocess.run(
        [sys.executable, "-c", CHILD, request.model_dump_json()],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            **(environment or {}),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    answer: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def counting_compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ compiler, with a line in a file beside it for each thing it builds."""
    folder = tmp_path_factory.mktemp("compiler")
    compiler = folder / "g++"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo "$*" >> {folder}/built ;; esac\nexec {shutil.which("g++")} "$@"\n'
    )
    compiler.chmod(0o755)
    return compiler


def n_built(compiler: Path) -> int:
    built = compiler.with_name("built")
    return len(built.read_text().splitlines()) if built.exists() else 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, counting_compiler: Path) -> tuple[dict[str, Any], Path]:
    """The answer for tiny-llama, and the cache folder it left."""
    cache = tmp_path_factory.mktemp("seed")
    return ask(cache, {"CXX": str(counting_compiler)}, model="tiny-llama", device="cpu"), cache


def test_the_facts_of_a_catalogue_model(tiny: tuple[dict[str, Any], Path]) -> None:
    answer, _ = tiny
    facts = Facts.model_validate(answer["facts"])
    assert answer["stages"] == ["preflight", "build", "compile"]
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


PROBE = "from torch._inductor.cpu_vec_isa import valid_vec_isa_list; valid_vec_isa_list()"


@pytest.mark.parametrize(
    ("seeded", "builds"),
    [
        pytest.param(True, False, id="a copy of the preflight's cache folder spares the probe"),
        pytest.param(False, True, id="an empty folder does not"),
    ],
)
def test_the_seed_holds_the_probe_of_vector_instructions(
    tiny: tuple[dict[str, Any], Path], counting_compiler: Path, tmp_path: Path, seeded: bool, builds: bool
) -> None:
    _, seed = tiny
    cache = tmp_path / "copy"
    if seeded:
        shutil.copytree(seed, cache)
    before = n_built(counting_compiler)
    environment = {**os.environ, "CXX": str(counting_compiler), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    subprocess.run([sys.executable, "-c", PROBE], env=environment, check=True)
    assert (n_built(counting_compiler) > before) is builds


@pytest.mark.parametrize(
    ("environment", "setting"),
    [
        pytest.param({"CXX": "/nonexistent"}, " (now CXX=/nonexistent)", id="CXX names nothing"),
        pytest.param({"PATH": "/nowhere"}, "", id="nothing is on the path"),
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_a_missing_compiler_is_named_even_where_a_warm_cache_would_hide_it(
    tiny: tuple[dict[str, Any], Path], tmp_path: Path, environment: dict[str, str], setting: str, warm: bool
) -> None:
    cache = tmp_path / "cache"
    if warm:
        shutil.copytree(tiny[1], cache)
    answer = ask(cache, environment, model="tiny-llama", device="cpu")
    assert answer.get("fault") == "MachineFault"
    assert answer["message"] == f"no working C++ compiler: install g++ or set CXX{setting}"


def test_a_compiler_that_builds_nothing_is_named_with_its_error(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *--version*) exec g++ --version ;; esac\n'
        'echo "fatal error: Python.h: No such file or directory" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    answer = ask(tmp_path / "cache", {"CXX": str(compiler)}, model="tiny-llama", device="cpu")
    assert answer.get("fault") == "MachineFault"
    assert "the C++ compiler cannot build torch's kernels" in answer["message"]
    assert "Python.h" in answer["message"]


def test_a_plain_file_as_cache_folder_is_named(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.write_text("")
    answer = ask(cache, model="tiny-llama", device="cpu")
    assert answer.get("fault") == "MachineFault"
    assert answer["message"] == f"cache folder {cache}: File exists"


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@AS_ROOT
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param("size=64k", "0.00 GiB free on its disk, expected at least 1 GiB", id="full"),
        pytest.param("size=2g,noexec", "mounted noexec", id="noexec"),
        pytest.param("size=2g,ro", "Read-only file system", id="read-only"),
    ],
)
def test_a_cache_folder_that_does_not_work_is_named(tmp_path: Path, options: str, message: str) -> None:
    with mounted(tmp_path / "disk", options) as cache:
        answer = ask(cache, model="tiny-llama", device="cpu")
    assert answer.get("fault") == "MachineFault"
    assert answer["message"].startswith(f"cache folder {tmp_path / 'disk'}: ")
    assert message in answer["message"]


@WITHOUT_GPU
@pytest.mark.parametrize(
    ("workload", "message"),
    [
        pytest.param(
            {"model": "llama2-7b"},
            "llama2-7b: needs a GPU, this machine has none (pass --device cpu to force it)",
            id="a 7B without a word about the device",
        ),
        pytest.param(
            {"model": "tiny-llama", "device": "cuda"},
            "device cuda: this machine has no GPU that torch can use (see nvidia-smi)",
            id="a GPU asked for",
        ),
    ],
)
def test_a_machine_without_a_gpu(tmp_path: Path, workload: dict[str, Any], message: str) -> None:
    answer = ask(tmp_path, **workload)
    assert (answer.get("fault"), answer["message"]) == ("MachineFault", message)


def test_a_model_beyond_this_machine_is_refused_with_the_amounts(tmp_path: Path) -> None:
    answer = ask(tmp_path, model="llama2-13b", method="full", precision="bf16-mixed", device="cpu")
    assert answer.get("fault") == "MachineFault"
    assert "this machine is " in answer["message"]
    assert "GiB free, llama2-13b (full, bf16-mixed) needs at least 195.0 GiB" in answer["message"]


def test_a_large_model_is_described_without_its_weights(tiny: tuple[dict[str, Any], Path]) -> None:
    answer = ask(tiny[1], model="llama3.2-1b", precision="bf16", device="cpu")
    assert answer["facts"]["parameters"] == 1_235_814_400
    assert answer["facts"]["method"] == "lora"
    assert answer["peak_bytes"] < 2 * 1_235_814_400


def test_the_facts_of_a_script(tiny: tuple[dict[str, Any], Path]) -> None:
    facts = ask(tiny[1], script=f"{EXAMPLES / 'blocks.py'}:build", device="cpu")["facts"]
    assert (facts["layers"], facts["parameters"], facts["model_type"]) == (3, 3 * 17 * 16, None)
    assert (facts["method"], facts["precision"], facts["frozen_knobs"]) == ("full", "fp32", {})
    assert facts["regions"] == {"layer": "blocks.*", "mlp": "blocks.*.mlp"}
    assert len(facts["environment"]["workload"]) == 16


def test_a_batch_that_does_not_grow_freezes_the_micro_batch(tiny: tuple[dict[str, Any], Path]) -> None:
    facts = ask(tiny[1], script=f"{EXAMPLES / 'blocks.py'}:frozen", device="cpu")["facts"]
    reason = "gives 8 samples a batch for ctx.micro_batch=2 and 8 for 4"
    assert facts["frozen_knobs"].keys() == {"micro_batch"}
    assert facts["frozen_knobs"]["micro_batch"].endswith(f"blocks.py:frozen {reason}")


def test_a_wrong_script_is_the_users(tmp_path: Path) -> None:
    answer = ask(tmp_path, script=f"{EXAMPLES / 'blocks.py'}:raises", device="cpu")
    assert answer.get("fault") == "WorkloadError"
    assert "blocks.py: raises: ValueError" in answer["message"]
    assert answer["where"].startswith("blocks.py:")


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
