"""A Hugging Face Trainer as a job: the steps are those of its own loop."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from autocompile.spec import Precision, WorkloadSpec
from autocompile.workloads.job import Context, Job, WorkloadError, prepare, trainable
from tests.workload_examples import hf_trainer

EXAMPLES = Path(__file__).parents[1] / "workload_examples"
CPU = torch.device("cpu")


def job_of(function: str = "build", *, micro_batch: int = 4) -> Job:
    workload = WorkloadSpec(script=f"{EXAMPLES / 'hf_trainer.py'}:{function}", trainer="hf", device="cpu")
    return prepare(Context.of(workload, {"micro_batch": micro_batch}, device=CPU, seed=0), workload)


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, args, state, control, logs=None, **rest) -> None:
        if logs and "loss" in logs:
            self.found.append(logs["loss"])


def test_its_steps_are_those_that_train_would_take() -> None:
    """Dropout off, a constant rate and equal seeds, so that the losses must be the same."""
    plain = {"lr_scheduler_type": "constant", "logging_steps": 1, "per_device_train_batch_size": 4, "max_steps": 6}
    ctx = Context(device=CPU, dtype=torch.float32, micro_batch=4, sequence_length=16)
    trainer, losses = hf_trainer.build(ctx, seed=0, **plain), Losses()
    trainer.add_callback(losses)
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    trainer.train()

    job = job_of()
    for module in job.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    optimizer, stream = job.optimizer(trainable(job.model)), job.batches()
    ours = [float(job.train_step(job.model, [next(stream)], optimizer)) for _ in range(6)]
    assert ours == pytest.approx(losses.found, rel=1e-3)


def test_batches_are_the_loader_s_with_the_last_partial_one_and_can_be_begun_again() -> None:
    job = job_of(micro_batch=5)
    first, second = (list(job.batches()) for _ in range(2))
    assert [len(batch["labels"]) for batch in first] == [5, 5, 5, 5, 4]
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, second, strict=True))
    assert job.mask == "padding"
    assert job.tokens(first[0]) == int(first[0]["attention_mask"].sum())


def test_accumulated_micro_batches_are_one_step_of_the_callbacks() -> None:
    job = job_of()
    steps = next(one for one in job.train_step.trainer.callback_handler.callbacks if type(one).__name__ == "StepsBegun")
    optimizer = job.optimizer(trainable(job.model))
    before = [parameter.detach().clone() for parameter in trainable(job.model)]
    loss = job.train_step(job.model, list(itertools.islice(job.batches(), 2)), optimizer)
    assert steps.steps == 1 and loss.shape == ()
    assert any(not torch.equal(old, new) for old, new in zip(before, trainable(job.model), strict=True))


def test_an_optimizer_that_it_was_given_stays() -> None:
    job = job_of("with_sgd")
    assert type(job.optimizer(trainable(job.model))) is torch.optim.SGD
    assert type(job_of().optimizer(trainable(job_of().model))) is torch.optim.AdamW


def test_its_arguments_decide_the_precision() -> None:
    assert (job_of().precision, job_of("mixed").precision) == (Precision.FP32, Precision.BF16_MIXED)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        pytest.param("compiled", "torch_compile=True: leave it off", id="compiled"),
        pytest.param("half", "fp16=True needs a gradient scaler", id="fp16"),
        pytest.param("accumulating", "leave it at 1 and pass --global-batch", id="accumulation"),
        pytest.param("checkpointed", "leave it off, it is a knob", id="checkpointing"),
        pytest.param("model_alone", "expected it to return a transformers.Trainer, found Bert", id="no Trainer"),
    ],
)
def test_what_cannot_be_followed_is_named(function: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        job_of(function)
