"""Whether gradients are too far off, and the parts that find out: pure decisions, and small real models."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from autocompile.records import Deviation, Numerics
from autocompile.slice.arithmetic import Float32, RoundedAnew, to_float32, without_tf32
from autocompile.slice.copies import Onlooker, fill_zeros, restore_state, saved_state
from autocompile.slice.deviation import Distance, Step, Yardstick, judged, worst_of
from autocompile.slice.numerics import copied_layers, is_plain_eager, require_close
from autocompile.slice.parity import NumericsMismatch
from autocompile.space import defaults
from autocompile.workloads.job import Job

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")


def errors(loss: float, gradients: float, **parameters: float) -> dict[str, float]:
    return {"loss": loss, "gradients": gradients, **parameters}


def yardstick(eager: dict[str, float], *, floor: float = 1e-3, loss_floor: float = 0.0, **more) -> Yardstick:
    shares = {name: 0.5 for name in eager if name not in ("loss", "gradients")}
    return Yardstick(**{"eager": eager, "shares": shares, "floor": floor, "loss_floor": loss_floor, **more})


BF16 = yardstick(errors(1e-4, 0.01, a=0.02, b=1e-3))
FP32 = yardstick(errors(0, 0, a=0, b=0), floor=1e-5)
RANDOM = yardstick(errors(0, 0, a=0, b=0), floor=1e-5, spread=errors(0.05, 0.1, a=0.3, b=0.01))
SAME_LOSS = yardstick(errors(0, 0, a=0, b=0), floor=1e-5, spread=errors(1e-5, 0.1, a=0.3, b=0.01))


@pytest.mark.parametrize(
    ("by", "found", "beyond"),
    [
        pytest.param(BF16, errors(1e-3, 0.02, a=0.08, b=0.01), [], id="all at their limits"),
        pytest.param(BF16, errors(1.1e-3, 0, a=0, b=0), ["loss"], id="loss above the floor of bf16"),
        pytest.param(BF16, errors(0, 0.021, a=0, b=0), ["gradients"], id="all gradients above twice eager's error"),
        pytest.param(BF16, errors(0, 0, a=0.081, b=0), ["a"], id="a parameter above four times eager's error"),
        pytest.param(BF16, errors(0, 0, a=0, b=0.011), ["b"], id="a parameter above ten floors"),
        pytest.param(BF16, errors(0, 0.7, a=0.1, b=0.75), ["gradients", "b"], id="the one furthest beyond is named"),
        pytest.param(BF16, errors(0, 0.5, a=5, b=INF), ["gradients", "b"], id="a missing gradient is beyond all"),
        pytest.param(BF16, errors(NAN, NAN, a=NAN, b=0), ["loss", "gradients", "a"], id="not a number"),
        pytest.param(FP32, errors(1e-5, 1e-5, a=1e-4, b=0), [], id="the floors of fp32"),
        pytest.param(FP32, errors(1.1e-5, 1.1e-5, a=1.1e-4, b=0), ["loss", "gradients", "a"], id="above those of fp32"),
        pytest.param(
            yardstick(errors(0, 0, a=0), loss_floor=2**-7), errors(2**-7, 0, a=0), [], id="a loss that is itself bf16"
        ),
        pytest.param(
            yardstick(errors(0, 0, a=0, b=0), shares={"a": 1.0, "b": 1e-7}),
            errors(0, 0, a=0, b=5),
            [],
            id="a gradient of rounding noise is left out",
        ),
        pytest.param(
            yardstick(errors(0, 0, a=0, b=INF)), errors(0, 0, a=0, b=INF), [], id="one that eager lacks is left out"
        ),
        pytest.param(RANDOM, errors(0.2, 0.4, a=1.4, b=0.4), [], id="other random numbers than eager's"),
        pytest.param(RANDOM, errors(0.26, 0.4, a=0, b=0), ["loss"], id="more than other random numbers change"),
        pytest.param(RANDOM, errors(0, 0.4, a=1.4, b=0), ["gradients", "a"], id="eager's numbers, as the loss shows"),
        pytest.param(SAME_LOSS, errors(0, 0.4, a=1.4, b=0), [], id="a loss that cannot show whose numbers they are"),
    ],
)
def test_judged(by: Yardstick, found: dict[str, float], beyond: list[str]) -> None:
    deviations = judged(found, by)
    assert [deviation.quantity for deviation in deviations][:2] == ["loss", "gradients"]
    assert len(deviations) == 3
    assert [deviation.quantity for deviation in deviations if deviation.is_beyond] == beyond
    assert Numerics.model_validate_json(Numerics(checked=True, worst=deviations).model_dump_json()).worst == deviations


def test_the_worst_error_of_some_runs_leaves_out_what_is_no_number() -> None:
    assert worst_of(errors(1, 2, a=0), errors(3, NAN, a=INF), errors(0, 1, a=4)) == errors(3, 2, a=4)


def step(loss: float, **gradients: list[float]) -> Step:
    tensors = {name: torch.tensor(values) for name, values in gradients.items()}
    return Step(loss=loss, loss_spacing=0.0, gradients=tensors, is_random=False)


def test_distances_are_relative_and_over_all_steps() -> None:
    distance = Distance(torch.device("cpu"))
    distance.add(step(2.0, a=[3.0, 0.0], b=[1.0]), step(1.0, a=[3.0, 4.0], b=[1.0]))
    distance.add(step(2.0, a=[3.0, 4.0], b=[1.0]), step(2.0, a=[3.0, 4.0], b=[1.0]))
    found = distance.relative()
    assert found == pytest.approx(errors(1 / math.sqrt(5), 4 / math.sqrt(52), a=4 / math.sqrt(50), b=0))
    assert distance.shares() == pytest.approx({"a": math.sqrt(50 / 52), "b": math.sqrt(2 / 52)})


def test_a_gradient_that_is_there_in_one_job_only_is_no_small_difference() -> None:
    distance = Distance(torch.device("cpu"))
    distance.add(step(1.0, extra=[3.0]), step(1.0, a=[3.0], zero=[0.0]))
    assert distance.relative() == pytest.approx(errors(0, math.sqrt(2), a=INF, zero=0))


@pytest.mark.parametrize(
    ("worst", "message"),
    [
        pytest.param([("loss", 0.1), ("gradients", 0.1), ("a.weight", 0.1)], None, id="none beyond"),
        pytest.param(
            [("loss", 0.1), ("gradients", 0.4), ("a.weight", 0.75)],
            "the gradient of a.weight: relative error 0.75, limit 0.2 (eager's own 0.05); "
            "all gradients together: relative error 0.4, limit 0.2 (eager's own 0.05)",
            id="each with its error and limit, the most telling first",
        ),
        pytest.param(
            [("loss", None), ("gradients", 0.1)], "the loss: missing or not a number", id="what is not a number"
        ),
    ],
)
def test_a_mismatch_names_what_is_beyond_its_limit(worst: list[tuple[str, float | None]], message: str | None) -> None:
    deviations = [Deviation(quantity=name, error=error, eager_error=0.05, limit=0.2) for name, error in worst]
    numerics = Numerics(checked=True, worst=tuple(deviations))
    if message is None:
        require_close(numerics)
    else:
        with pytest.raises(NumericsMismatch) as raised:
            require_close(numerics)
        assert str(raised.value) == message


@pytest.mark.parametrize(
    ("knobs", "plain"),
    [
        pytest.param({}, True, id="all defaults"),
        pytest.param({"micro_batch": 8, "cache_size_limit": 2}, True, id="what eager training does not compute with"),
        pytest.param({"scope": "layer"}, False, id="compiled"),
        pytest.param({"sdpa": "math"}, False, id="another attention kernel"),
        pytest.param({"gradient_checkpointing": True}, False, id="recomputed"),
    ],
)
def test_is_plain_eager(knobs, plain: bool) -> None:
    assert is_plain_eager({**defaults(), **knobs}) == plain


@pytest.mark.parametrize(
    ("layers", "parameters", "copied"),
    [
        pytest.param(None, 4_000_000, None, id="a small model is copied whole"),
        pytest.param(8, 4_000_000, 8, id="as deep as it was timed"),
        pytest.param(None, 7_000_000_000, 2, id="of a large one two layers"),
        pytest.param(1, 7_000_000_000, 1, id="never more than was timed"),
    ],
)
def test_copied_layers(layers: int | None, parameters: int, copied: int | None) -> None:
    assert copied_layers(layers, parameters) == copied


class Mixed(nn.Module):
    """Computes in bf16 in each of the ways that a script can: weights, autocast, a cast, and a constant it kept."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8)
        self.kept = torch.linspace(0, 1, 8).to(torch.bfloat16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(inputs.to(torch.bfloat16)) * self.kept
        with torch.autocast("cpu", torch.bfloat16):
            return self.outer(hidden).float()


def gradients(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(model(inputs).pow(2).sum(), list(model.parameters())))


def test_the_reference_is_fp32_whatever_the_script_casts_to() -> None:
    torch.manual_seed(0)
    model, inputs = Mixed(), torch.randn(4, 8)
    exact = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    exact.load_state_dict(
        {
            "0.weight": model.inner.weight,
            "0.bias": model.inner.bias,
            **{f"1.{name}": value for name, value in model.outer.state_dict().items()},
        }
    )
    hidden = exact[0](inputs) * model.kept.float()
    wanted = torch.autograd.grad(exact[1](hidden).pow(2).sum(), list(exact.parameters()))
    low = [found - right for found, right in zip(gradients(model, inputs), wanted, strict=True)]
    assert all(apart.abs().max() > 1e-3 for apart in low)
    assert to_float32(model)
    with Float32() as mode:
        found = gradients(model, inputs)
    assert mode.replaced
    for one, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, right)


