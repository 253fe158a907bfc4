"""Workloads: what is built is what was asked for, the same for the same seed, and wrong ones are named in one line."""

from __future__ import annotations

import ast
import gc
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_module_registration_hooks
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, GPT2Config, LlamaConfig

from autocompile.knobs.setup import NotApplicable, Setup, apply_config, modules_of
from autocompile.slice.cycles import cycles
from autocompile.space import defaults
from autocompile.spec import LoraSpec, Method, Precision, Task, WorkloadSpec
from autocompile.workloads import models, scripts
from autocompile.workloads.job import Context, Job, WorkloadError, prepare, trainable
from autocompile.workloads.training import AccumulatedStep, count_tokens, optimizer_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

CPU = torch.device("cpu")
EXAMPLES = Path(__file__).parents[1] / "workload_examples"
PLACES = {  # of the functions of one example
    node.name: f"blocks.py:{node.lineno}"
    for node in ast.parse((EXAMPLES / "blocks.py").read_text()).body
    if isinstance(node, ast.FunctionDef)
}
LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
GPT2 = GPT2Config(vocab_size=64, n_embd=64, n_layer=3, n_head=4, n_positions=64)
LLAMA_LINEARS = {
    *(f"self_attn.{part}_proj" for part in ("q", "k", "v", "o")),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
}
GPT2_LINEARS = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with the config of a model small enough for bf16 on a CPU."""
    folder = tmp_path_factory.mktemp("llama")
    LLAMA.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("gpt2")
    GPT2.save_pretrained(folder)
    return str(folder)


def spec(model: str, method: str = "full", **fields: Any) -> WorkloadSpec:
    return WorkloadSpec(**{"model": model, "method": method, "sequence_length": 16, "device": "cpu", **fields})


def job_of(workload: WorkloadSpec, *, micro_batch: int = 2, seed: int = 0, depth: int | None = None) -> Job:
    return prepare(Context.of(workload, {"micro_batch": micro_batch}, device=CPU, seed=seed, depth=depth), workload)


def script(function: str, file: str = "blocks.py", **fields: Any) -> WorkloadSpec:
    return WorkloadSpec(script=f"{EXAMPLES / file}:{function}", device="cpu", **fields)


def step(job: Job, n_batches: int = 1) -> Tensor:
    batches = list(itertools.islice(job.batches(), n_batches))
    return job.train_step(job.model, batches, job.optimizer(trainable(job.model)))


def state(job: Job) -> dict[str, Tensor]:
    """Parameters and buffers, those that no state dict holds included."""
    return dict(itertools.chain(job.model.named_parameters(), job.model.named_buffers()))


@pytest.mark.parametrize("method", Method)
def test_equal_seeds_give_equal_weights_and_batches(llama: str, method: Method) -> None:
    one, same, other = (job_of(spec(llama, method, mask="padding"), seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(value, state(same)[name]) for name, value in state(one).items())
    assert not all(torch.equal(value, state(other)[name]) for name, value in state(one).items())
    first, again, differing = (next(job.batches()) for job in (one, same, other))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["input_ids"], differing["input_ids"])


def test_the_batches_of_one_job_differ_and_start_anew(llama: str) -> None:
    job = job_of(spec(llama))
    first, second = itertools.islice(job.batches(), 2)
    assert not torch.equal(first["input_ids"], second["input_ids"])
    assert torch.equal(next(job.batches())["input_ids"], first["input_ids"])


F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("method", "precision", "base", "trained", "logits"),
    [
        pytest.param("full", "bf16", B16, B16, B16, id="bf16 trains bf16 weights"),
        pytest.param("full", "fp32", F32, F32, F32, id="fp32 throughout"),
        pytest.param("full", "bf16-mixed", F32, F32, B16, id="bf16-mixed trains fp32 weights under autocast"),
        pytest.param("full", "fp16-mixed", F32, F32, F16, id="fp16-mixed trains fp32 weights under autocast"),
        pytest.param("lora", "bf16", B16, F32, B16, id="bf16 adapters are fp32"),
        pytest.param("lora", "bf16-mixed", B16, F32, B16, id="a frozen base needs no fp32 weights"),
        pytest.param("qlora", "bf16", B16, F32, B16, id="what qlora leaves unquantised is bf16"),
        pytest.param("qlora", "fp32", F32, F32, F32, id="qlora in fp32"),
    ],
)
def test_dtypes(
    llama: str, method: str, precision: str, base: torch.dtype, trained: torch.dtype, logits: torch.dtype
) -> None:
    job = job_of(spec(llama, method, precision=precision))
    seen: list[torch.dtype] = []
    job.model.register_forward_hook(lambda module, inputs, output: seen.append(output.logits.dtype))
    assert torch.isfinite(step(job))
    assert seen == [logits]
    assert {parameter.dtype for parameter in trainable(job.model)} == {trained}
    assert {value.dtype for name, value in state(job).items() if "embed_tokens" in name} == {base}
    assert job.precision is Precision(precision)


def test_precision_is_fp32_on_a_cpu_and_bf16_on_a_gpu_unless_asked() -> None:
    assert models.resolved_precision(spec("gpt2"), "cpu") is Precision.FP32
    assert models.resolved_precision(spec("gpt2"), "cuda") is Precision.BF16
    assert models.resolved_precision(spec("gpt2", precision="fp16-mixed"), "cuda") is Precision.FP16_MIXED


@pytest.mark.parametrize(
    ("asked", "parameters", "method"),
    [
        pytest.param(None, 999_999_999, Method.FULL, id="a small model is trained whole"),
        pytest.param(None, 1_000_000_000, Method.LORA, id="a billion parameters get adapters"),
        pytest.param("full", 7_000_000_000, Method.FULL, id="what is asked for counts"),
    ],
)
def test_default_method(asked: str | None, parameters: int, method: Method) -> None:
    assert models.resolved_method(spec("gpt2", asked), parameters, Task.CAUSAL_LM) is method


def test_tf32_is_off_for_every_job(llama: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    job_of(spec(llama))
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(("name", "linears"), [("llama", LLAMA_LINEARS), ("gpt2", GPT2_LINEARS)])
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_sit_on_all_linear_layers_of_the_blocks_and_nowhere_else(
    request: pytest.FixtureRequest, name: str, linears: set[str], method: str
) -> None:
    job = job_of(spec(request.getfixturevalue(name), method, lora=LoraSpec(r=4)))
    adapted = {name.rpartition(".lora_A")[0] for name, _ in job.model.named_parameters() if ".lora_A" in name}
    blocks = modules_of(Setup(model=job.model, regions=job.regions), "layer")
    assert adapted == {f"{block}.{linear}" for block in blocks for linear in linears}
    assert {name for name, value in job.model.named_parameters() if value.requires_grad} == {
        f"{module}.lora_{letter}.default.weight" for module in adapted for letter in "AB"
    }
    assert {value.shape[0] for name, value in job.model.named_parameters() if ".lora_A" in name} == {4}
    step(job)
    assert all(bool(parameter.grad.any()) for parameter in trainable(job.model) if parameter.grad is not None)
    assert all(parameter.grad is not None for parameter in trainable(job.model))


@pytest.mark.parametrize(("name", "linears"), [("llama", LLAMA_LINEARS), ("gpt2", GPT2_LINEARS)])
def test_qlora_packs_the_linear_layers_of_the_blocks_into_four_bits(
    request: pytest.FixtureRequest, name: str, linears: set[str]
) -> None:
    folder = request.getfixturevalue(name)
    job, plain = job_of(spec(folder, "qlora")), job_of(spec(folder, "lora"))
    packed = {name: value for name, value in job.model.named_parameters() if value.dtype is torch.uint8}
    assert len(packed) == 3 * len(linears)
    for name, value in packed.items():
        shape = dict(plain.model.named_parameters())[name].shape
        assert value.numel() * 2 == shape.numel()
        state = value.quant_state  # type: ignore[attr-defined]
        assert (state.quant_type, state.nested, state.dtype) == ("nf4", True, torch.float32)
        assert state.shape in (shape, shape[::-1])  # GPT-2's Conv1D holds its weight the other way round
    rest = {name: value.dtype for name, value in job.model.named_parameters() if name not in packed}
    assert set(rest.values()) == {torch.float32}
    assert not _global_module_registration_hooks


def test_qlora_has_the_buffers_and_norms_of_a_model_built_as_always(llama: str) -> None:
    """Rotary frequencies are in no state dict, so only their construction can make them right."""
    quantised, plain = (job_of(spec(llama, method, precision="bf16")).model for method in ("qlora", "lora"))
    buffers = dict(plain.named_buffers())
    assert any("inv_freq" in name for name in buffers)
    assert buffers.keys() == dict(quantised.named_buffers()).keys()
    for name, buffer in quantised.named_buffers():
        assert buffer.dtype == buffers[name].dtype
        assert torch.equal(buffer, buffers[name])
    norms = {name: value for name, value in plain.named_parameters() if "norm" in name}
    assert all(torch.equal(value, dict(quantised.named_parameters())[name]) for name, value in norms.items())


def test_qlora_never_holds_two_unquantised_layers(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes.functional

    alive: list[int] = []
    quantise = bitsandbytes.functional.quantize_4bit

    def counted(weight: Tensor, *args: Any, **named: Any) -> Any:
        alive.append(len(matrices() - others))
        return quantise(weight, *args, **named)

    def matrices() -> set[int]:
        return {
            id(one)
            for one in gc.get_objects()
            if type(one) is nn.Linear and not one.weight.is_meta and one.out_features != LLAMA.vocab_size
        }

    others = matrices()  # that earlier tests left
    monkeypatch.setattr(bitsandbytes.functional, "quantize_4bit", counted)
    job_of(spec(llama, "qlora"))
    assert len(alive) == 3 * len(LLAMA_LINEARS)
    assert max(alive) == 1


@pytest.mark.parametrize("method", ["full", "qlora"])
def test_real_weights_are_loaded_when_asked(llama: str, tmp_path: Path, method: str) -> None:
    saved = AutoModelForCausalLM.from_config(LLAMA)
    saved.save_pretrained(tmp_path)
    model = job_of(spec(str(tmp_path), method, weights=True)).model
    head = next(value for name, value in model.named_parameters() if "lm_head" in name)
    assert torch.equal(head, saved.lm_head.weight)
    assert any(value.dtype is torch.uint8 for value in model.parameters()) is (method == "qlora")


def test_no_cache_is_built_whatever_the_config_says(llama: str) -> None:
    """Guards on a cache's state recompile each layer until the limit."""
    job = job_of(spec(llama))
    assert job.model.config.use_cache is False
    job.model.config.use_cache = True
    outputs: list[Any] = []
    job.model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    job.loss(job.model, next(job.batches()))
    assert outputs[0].get("cache", outputs[0].get("past_key_values")) is None


