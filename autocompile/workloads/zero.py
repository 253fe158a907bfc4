"""DeepSpeed's ZeRO: its engine takes the step, reduces the gradients and shards what its stage says."""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from autocompile.deepspeed_settings import engine_config
from autocompile.knobs import Setup
from autocompile.knobs.scope import count_and_name
from autocompile.spec import Parallel
from autocompile.workloads.job import Job, MachineFault, WorkloadError, trainable
from autocompile.workloads.parallel import EngineStep, Wrapped
from autocompile.workloads.training import AccumulatedStep


def zero(job: Job, setup: Setup, *, n_micro_batches: int) -> Wrapped:
    """The engine takes the place of model and optimizer, which a step gets but does not use.

    Raises MachineFault without DeepSpeed, WorkloadError where the workload takes its steps itself.
    """
    parallel = Parallel(setup.parallel)
    require_deepspeed(parallel)
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    if next(job.model.parameters()).device.type == "cpu":
        _use_gloo_alone()
    if not isinstance(job.train_step, AccumulatedStep):
        raise WorkloadError("DeepSpeed takes the optimizer step itself; a workload's own train_step cannot be used")
    engine, made, *_ = deepspeed.initialize(
        model=job.model,
        optimizer=job.optimizer(trainable(job.model)),
        config=engine_config(
            setup.deepspeed_config,
            setup.wrapper,
            stage=int(setup.parallel[-1]),
            precision=str(job.precision),
            n_micro_batches=n_micro_batches,
        ),
        dist_init_required=False,
    )
    if setup.engine_compiles:
        count_and_name(job.model, functools.partial(_compile, engine, setup), setup)
    job = replace(job, model=engine, train_step=EngineStep(job.loss))
    return Wrapped(job=job, optimizer=made, gradient=safe_get_full_grad)


def require_deepspeed(parallel: Parallel) -> None:
    """MachineFault where this way to train is DeepSpeed's and that is not installed."""
    wanted = parallel is Parallel.AUTO or parallel.zero_stage is not None
    if wanted and find_spec("deepspeed") is None:
        raise MachineFault(f"parallel {parallel} needs DeepSpeed: pip install 'torch-autocompile[deepspeed]'")


def _use_gloo_alone() -> None:
    """DeepSpeed would build kernels for ranks that share memory: 20 s, and one that was killed locks out the next."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__[get_accelerator().create_op_builder("ShareMemCommBuilder").NAME] = False


def _compile(engine: Any, setup: Setup) -> None:
    options = dict(setup.options)
    engine.compile(backend=options.pop("backend", "inductor"), compile_kwargs=options)