def test_fp32_is_left_as_it_is() -> None:
    model = nn.Linear(8, 8)
    assert not to_float32(model)
    with Float32() as mode:
        gradients(model, torch.randn(2, 8))
    assert not mode.replaced


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2**-17), (torch.bfloat16, 2**-8)])
def test_rounding_anew_changes_results_by_a_rounding_and_draws_none_of_the_workload_s_numbers(dtype, rounding) -> None:
    model, inputs = nn.Linear(64, 64, dtype=dtype), torch.randn(64, 64, dtype=dtype)
    mask = torch.full((64,), torch.finfo(dtype).min, dtype=dtype)
    exact = model(inputs).detach()
    state = torch.get_rng_state()
    with RoundedAnew(CPU, draw=1):
        found = model(inputs).detach()
        assert torch.equal(mask + 0, mask)  # no gradient flows through it
        assert (model(inputs) * 0 + mask).isfinite().all()
    assert torch.equal(state, torch.get_rng_state())
    apart = ((found - exact) / exact).abs()
    assert 0.2 * rounding < apart.mean() <= apart.max() < 2.1 * rounding


def test_tf32_is_off_in_the_reference_only() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with without_tf32():
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_copy_starts_from_the_saved_weights_and_buffers_with_no_weight_all_zero() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    nn.init.zeros_(model[0].weight)
    fill_zeros(model)
    assert 0 < model[0].weight.abs().max() < 0.1
    state = saved_state(model)
    model.eval()
    restore_state(model, state)
    assert model.training and model[1].training
    model(torch.randn(8, 4))  # moves the running mean
    with torch.no_grad():
        model[0].weight.zero_()
    restore_state(model, state)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(tensor, state.tensors[name]), name


def test_an_onlooker_sees_the_gradients_of_a_step_and_changes_nothing() -> None:
    model = nn.Linear(2, 2)
    before = saved_state(model)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).sum()

    def optimizer(parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": list(parameters), "lr": 0.5}])

    job = Job(model=model, loss=loss, batches=lambda: iter(()), optimizer=optimizer)
    onlooker = Onlooker(job.optimizer(model.parameters()), model)
    assert onlooker.param_groups[0]["lr"] == 0.5
    job.train_step(model, [torch.ones(1, 2), 3 * torch.ones(1, 2)], onlooker)
    assert onlooker.gradients is not None
    assert onlooker.gradients["weight"].tolist() == [[2, 2], [2, 2]]  # the mean over both micro-batches
    assert all(torch.equal(tensor, before.tensors[name]) for name, tensor in model.named_parameters())
