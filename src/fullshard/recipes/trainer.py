"""One rank's part of a run: the model, the optimizer and the data, and how a step uses them."""

from __future__ import annotations

import math
import sys
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from accelerate.utils import AutocastKwargs, InitProcessGroupKwargs
from torch import nn
from torch.nn import functional

from fullshard.api import Accelerator, ProjectConfiguration
from fullshard.api.planning import plan_run
from fullshard.features import unsharded
from fullshard.features.chunked_loss.loss import use_chunked_loss
from fullshard.launch import read_rank_environment
from fullshard.observe import memory_nbytes
from fullshard.optim import EMA
from fullshard.plan.evaluate import Plan
from fullshard.recipes.arguments import TrainArguments
from fullshard.recipes.data import IGNORED, GlobalOrder, PackedSequences, TrainingData, micro_batches
from fullshard.recipes.model import build_model
from fullshard.recipes.optimizers import muon

_ADAM_BETAS = (0.9, 0.95)
MicroBatch = tuple[torch.Tensor, torch.Tensor]


class RunAccelerator(Accelerator):
    """The Accelerator of a run, which says what it has to say where the run says the rest."""

    _rolls_back = True
    _accumulates = False

    def __init__(self, arguments: TrainArguments) -> None:
        self._arguments = arguments
        timeout = None if arguments.timeout is None else timedelta(seconds=arguments.timeout)
        super().__init__(
            fsdp_plugin=arguments.run_config(),
            log_with=arguments.trackers or None,
            project_config=ProjectConfiguration(logging_dir=str(arguments.output_dir / "tensorboard")),
            # The loop takes its loss in float32, so the dtypes of the precision are enough.
            kwargs_handlers=[AutocastKwargs(enabled=False), InitProcessGroupKwargs(timeout=timeout)],
        )

    def _say(self, message: str) -> None:
        if self.is_main_process:
            sys.stdout.write(message + "\n")
            sys.stdout.flush()

    @property
    def _micro_batches_per_step(self) -> int:
        return int(job_values(self._arguments, read_rank_environment().world_size)["accumulation"])

    say = _say


