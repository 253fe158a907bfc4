"""The model's arithmetic against what torch counts in a real backward pass, and the ceiling it is compared with."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, MixtralConfig

from autocompile.slice.flops import counted, matmul_flops_per_second, trainable_share, training_flops
from autocompile.slice.parity import eager_reference
from autocompile.spec import Method, Precision, WorkloadSpec
from autocompile.workloads.job import Context, Job, prepare

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft

CPU = torch.device("cpu")


def llama(method: Method) -> Job:
    workload = WorkloadSpec(model="tiny-llama", method=method, device="cpu", sequence_length=64)
    return prepare(Context.of(workload, {"micro_batch": 2}, device=CPU, seed=0), workload)


@pytest.mark.parametrize(
    ("method", "tolerance"),
    [
        pytest.param(Method.FULL, 1e-6, id="full"),
        pytest.param(Method.LORA, 0.03, id="lora: the first layer's input needs no gradient"),
    ],
)
def test_the_estimate_is_what_forward_and_backward_do(method: Method, tolerance: float) -> None:
    job = llama(method)
    batch = next(job.batches())
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        job.loss(job.model, batch).backward()
    reference = eager_reference(job, [batch], seed=0)
    assert reference.flops == pytest.approx(counter.get_total_flops(), rel=tolerance)
    assert reference.spread == 0  # counting changes no loss


def test_four_bit_layers_count_as_what_they_stand_for() -> None:
    lora, qlora = (llama(method) for method in (Method.LORA, Method.QLORA))
    assert trainable_share(qlora.model) == trainable_share(lora.model) < 0.1
    flops = [eager_reference(job, [next(job.batches())], seed=0).flops for job in (lora, qlora)]
    assert flops[0] == flops[1]


def test_experts_and_shared_heads_are_counted() -> None:
    config = MixtralConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=100,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    tokens = torch.zeros(2, 32, dtype=torch.long)
    with torch.no_grad():
        _, flops = counted(model, lambda: model(input_ids=tokens, use_cache=False))
    experts = 2 * 3 * 64 * 128
    weights = 64 * (64 + 32 + 32 + 64) + 64 * 4 + experts + 64 * 100
    attended = 2 * 64 * 32
    assert flops == 6 * (weights + attended) * tokens.numel()


@pytest.mark.parametrize(
    ("forward", "trainable", "flops"),
    [
        pytest.param({"aten.mm": 10, "aten.addmm": 20}, 1.0, 90, id="all weights: three times the forward"),
        pytest.param({"aten.mm": 10}, 0.0, 20, id="no weight of it"),
        pytest.param({"aten._scaled_dot_product_flash_attention": 10, "aten.bmm": 1}, 0.0, 33, id="attention has none"),
        pytest.param({}, 1.0, 0, id="nothing counted"),
    ],
)
def test_training_flops(forward: dict[str, int], trainable: float, flops: float) -> None:
    assert training_flops(forward, trainable) == flops


def test_tied_weights_count_where_they_multiply() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(10, 4), "frozen": nn.Linear(4, 5), "head": nn.Linear(4, 10)})
    model["frozen"].requires_grad_(False)
    assert trainable_share(model) == 40 / 60
    model["head"].weight = model["embedding"].weight
    assert trainable_share(model) == 40 / 60


def test_what_cannot_be_counted_is_null_and_named(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []

    def choosy() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise NotImplementedError("no dispatch mode here")
        return 7

    with caplog.at_level(logging.WARNING, logger="autocompile.slice"):
        assert counted(nn.Linear(1, 1), choosy) == (7, None)
    assert "NotImplementedError: no dispatch mode here" in caplog.text
    assert counted(nn.Linear(1, 1), lambda: 8) == (8, None)


def test_an_error_of_the_model_s_own_comes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        counted(nn.Linear(1, 1), lambda: 1 // 0)


@pytest.mark.parametrize("precision", list(Precision))
def test_the_ceiling_is_soon_known_on_a_cpu(precision: Precision) -> None:
    began = time.perf_counter()
    found = matmul_flops_per_second(CPU, precision)
    assert time.perf_counter() - began < 1.0  # 0.2 on a machine that is not busy
    assert found is not None and found > 1e8