def test_depth_limits_the_layers(llama: str) -> None:
    job = job_of(spec(llama), depth=2)
    assert len(modules_of(Setup(model=job.model, regions=job.regions), "layer")) == 2
    assert models.describe(spec(llama)).layers == 3


@pytest.mark.parametrize(
    ("mask", "tokens", "labels"),
    [
        pytest.param("none", 32, 32, id="no mask: every element is a token"),
        pytest.param("ones", 32, 32, id="a mask of ones: likewise"),
        pytest.param("padding", None, None, id="padding counts no tokens and bears no labels"),
    ],
)
def test_masks(llama: str, mask: str, tokens: int | None, labels: int | None) -> None:
    job = job_of(spec(llama, mask=mask))
    batch = next(job.batches())
    kept = batch["attention_mask"].bool() if mask != "none" else torch.ones(2, 16, dtype=torch.bool)
    assert (job.mask, job.unit) == (mask, "tokens")
    assert ("attention_mask" in batch) is (mask != "none")
    assert job.tokens(batch) == (tokens or int(kept.sum()))
    assert int((batch["labels"] != -100).sum()) == (labels or int(kept.sum()))
    assert torch.equal(batch["labels"][kept], batch["input_ids"][kept])
    assert mask != "padding" or (kept[:, 0].all() and not kept[:, -1].any())


