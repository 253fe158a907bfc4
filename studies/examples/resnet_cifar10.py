"""ResNet-18 on images of CIFAR-10's shape: as it should be, and with the mode mix-up that many scripts have.

    autocompile tune --workload studies/examples/resnet_cifar10.py:build --search-space vision --study resnet
    autocompile tune --workload studies/examples/resnet_cifar10.py:mixed_up --search-space vision --study mixed-up
    autocompile explain mixed-up

The second one looks at held-out images after every step, without torch.no_grad, and goes back to training mode after
every other step only: batch normalisation then trains on running statistics half of the time, and each mode is a graph
of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim import Optimizer

import autocompile

CLASSES = 10


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(images)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


class ResNet18(nn.Module):
    """He et al. 2015 with the stem that is usual for images of 32 by 32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.ModuleList(
            nn.Sequential(Block(inputs, outputs, 1 if index == 0 else 2), Block(outputs, outputs, 1))
            for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes))
        )
        self.head = nn.Linear(8 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images)
        for stage in self.stages:
            hidden = stage(hidden)
        return self.head(hidden.mean((2, 3)))


def build(ctx: autocompile.Context) -> autocompile.Job:
    """Option: ``width``, 64 as published."""
    torch.manual_seed(ctx.seed)
    model = ResNet18(int(ctx.options.get("width", 64))).to(ctx.device, ctx.dtype).train()
    return autocompile.Job(model=model, loss=_loss, batches=_images(ctx), regions={"layer": "stages.*"})


def mixed_up(ctx: autocompile.Context) -> autocompile.Job:
    job, held_out = build(ctx), next(_images(ctx)())

    def step(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], optimizer: Optimizer) -> Tensor:
        was_training = model.training
        optimizer.zero_grad()
        loss = torch.stack([_loss(model, batch) for batch in batches]).mean()
        loss.backward()
        optimizer.step()
        model.eval()
        _loss(model, held_out)
        model.train(not was_training)
        return loss.detach()

    return replace(job, train_step=step)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def _images(ctx: autocompile.Context) -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
    def stream() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(ctx.seed)
        while True:
            images = torch.randn(ctx.micro_batch, 3, 32, 32, generator=generator)
            labels = torch.randint(CLASSES, (ctx.micro_batch,), generator=generator)
            yield images.to(ctx.device, ctx.dtype), labels.to(ctx.device)

    return stream