class Trainer:
    """Model, optimizer and data of one rank, and how a step uses them.

    Args:
        arguments: of the run.
        accelerator: of the run.
        data: all of it; this class reads the rank's part.

    Attributes:
        ema: the average of the weights, if it is wanted.
        plan: of the run, if the planner knows enough.
        process_nbytes: what a process has on a CPU before there is a model; what is measured there is all of it.
        skipped_batches: how many batches of the data have been passed over, because gradients were not finite.
    """

    def __init__(self, arguments: TrainArguments, accelerator: RunAccelerator, data: TrainingData) -> None:
        self.arguments, self.accelerator, self._sequences = arguments, accelerator, data.train
        self.environment, self.device = accelerator.process.environment, accelerator.device
        self.checksum, self.skipped_batches = data.checksum, 0
        self._order = GlobalOrder(len(data.train), batch_size=arguments.batch_size, seed=arguments.seed)
        self.process_nbytes = memory_nbytes(self.device) if self.device.type == "cpu" else 0
        model, origin = build_model(
            arguments.model, tokenizer=data.tokenizer, seq_len=arguments.seq_len, seed=arguments.seed
        )
        model.train()
        accelerator.say(f"model: {type(model).__name__}, {origin}")
        job = job_values(arguments, self.environment.world_size) | {"optimizer": arguments.optimizer}
        config = arguments.run_config()
        self.plan: Plan | None = plan_run(model, config, self.environment, self.device, accelerator.say, **job)
        if arguments.loss_chunk is not None:
            use_chunked_loss(model, tokens=arguments.loss_chunk)
        self.model: nn.Module = accelerator.prepare(model)
        # From here on only dropout draws random numbers, and ranks must not draw the same ones.
        torch.manual_seed(arguments.seed + accelerator.process_index)
        self.optimizer: Any = accelerator.prepare(self._make_optimizer())
        self.ema = None if arguments.ema_decay is None else EMA(self.model, arguments.ema_decay)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer that decays matrices, not biases and norms; `ndim` is that of the whole parameter."""
        arguments = self.arguments
        lr, decay = learning_rate(0, arguments), arguments.weight_decay
        if arguments.optimizer == "muon":
            return muon(self.model, self.accelerator.say, lr=lr, weight_decay=decay, adamw_betas=_ADAM_BETAS)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=lr, betas=_ADAM_BETAS)

    def step(self, step: int) -> tuple[float, float | None, float]:
        """Make optimizer step `step`, counted from 0. Collective.

        Returns:
            This rank's loss, summed over target tokens, nats; the global norm of the gradient before clipping, None
            where the optimizer steps in backward; and the seconds that this rank waited for its batch.
        """
        arguments, begin = self.arguments, time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, arguments)
        batch = self._read(self._sequences, self._order.indices(step + self.skipped_batches))
        waited = time.perf_counter() - begin
        # Gradients are averaged over the ranks; the mean wanted is over the tokens of all of them together.
        weight = self.environment.world_size / (arguments.batch_size * arguments.seq_len)
        loss_sum, norm = 0.0, None
        for number, micro_batch in enumerate(batch, start=1):
            self.accelerator.sync_gradients = number == len(batch)
            loss = self._loss_sum(micro_batch)
            self.accelerator.backward(loss * weight)
            loss_sum += float(loss.detach())
        if not self.accelerator.steps_in_backward:
            limit = arguments.max_grad_norm or math.inf
            norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), limit))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None and not self.optimizer.step_was_skipped:
            self.ema.update()
        return loss_sum, norm, waited

    @torch.no_grad()
    def evaluate(self, sequences: PackedSequences, *, limit: int) -> float:
        """Return the mean loss over the first `limit` sequences at most, nats per token. Collective."""
        indices = np.arange(min(limit, len(sequences)))
        self.model.eval()
        total = torch.zeros(1, dtype=torch.float64)
        for chunk in np.array_split(indices, math.ceil(len(indices) / self.arguments.batch_size)):
            for micro_batch in self._read(sequences, chunk):
                total += self._loss_sum(micro_batch).double().cpu()
        self.model.train()
        return float(self.gather(total).sum()) / (len(indices) * self.arguments.seq_len)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks, on the CPU, one row per rank. Collective."""
        gathered: torch.Tensor = self.accelerator.gather(values[None].to(self.device))
        return gathered.cpu()

    @torch.no_grad()
    def sample(self, tokenizer: Any) -> str:
        """Return the prompt and the model's continuation, always the likeliest token. Collective."""
        ids = tokenizer(self.arguments.prompt or tokenizer.eos_token, return_tensors="pt", add_special_tokens=False)
        self.model.eval()
        with unsharded(self.model):
            generate: Any = self.model.generate
            options = {"max_new_tokens": self.arguments.sample_tokens, "pad_token_id": tokenizer.eos_token_id}
            output = generate(**ids.to(self.device), do_sample=False, **options)
        self.model.train()
        return str(tokenizer.decode(output[0], skip_special_tokens=True))

    def state(self) -> dict[str, Any]:
        """Return the objects that a checkpoint holds."""
        # A checkpoint has a scaler whatever the precision is, so that a run may go on in another one.
        scaler = self.accelerator.scaler or torch.amp.GradScaler(self.device.type, enabled=False)
        objects = [] if self.ema is None else [self.ema]
        return {"model": self.model, "optimizer": self.optimizer.optimizer, "scaler": scaler, "objects": objects}

    def state_after(self, step: int) -> dict[str, Any]:
        """Return everything that a checkpoint holds of a run that has made `step` steps."""
        extra = {"step": step, "skipped_batches": self.skipped_batches, "data_crc32c": self.checksum}
        return {**self.state(), "extra": extra | {"arguments": self.arguments.model_dump(mode="json")}}

    def _read(self, sequences: PackedSequences, indices: Any) -> list[MicroBatch]:
        """Return this rank's micro-batches of a batch."""
        place = {"rank": self.environment.rank, "world_size": self.environment.world_size}
        batch = micro_batches(sequences, indices, **place, micro_batch_size=self.arguments.micro_batch_size)
        return [(inputs.to(self.device), labels.to(self.device)) for inputs, labels in batch]

    def _loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the cross-entropy summed over the targets, nats, in fp32 whatever the model computes in."""
        inputs, labels = micro_batch
        if self.arguments.loss_chunk is not None:
            output = self.model(input_ids=inputs, shift_labels=labels, num_items_in_batch=1, use_cache=False)
            return output.loss  # type: ignore[no-any-return]
        logits = self.model(input_ids=inputs, use_cache=False).logits.float().flatten(0, 1)
        return functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def learning_rate(step: int, arguments: TrainArguments) -> float:
    """Return the rate of step `step`, counted from 0: linear warm-up, then half a cosine down to the lowest rate."""
    warmup = arguments.warmup
    if step < warmup:
        return arguments.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, arguments.steps - 1 - warmup)
    lowest = arguments.lr * arguments.min_lr_ratio
    return lowest + (arguments.lr - lowest) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def job_values(arguments: TrainArguments, world_size: int) -> dict[str, Any]:
    """Return the values that a plan needs and a run's configuration does not have."""
    rows = math.ceil(arguments.batch_size / world_size)
    micro_batch = min(arguments.micro_batch_size or rows, rows)
    return {
        "loss": "eager" if arguments.loss_chunk is None else "fused",
        "loss_chunk": arguments.loss_chunk,
        "accumulation": math.ceil(rows / micro_batch),
        "micro_batch": micro_batch,
        "seq_len": arguments.seq_len,
    }