def test_tokens_of_a_batch_without_token_ids_are_samples() -> None:
    job = job_of(script("build"), micro_batch=5)
    assert job.unit == "samples"
    assert job.tokens(next(job.batches())) == 5
    assert count_tokens({"pixels": [torch.ones(7, 3)]}) == 7


def test_a_step_over_micro_batches_has_the_gradient_of_one_large_batch() -> None:
    job = job_of(script("build"), micro_batch=4)
    first, second = itertools.islice(job.batches(), 2)
    whole = tuple(torch.cat(pair) for pair in zip(first, second, strict=True))
    job.loss(job.model, whole).backward()
    expected = [parameter.grad.clone() for parameter in job.model.parameters() if parameter.grad is not None]
    loss = job.loss(job.model, whole)
    mean = job.train_step(job.model, [first, second], torch.optim.SGD(job.model.parameters(), lr=0.0))
    assert torch.allclose(mean, loss)
    assert not mean.requires_grad
    for parameter, gradient in zip(job.model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)


def test_the_default_step_follows_a_replaced_loss() -> None:
    job = job_of(script("build"))
    inner = job.loss
    doubled = replace(job, loss=lambda model, batch: 2 * inner(model, batch))
    batch = next(job.batches())
    idle = torch.optim.SGD(job.model.parameters(), lr=0.0)
    assert torch.allclose(doubled.train_step(job.model, [batch], idle), 2 * job.train_step(job.model, [batch], idle))


