"""What the doctor makes of versions: torch with its triton, a driver with torch's CUDA."""

from __future__ import annotations

import pytest

from autocompile.machine import Driver, cuda_of, driver_finding, triton

CU130 = ('nvidia-cudnn-cu13==9.20.0; platform_system == "Linux"', 'triton==3.6.0; platform_system == "Linux"')
TOOLKIT = ("sympy>=1.13.3", 'cuda-toolkit[cublas,cudart]==13.0.2; platform_system == "Linux"', "triton==3.7.1")
RUNTIME = ("nvidia-cuda-runtime-cu12==12.8.90; platform_system == 'Linux'", "triton==3.4.0")


@pytest.mark.parametrize(
    ("torch", "found", "requirements", "missing"),
    [
        pytest.param("2.11.0+cu130", "3.6.0", CU130, None, id="the pair"),
        pytest.param("2.11.0+cu130", "3.5.1", CU130, "pip install triton==3.6.0", id="another triton"),
        pytest.param("2.11.0+cu130", None, CU130, "wants triton 3.6.0, found none", id="no triton"),
        pytest.param("2.13.0+cpu", None, ("sympy>=1.13.3",), None, id="a torch for CPUs needs none"),
        pytest.param(None, None, (), None, id="no torch, which is said elsewhere"),
    ],
)
def test_triton_belongs_to_its_torch(torch, found, requirements, missing):
    said = triton(torch, found, requirements).missing
    assert said is None if missing is None else missing in said


@pytest.mark.parametrize(
    ("torch", "requirements", "cuda"),
    [
        pytest.param("2.11.0+cu130", (), (13, 0), id="in the version"),
        pytest.param("2.9.1+cu128", (), (12, 8), id="two digits and one"),
        pytest.param("2.13.0", TOOLKIT, (13, 0), id="in the toolkit it wants"),
        pytest.param("2.8.0", RUNTIME, (12, 8), id="in the runtime it wants"),
        pytest.param("2.13.0+cpu", ("sympy>=1.13.3",), None, id="built for CPUs"),
    ],
)
def test_the_cuda_of_a_torch(torch, requirements, cuda):
    assert cuda_of(torch, requirements) == cuda


@pytest.mark.parametrize(
    ("torch", "supported", "missing"),
    [
        pytest.param("2.11.0+cu130", (13, 0), None, id="the same"),
        pytest.param("2.11.0+cu130", (13, 2), None, id="a newer driver"),
        pytest.param("2.9.1+cu128", (12, 4), None, id="an older minor version runs too"),
        pytest.param("2.11.0+cu130", (12, 8), "update the driver or install a torch for CUDA 12", id="too old"),
        pytest.param("2.13.0+cpu", (13, 0), "is built for CPUs and cannot use the GPU", id="a torch for CPUs"),
    ],
)
def test_the_driver_runs_what_torch_was_built_for(torch, supported, missing):
    driver = Driver(version="580.95", cuda=supported, gpus=())
    said = driver_finding(driver, torch, ()).missing
    assert said is None if missing is None else missing in said
