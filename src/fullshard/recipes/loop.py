"""One optimizer step, the evaluation, and the learning rate."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from fullshard.api.accelerator import Accelerator
from fullshard.api.optimizer import AcceleratedOptimizer
from fullshard.comm.stalls import STALLS
from fullshard.optim import EMA
from fullshard.recipes.arguments import TrainArguments
from fullshard.recipes.packing import IGNORED, GlobalOrder, PackedSequences, micro_batches

MicroBatch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One rank's result of a step, before the ranks have put their parts together.

    Attributes:
        loss_sum: this rank's loss, summed over target tokens, nats.
        grad_norm: global norm before clipping; None where the optimizer steps in backward.
        data_wait_seconds: time this rank waited for its batch.
    """

    loss_sum: float
    grad_norm: float | None
    data_wait_seconds: float


class Trainer:
    """Model, optimizer and data of one rank, and how a step uses them.

    Args:
        accelerator: has prepared the next two.
        model: sharded.
        optimizer: holds the sharded parameters.
        sequences: the data, all of it; this class reads the rank's part.
        checksum: of the data.
        arguments: of the run.

    Attributes:
        ema: the average of the weights, if it is wanted.
        skipped_batches: how many batches of the data have been passed over, because gradients were not finite.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        model: nn.Module,
        optimizer: AcceleratedOptimizer,
        sequences: PackedSequences,
        checksum: int,
        arguments: TrainArguments,
    ) -> None:
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.environment, self.device = accelerator.process.environment, accelerator.device
        self._sequences, self.checksum, self.arguments = sequences, checksum, arguments
        self.skipped_batches = 0
        self.ema = None if arguments.ema_decay is None else EMA(model, arguments.ema_decay)
        self._order = GlobalOrder(len(sequences), batch_size=arguments.batch_size, seed=arguments.seed)

    def step(self, step: int) -> StepResult:
        """Make optimizer step `step`, counted from 0. Collective."""
        arguments = self.arguments
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, arguments)
        begin = time.perf_counter()
        batch = self._read(self._sequences, self._order.indices(step + self.skipped_batches))
        waited = time.perf_counter() - begin
        # Gradients are averaged over the ranks; the mean wanted is over the tokens of all of them together.
        weight = self.environment.world_size / (arguments.batch_size * arguments.seq_len)
        loss_sum = 0.0
        for number, micro_batch in enumerate(batch, start=1):
            self.accelerator.sync_gradients = number == len(batch)
            loss = self._loss_sum(micro_batch)
            self.accelerator.backward(loss * weight)
            loss_sum += float(loss.detach())
        grad_norm = None
        if not arguments.step_in_backward:
            limit = arguments.max_grad_norm or math.inf
            grad_norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), limit))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None and not self.optimizer.step_was_skipped:
            self.ema.update()
        return StepResult(loss_sum, grad_norm, waited)

    def averaged(self) -> AbstractContextManager[None]:
        """Use the averages as the weights within the block, if there are any. Collective."""
        return nullcontext() if self.ema is None else self.ema.swapped()

    @torch.no_grad()
    def evaluate(self, sequences: PackedSequences, *, limit: int) -> float:
        """Return the mean loss over the first `limit` sequences at most, nats per token. Collective."""
        arguments = self.arguments
        indices = np.arange(min(limit, len(sequences)))
        self.model.eval()
        chunks = np.array_split(indices, math.ceil(len(indices) / arguments.batch_size))
        total = torch.zeros((), dtype=torch.float64)
        for chunk in chunks:
            for micro_batch in self._read(sequences, chunk):
                total += self._loss_sum(micro_batch).double().cpu()
        self.model.train()
        if dist.is_initialized():
            with STALLS.waiting_for_all("the loss of all ranks"):
                dist.all_reduce(total)
        return float(total) / (len(indices) * arguments.seq_len)

    def sum_over_ranks(self, result: StepResult, memory: int) -> tuple[float, float, tuple[int, ...]]:
        """Return loss sum, mean data wait in seconds and bytes per rank, over all ranks, by one small collective."""
        rank, size = self.environment.rank, self.environment.world_size
        values = torch.zeros(2 + size, dtype=torch.float64)
        values[0], values[1], values[2 + rank] = result.loss_sum, result.data_wait_seconds, memory
        if dist.is_initialized():
            with STALLS.waiting_for_all("the loss of all ranks"):
                dist.all_reduce(values)
        loss_sum, wait, *rest = values.tolist()
        return loss_sum, wait / size, tuple(map(int, rest))

    def _read(
        self, sequences: PackedSequences, indices: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> Sequence[MicroBatch]:
        """Return this rank's micro-batches of a batch."""
        return [
            (inputs.to(self.device), labels.to(self.device))
            for inputs, labels in micro_batches(
                sequences,
                indices,
                rank=self.environment.rank,
                world_size=self.environment.world_size,
                micro_batch_size=self.arguments.micro_batch_size,
            )
        ]

    def _loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the cross-entropy summed over the targets, nats, in fp32 whatever the model computes in."""
        inputs, labels = micro_batch
        if self.arguments.loss_chunk is not None:
            loss: torch.Tensor = self.model(
                input_ids=inputs, shift_labels=labels, num_items_in_batch=1, use_cache=False
            ).loss
            return loss
        logits = self.model(input_ids=inputs, use_cache=False).logits
        return functional.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )


def learning_rate(step: int, arguments: TrainArguments) -> float:
    """Return the rate of step `step`, counted from 0: linear warm-up, then half a cosine down to the lowest rate."""
    warmup = arguments.warmup
    if step < warmup:
        return arguments.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, arguments.steps - 1 - warmup)
    lowest = arguments.lr * arguments.min_lr_ratio
    return lowest + (arguments.lr - lowest) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