def test_the_default_optimizer_is_fused_adamw_and_trains(llama: str) -> None:
    job = job_of(spec(llama))
    optimizer = job.optimizer(trainable(job.model))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["fused"] is True
    batch = next(job.batches())
    losses = [float(job.train_step(job.model, [batch], optimizer)) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_an_optimizer_goes_by_its_name_and_8_bits_need_a_gpu(llama: str) -> None:
    cpu = torch.device("cpu")
    parameters = [nn.Parameter(torch.ones(2))]
    assert optimizer_of("adamw_torch", cpu)(parameters).defaults["foreach"]
    for name in ("adamw_8bit", "paged_adamw_8bit"):
        with pytest.raises(NotApplicable, match=f"optimizer {name}: needs a GPU"):
            optimizer_of(name, cpu)
    workload = WorkloadSpec(model=llama, method=Method.FULL, sequence_length=16)
    ctx = Context.of(workload, {"micro_batch": 1, "optimizer": "adamw_torch"}, device=cpu, seed=0)
    assert prepare(ctx, workload).optimizer(parameters).defaults["foreach"]


def test_no_config_of_a_model_keeps_the_cache_that_training_does_not_read() -> None:
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", use_cache=True))
    setup = apply_config(Setup(model=built, regions={}), defaults())
    assert not built.config.use_cache
    assert "use_cache" in setup.applied
    assert "use_cache" not in apply_config(Setup(model=built, regions={}), defaults()).applied


@pytest.mark.parametrize(
    ("model", "knobs", "reason"),
    [
        pytest.param("bert", {"implicit_causal_mask": True}, "not all attention", id="encoder"),
        pytest.param("mistral", {"implicit_causal_mask": True}, "not all attention", id="window"),
        pytest.param("llama on a CPU", {"sdpa": "flex"}, "has no backward pass on a CPU", id="flex on a CPU"),
        pytest.param("gpt2", {"sdpa": "flex"}, r"drops attention weights \(0.1\)", id="flex with dropout"),
        pytest.param("llama", {"sdpa": "eager", "padding": "packed"}, "cannot be given", id="packed and eager"),
        pytest.param("llama", {"implicit_causal_mask": True, "padding": "packed"}, "needs the mask", id="packed"),
        pytest.param("llama", {"implicit_causal_mask": True, "sdpa": "eager"}, "needs the mask", id="eager"),
        pytest.param("bert", {"compiled_loss": True}, "has no loss function of its own", id="a loss of another kind"),
    ],
)
def test_attention_that_a_model_cannot_have_is_refused(model: str, knobs: dict[str, Any], reason: str) -> None:
    name, _, device = model.partition(" on a ")
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = AutoConfig.for_model(name, **(small if device else {}))
    auto = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    with torch.device(device.lower() or "meta"):
        built = auto.from_config(config)
    with pytest.raises(NotApplicable, match=reason):
        apply_config(Setup(model=built, regions={}), {**defaults(), **knobs})


def test_fp16_mixed_scales_its_gradients_and_refuses_a_step_that_would_not(llama: str) -> None:
    job = job_of(spec(llama, precision="fp16-mixed"))
    assert isinstance(job.train_step, AccumulatedStep)
    assert job.train_step.scaler is not None
    with pytest.raises(WorkloadError, match="fp16-mixed needs a gradient scaler"):
        job_of(script("own_step", precision="fp16-mixed"))
    assert not isinstance(job_of(script("own_step")).train_step, AccumulatedStep)


def test_a_sequence_beyond_learned_positions_is_refused_and_one_beyond_rotary_ones_is_not(
    llama: str, gpt2: str
) -> None:
    with pytest.raises(WorkloadError, match="sequence length 65 is above the model's 64 positions"):
        models.describe(spec(gpt2, sequence_length=65))
    models.describe(spec(gpt2, sequence_length=64))
    models.describe(spec(llama, sequence_length=65))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"model": "lama2-7b"}, 'found "lama2-7b"; did you mean llama2-7b', id="unknown"),
        pytest.param({"model": "tiny-llama", "weights": True}, "no weights of this model", id="nothing to load"),
        pytest.param({"model": "{folder}"}, "config.json", id="a directory without a model"),
        pytest.param({"model": "{bert}"}, "not a causal language model", id="an encoder"),
        pytest.param(
            {"model": "tiny-vit", "lengths": "uniform:4-8"}, "mean nothing to a classifier", id="images' lengths"
        ),
        pytest.param(
            {"model": "tiny-vit", "image_size": 30}, "no multiple of the model's 4 pixels", id="a part of a patch"
        ),
        pytest.param({"model": "gpt2", "image_size": 32}, "means nothing to a causal language", id="images for text"),
        pytest.param(
            {"model": "roberta-base", "sequence_length": 513}, "above the model's 512", id="positions after padding"
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "vit"}')
    model = fields["model"].format(folder=tmp_path, bert=tmp_path / "bert")
    with pytest.raises(WorkloadError, match=message) as caught:
        job_of(spec(**{**fields, "model": model}))
    assert "\n" not in caught.value.message


def test_remote_code_does_not_run_unless_it_is_trusted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "odd", "auto_map": {"AutoConfig": "code.OddConfig"}}')
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(WorkloadError, match="needs --trust-remote-code"):
        models.describe(spec(str(tmp_path)))
    assert not (tmp_path / "ran").exists()


def test_a_script_gets_what_it_is_told_and_may_import_its_neighbours() -> None:
    deep = job_of(script("build", "sibling_user.py", options={"depth": 5}), micro_batch=6)
    assert len(modules_of(Setup(model=deep.model, regions=deep.regions), "layer")) == 5
    assert next(deep.batches())[0].shape == (6, 16)
    shallow = job_of(script("build", precision="bf16"), depth=2)
    assert len(modules_of(Setup(model=shallow.model, regions=shallow.regions), "layer")) == 2
    assert {parameter.dtype for parameter in shallow.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("workload", "message", "where"),
    [
        pytest.param("{examples}/none.py:build", "there is no file .*none.py", None, id="no such file"),
        pytest.param("{examples}/blocks.py", "expected FILE.py:FUNCTION", None, id="no function named"),
        pytest.param("{examples}/blocks.py:biuld", "no function biuld; it has .*build", None, id="no such function"),
        pytest.param(
            "{examples}/missing_module.py:build",
            "importing it failed: ModuleNotFoundError: No module named 'a_module_that_nobody_has'",
            "missing_module.py:3",
            id="it does not import",
        ),
        pytest.param("{folder}/broken.py:build", "SyntaxError", "broken.py:2", id="it is no Python"),
        pytest.param("{examples}/blocks.py:raises", "ValueError: invalid literal", "blocks.py:77", id="it raises"),
        pytest.param("{examples}/blocks.py:leaves", "SystemExit: no data set here", "blocks.py:81", id="it exits"),
        pytest.param("{examples}/blocks.py:no_job", "an autocompile.Job, found Model", "blocks.py:72", id="no Job"),
        pytest.param("{examples}/blocks.py:no_batches", "ended before its first batch", None, id="no batches"),
        pytest.param(
            "{examples}/blocks.py:no_module", "model: expected a torch.nn.Module", PLACES["no_module"], id="no module"
        ),
        pytest.param(
            "{examples}/blocks.py:no_function",
            "batches: expected a function, found list",
            PLACES["no_function"],
            id="a list",
        ),
        pytest.param(
            "{examples}/blocks.py:frozen_model",
            "that need gradients, found none",
            PLACES["frozen_model"],
            id="nothing to train",
        ),
        pytest.param(
            "{examples}/blocks.py:compiled_model",
            "model: it is compiled already",
            PLACES["compiled_model"],
            id="compiled",
        ),
        pytest.param(
            "{examples}/blocks.py:compiled_part",
            "its part blocks.1 is compiled already",
            PLACES["compiled_part"],
            id="a part is",
        ),
    ],
)
def test_what_is_wrong_with_a_script(workload: str, message: str, where: str | None, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import torch\ndef build(ctx)\n    return ctx\n")
    with pytest.raises(WorkloadError, match=message) as caught:
        job_of(WorkloadSpec(script=workload.format(examples=EXAMPLES, folder=tmp_path), device="cpu"))
    assert caught.value.where == where
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("function", "message"),
    [
        pytest.param("vector_loss", r"found a tensor of shape \(2,\)", id="a vector"),
        pytest.param("number_loss", "found float", id="a number"),
        pytest.param("detached_loss", "found one that needs no gradient", id="detached"),
        pytest.param("broken_loss", "ValueError: too many values", id="it raises"),
    ],
)
def test_what_is_wrong_with_a_loss(function: str, message: str) -> None:
    workload = script(function)
    assert workload.script is not None
    with pytest.raises(WorkloadError, match=message):
        scripts.check_loss(job_of(workload), workload.script)
    scripts.check_loss(job_of(script("build")), workload.script)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        pytest.param("other_batches", "batch 0 differs when begun again with the same seed", id="other batches"),
        pytest.param("one_stream", "gave 0 batches when begun again", id="no new stream"),
    ],
)
def test_a_stream_that_cannot_be_begun_again_is_named(function: str, message: str) -> None:
    workload = script(function)
    assert workload.script is not None
    with pytest.raises(WorkloadError, match=message):
        scripts.check_batches(job_of(workload), workload.script)
    scripts.check_batches(job_of(script("build")), workload.script)


def test_cycles_of_a_stream_that_is_used_up_end_instead_of_turning_for_ever() -> None:
    with pytest.raises(WorkloadError, match="gave nothing when begun again"):
        list(itertools.islice(cycles(job_of(script("one_stream")), 1), 2))


def test_out_of_memory_in_a_script_is_not_called_its_fault(tmp_path: Path) -> None:
    (tmp_path / "big.py").write_text(
        "import torch\ndef build(ctx):\n    raise torch.OutOfMemoryError('CUDA out of memory')\n"
    )
    with pytest.raises(torch.OutOfMemoryError):
        job_of(WorkloadSpec(script=f"{tmp_path / 'big.py'}:build", device="cpu"))
