"""Implement `fullshard train`: data, model, sharding, training steps and output files.

Start reading at `train`. This script uses only `fullshard.api` and `fullshard.checkpoint`, so that you can copy from
it. Each process of a launched run executes `python -m fullshard.recipes.train SETTINGS`, where SETTINGS is JSON.
"""

import contextlib
import math
import os
import re
import socket
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import AutocastKwargs, InitProcessGroupKwargs, ProfileKwargs
from torch.nn import functional

from fullshard import checkpoint
from fullshard.api import Accelerator, ProjectConfiguration
from fullshard.api.collectives import all_gather_object
from fullshard.api.planning import plan_run
from fullshard.api.room import check_room, checkpoint_nbytes
from fullshard.checkpoint.format import read_manifest
from fullshard.checkpoint.lease import lease
from fullshard.checkpoint.objects import Location
from fullshard.checkpoint.values import decode_value
from fullshard.config.switches import elastic_ranks
from fullshard.config.trackers import require_trackers
from fullshard.core.errors import ConfigError, DamagedError, NonFiniteError, plural, tell
from fullshard.core.files import write_text
from fullshard.core.imports import require_hub
from fullshard.core.journal import JOURNAL, Happening
from fullshard.core.sizes import format_nbytes
from fullshard.features.chunked_loss import use_chunked_loss
from fullshard.features.whole_parameters import unsharded
from fullshard.launch import read_rank_environment, run_on_main
from fullshard.launch.journal import record_events
from fullshard.launch.preemption import listening, should_stop
from fullshard.launch.worker import run_worker
from fullshard.observe import JsonlSink, StepMetrics, memory_nbytes, require_plots, reset_memory_peak
from fullshard.observe.metrics import describe_run, run_facts
from fullshard.observe.report import write_report
from fullshard.optim import EMA
from fullshard.recipes.arguments import TrainArguments
from fullshard.recipes.data import IGNORED, PackedSequences, TrainingData, batch_of, micro_batches, prepare_data
from fullshard.recipes.model import build_model, muon, read_config

_ADAM_BETAS = (0.9, 0.95)
_STREAM = ("batch_size", "seq_len", "seed", "held_out")
"""Settings that fix which sequences each step sees; a resumed run must keep them."""
_DATA = ("data", "text_field", "max_data_mb", "model", "vocab_size")
"""Settings that the tokens of the data may depend on: it may have moved, and still be the same."""
_NAME = re.compile(r"step-(\d+)")

Values = tuple[float, float | None, float, float]
"""The figures of a step: this rank's loss in nats, summed over target tokens; the global gradient norm before clipping
(None where the optimizer steps in backward); the seconds of the step; those that this rank waited for its batch."""


def train(arguments: TrainArguments) -> None:
    """Run the whole job on this rank. All ranks must call this with the same arguments."""
    joined_before, arguments = dist.is_initialized(), for_any_size(arguments)
    with contextlib.ExitStack() as held:
        accelerator = RunAccelerator(arguments)
        environment, say = accelerator.process.environment, accelerator.say
        if arguments.model is not None:
            require_hub(say, arguments.model)
        # Nothing is read, written or removed before this job has exclusive use of the directories.
        run_on_main(environment, lambda: held.enter_context(lease(arguments.output_dir)))
        if arguments.checkpoint_dir is not None:
            run_on_main(environment, lambda: held.enter_context(lease(arguments.checkpoints)))
        checkpoints = run_on_main(environment, lambda: look_ahead(arguments))
        record_events(arguments.output_dir)
        held.callback(JOURNAL.close)
        data = prepare_data(arguments, accelerator, lambda checksum: require_same_run(checkpoints, arguments, checksum))
        run = Run(arguments, accelerator, data)
        if arguments.max_lost_steps is not None:
            run.copies = held.enter_context(checkpoint.MemoryCopies(arguments.max_lost_steps, say=say))
        first_step = run.resume(checkpoints)
        run_on_main(environment, lambda: run.write_down(len(checkpoints), first_step))
        held.callback(lambda: [tracker.finish() for tracker in accelerator.trackers])
        with listening():
            last_step = run.loop(first_step)
            if last_step == arguments.steps:
                with nullcontext() if run.ema is None else run.ema.swapped():
                    run.finish()
                run_on_main(environment, lambda: JOURNAL.note(Happening.END))
            else:
                why = "saved and stopped because of a signal"
                run_on_main(environment, lambda: JOURNAL.note(Happening.PREEMPTION, why))
                say(f"stopped by a signal after step {last_step}; the same command continues from there")
            if arguments.plot:
                path = arguments.output_dir / "report.html"
                run_on_main(environment, lambda: write_report([arguments.output_dir], path))
                say(f"report: {path}")
            if last_step == arguments.steps and arguments.export:
                say(f"next: `fullshard chat {arguments.output_dir}` talks to the model; --data trains on other texts")
    if dist.is_initialized() and not joined_before:
        dist.destroy_process_group()


class RunAccelerator(Accelerator):
    """The Accelerator of a run. It prints messages in the same way as the rest of the run."""

    _accumulates = False
    _micro_batches_per_step = 1

    def __init__(self, arguments: TrainArguments) -> None:
        require_trackers(arguments.trackers, "--log-with")
        rows = math.ceil(arguments.batch_size / read_rank_environment().world_size)
        self.micro_batch = min(arguments.micro_batch_size or rows, rows)
        self._micro_batches_per_step = math.ceil(rows / self.micro_batch)
        timeout = None if arguments.timeout is None else timedelta(seconds=arguments.timeout)
        super().__init__(
            fsdp_plugin=arguments.run_config(),
            log_with=arguments.trackers or None,
            project_config=ProjectConfiguration(logging_dir=str(arguments.output_dir / "tensorboard")),
            # The loop computes its loss in float32, so the dtypes in the precision settings suffice.
            kwargs_handlers=[AutocastKwargs(enabled=False), InitProcessGroupKwargs(timeout=timeout)],
        )

    def say(self, message: str) -> None:
        """Print a line on the main rank."""
        if self.is_main_process:
            tell(message, sys.stdout)

    _say = say


class Run:
    """Holds the model, optimizer and data of one rank, and runs the training loop."""

    def __init__(self, arguments: TrainArguments, accelerator: RunAccelerator, data: TrainingData) -> None:
        self.arguments, self.accelerator, self.data, self.say = arguments, accelerator, data, accelerator.say
        self.environment, self.device = accelerator.process.environment, accelerator.device
        self.copies: checkpoint.MemoryCopies | None = None
        options = {"tokenizer": data.tokenizer, "seq_len": arguments.seq_len, "seed": arguments.seed}
        reset_memory_peak(self.device)
        before, said = memory_nbytes(self.device), list[str]()
        model, origin = build_model(arguments.model, **options)
        model.train()
        job = {
            "loss": "eager" if arguments.loss_chunk is None else "fused",
            "loss_chunk": arguments.loss_chunk,
            "accumulation": accelerator._micro_batches_per_step,
            "micro_batch": accelerator.micro_batch,
            "seq_len": arguments.seq_len,
            "optimizer": arguments.optimizer,
        }
        plan = plan_run(model, arguments.run_config(), self.environment, self.device, said.append, **job)
        self.facts = run_facts(model, plan, "".join(said), self.environment, self.device, before)
        self.say(f"model: {self.facts['model']}, {origin}")
        if plan is None:
            self.say("".join(said))
        else:
            speed = "" if plan.cluster.device.is_cpu else f", MFU {plan.time.mfu:.1%}"  # the peak of a CPU is unknown
            self.say(f"plan: the run needs {format_nbytes(plan.memory.needed)} per rank{speed}")
        if arguments.loss_chunk is not None:
            use_chunked_loss(model, tokens=arguments.loss_chunk)
        self.model = accelerator.prepare(model)
        # From here on only dropout uses random numbers, and they must differ between ranks.
        torch.manual_seed(arguments.seed + accelerator.process_index)
        self.optimizer: Any = accelerator.prepare(self._make_optimizer())
        self.ema = None if arguments.ema_decay is None else EMA(self.model, arguments.ema_decay)
        self.hosts = ", ".join(sorted(set(all_gather_object(socket.gethostname()))))

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """Create the optimizer, with weight decay only for matrices. `ndim` is taken from the unsharded parameter."""
        lr, decay = self.arguments.lr, self.arguments.weight_decay
        if self.arguments.optimizer == "muon":
            return muon(self.model, self.say, lr=lr, weight_decay=decay, adamw_betas=_ADAM_BETAS)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        matrices = {"params": [p for p in trained if p.ndim >= 2], "weight_decay": decay}
        vectors = {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}
        return torch.optim.AdamW([matrices, vectors], lr=lr, betas=_ADAM_BETAS)

    def loop(self, step: int) -> int:
        """Run the steps after `step`, unless a signal ends the loop, and return the number of the last step."""
        arguments, skipped, stood_still, stops = self.arguments, 0, 0.0, False
        window, tokens = time.perf_counter(), 0  # for the tokens per second
        first, last = step + 3, step + 5  # the profiled steps: the first two are slow
        profile = ProfileKwargs(output_trace_dir=str(arguments.output_dir / "profile"))
        reset_memory_peak(self.device)
        metrics = arguments.output_dir / "metrics.jsonl"
        sink = JsonlSink(metrics, last_step=step) if self.environment.is_main else None
        with contextlib.ExitStack() as profiled:
            while step < arguments.steps and not stops:
                step += 1
                JOURNAL.tell(step)
                if arguments.profile and step == first:
                    profiled.enter_context(self.accelerator.profile(profile))
                try:
                    values = self.step(step)
                except NonFiniteError as error:
                    error.add_note(f"fullshard: this was step {step} of the run")
                    raise
                if arguments.profile and step == last:
                    profiled.close()
                    self.say(f"profile: {arguments.output_dir / 'profile'}, for Perfetto")
                if step == first - 1:  # the first step is slow
                    left = timedelta(seconds=round((arguments.steps - step) * values[2]))
                    self.say(f"about {left} to go (h:mm:ss), without saves and evaluations")
                skipped += self.optimizer.step_was_skipped
                tokens += arguments.batch_size * arguments.seq_len
                speed = tokens / max(time.perf_counter() - window, 1e-9)
                counted = {"tokens_per_second": speed, "skipped_steps": skipped, "checkpoint_seconds": stood_still}
                due = bool(arguments.save_every) and step % arguments.save_every == 0
                held_out = self.evaluate() if due or step == arguments.steps else None
                self._report(step, sink, values, held_out_loss=held_out, **counted)
                stops, stood_still = should_stop() and step < arguments.steps, 0.0
                if due or stops or step == arguments.steps:
                    stood_still = self._save(step)
                if due or step % arguments.log_every == 0:  # a rate covers the steps of its line, without saving
                    window, tokens = time.perf_counter(), 0
                if self.copies is not None and step < arguments.steps and not stops:
                    self.copies.after_step(step, **self._state_after(step))
        if arguments.profile and step < last:
            self.say(f"profile: fewer than three steps, because the run ended after step {step}")
        return step

    def step(self, step: int) -> Values:
        """Run optimizer step number `step`. All ranks must call this."""
        arguments, begin = self.arguments, time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, arguments)
        sequences, order = self.data.train, {"batch_size": arguments.batch_size, "seed": arguments.seed}
        batch = self._read(sequences, batch_of(step - 1, len(sequences), **order))
        waited = time.perf_counter() - begin
        # Gradients are averaged over ranks, but the loss must be the mean over the tokens of all ranks.
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
        return loss_sum, norm, time.perf_counter() - begin, waited

    def _read(self, sequences: PackedSequences, indices: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return this rank's micro-batches of a batch."""
        place = {"rank": self.environment.rank, "world_size": self.environment.world_size}
        batch = micro_batches(sequences, indices, **place, micro_batch_size=self.arguments.micro_batch_size)
        return [(inputs.to(self.device), labels.to(self.device)) for inputs, labels in batch]

    def _loss_sum(self, micro_batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the cross-entropy in nats, summed over the targets, in fp32 regardless of the compute dtype."""
        inputs, labels = micro_batch
        if self.arguments.loss_chunk is not None:
            output = self.model(input_ids=inputs, shift_labels=labels, num_items_in_batch=1, use_cache=False)
            return output.loss  # type: ignore[no-any-return]
        logits = self.model(input_ids=inputs, use_cache=False).logits.float().flatten(0, 1)
        return functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")

    def _gather(self, *values: float) -> torch.Tensor:
        """Gather some values from all ranks, and return them with one row per rank. All ranks must call this."""
        own = torch.tensor([values], dtype=torch.float64, device=self.device)
        return self.accelerator.gather(own).cpu()  # type: ignore[no-any-return]

    def _report(self, step: int, sink: JsonlSink | None, values: Values, **counted: Any) -> None:
        """Write the metrics of a step, combined over all ranks, to file and trackers. All ranks must call this."""
        # If a value is not finite, raise an error, so that the run stops before such a value reaches a checkpoint.
        arguments, (loss_sum, norm, seconds, waited) = self.arguments, values
        rows = self._gather(loss_sum, waited, memory_nbytes(self.device))
        tokens = arguments.batch_size * arguments.seq_len
        metrics = StepMetrics(
            step=step,
            loss=float(rows[:, 0].sum()) / tokens,
            learning_rate=learning_rate(step, arguments),
            grad_norm=norm,
            step_seconds=seconds,
            data_wait_seconds=float(rows[:, 1].mean()),
            memory_nbytes=tuple(map(int, rows[:, 2].tolist())),
            **counted,
        )
        if sink is not None:
            sink.write(metrics)
            self.accelerator.log(metrics.scalars(), step)
        if step % arguments.log_every == 0 or step == arguments.steps:
            self.say(metrics.line(arguments.steps))
        if metrics.held_out_loss is not None:
            self.say(f"held-out loss: {metrics.held_out_loss:.4f} nats/token")
        # In fp16 the scaler skips steps whose gradients overflow.
        total = metrics.loss + (norm or 0.0 if arguments.precision != "fp16" else 0.0)
        if not (self.optimizer.step_was_skipped or math.isfinite(total)):
            raise NonFiniteError(
                f"step {step} has loss {metrics.loss} and gradient norm {norm}, so the run was stopped; its last "
                "checkpoint is from an earlier step",
                hint="lower --lr, or compute in bf16 or fp32",
            )

    def _state(self) -> dict[str, Any]:
        """Return the objects of a checkpoint, always with a gradient scaler, so that the precision may change."""
        scaler = self.accelerator.scaler or torch.amp.GradScaler(self.device.type, enabled=False)
        objects = [] if self.ema is None else [self.ema]
        return {"model": self.model, "optimizer": self.optimizer.optimizer, "scaler": scaler, "objects": objects}

    def _state_after(self, step: int) -> dict[str, Any]:
        settings = self.arguments.model_dump(mode="json")
        return self._state() | {"extra": {"step": step, "data_crc32c": self.data.checksum, "arguments": settings}}

    def _save(self, step: int) -> float:
        """Save a checkpoint after step `step`, and return the blocked time in seconds. All ranks must call this."""
        begin, path = time.perf_counter(), self.arguments.checkpoints / f"step-{step:06d}"
        # An existing one must be incomplete or damaged: the run would have resumed from a complete one.
        state = self._state_after(step) | {"total_limit": self.arguments.keep_checkpoints, "overwrite": True}
        checkpoint.save_checkpoint(path, **state)
        self.say(f"checkpoint: {path}")
        return time.perf_counter() - begin

    def resume(self, paths: Sequence[Location]) -> int:
        """Load the newest copy in host memory or complete checkpoint of `paths`, and return its step, on all ranks."""
        if self.copies is not None:
            newest = run_on_main(self.environment, lambda: read_manifest(paths[0]).saved_at if paths else 0.0)
            if (extra := self.copies.load(newer_than=newest, **self._state())) is not None:
                self.say(f"resume: from copies in host memory, after step {extra['step']}")
                return int(extra["step"])
        decays = [group["weight_decay"] for group in self.optimizer.param_groups]  # of this run: they may have changed
        for path in paths:
            try:
                extra = checkpoint.load_checkpoint(path, **self._state())
            except DamagedError as error:
                if path is paths[-1]:
                    raise
                self.say(f"resume: {path} is skipped because it is damaged: {error}")
                continue
            for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
                group["weight_decay"] = decay
            self.say(f"resume: from {path}, after step {extra['step']}")
            return int(extra["step"])
        self.say(f"resume: no complete checkpoint in {self.arguments.checkpoints}, starting at step 1")
        return 0

    def write_down(self, held: int, resumed_after: int) -> None:
        """Write the settings and the environment of the run to files, and start its trackers. Rank 0 calls this.

        This happens after the state was loaded, when it is certain that the run continues. `held` is the number of
        checkpoints that already exist, and `resumed_after` the step after which the run resumed, or 0.
        """
        arguments, accelerator = self.arguments, self.accelerator
        count = arguments.keep_checkpoints + 1 - min(held, arguments.keep_checkpoints)
        check_room(arguments.checkpoints, checkpoint_nbytes(self.model, self.optimizer), count, self.say)
        values, defaults = arguments.model_dump(mode="json"), type(arguments)().model_dump(mode="json")
        settings = {arguments.spelled(name): (value, defaults[name]) for name, value in values.items()}
        facts = self.facts | {"hosts": self.hosts, "resumed_after": resumed_after, "total_steps": arguments.steps}
        facts["steps_per_pass"] = len(self.data.train) / arguments.batch_size
        describe_run(arguments.output_dir, settings, facts)
        accelerator.init_trackers(arguments.output_dir.name, values, {"wandb": {"dir": str(arguments.output_dir)}})

    def finish(self) -> None:
        """Export the model, write a sample, and print the names of the files. All ranks must call this."""
        output = self.arguments.output_dir
        if self.arguments.export:
            checkpoint.export_hf(output / "export", model=self.model, tokenizer=self.data.tokenizer, overwrite=True)
            self.say(f"export: {output / 'export'}")
        if self.arguments.sample_tokens:
            text, path = self.sample(), output / "sample.txt"
            run_on_main(self.environment, lambda: write_text(path, text + "\n"))
            self.say(f"sample: {path}\n{textwrap.indent(text, '    ')}")
        self.say(f"metrics: {output / 'metrics.jsonl'}")

    @torch.no_grad()
    def sample(self) -> str:
        """Generate text that continues the first tokens of the held-out data, or of other data, on all ranks."""
        seq_len, tokenizer = self.arguments.seq_len, self.data.tokenizer
        prompt = (self.data.held_out or self.data.train).read([0])[0][:, : min(16, seq_len // 2)].to(self.device)
        most = min(self.arguments.sample_tokens, seq_len - prompt.shape[1])
        torch.manual_seed(self.arguments.seed)
        options: dict[str, Any] = {"max_new_tokens": most, "do_sample": True, "temperature": 0.7, "top_p": 0.9}
        options |= {"no_repeat_ngram_size": 8}
        options |= {"attention_mask": torch.ones_like(prompt), "pad_token_id": tokenizer.eos_token_id}
        self.model.eval()
        with unsharded(self.model):
            written = self.model.generate(prompt, **options)
        self.model.train()
        return str(tokenizer.decode(written[0], skip_special_tokens=True))

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Return the mean held-out loss, of averaged weights if they are kept, or None. All ranks must call this."""
        if not len(sequences := self.data.held_out):
            return None
        indices, total = np.arange(min(self.arguments.eval_sequences, len(sequences))), 0.0
        self.model.eval()
        with nullcontext() if self.ema is None else self.ema.swapped():
            for chunk in np.array_split(indices, math.ceil(len(indices) / self.arguments.batch_size)):
                total += sum(float(self._loss_sum(micro_batch)) for micro_batch in self._read(sequences, chunk))
        self.model.train()
        return float(self._gather(total).sum()) / (len(indices) * self.arguments.seq_len)


def learning_rate(step: int, arguments: TrainArguments) -> float:
    """Return the learning rate of step `step`, counted from 1: a linear warm-up, and then a half cosine down."""
    warmup = arguments.warmup
    if step <= warmup:
        return arguments.lr * step / warmup
    done = (step - 1 - warmup) / max(1, arguments.steps - 1 - warmup)
    lowest = arguments.lr * arguments.min_lr_ratio
    return lowest + (arguments.lr - lowest) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def for_any_size(arguments: TrainArguments) -> TrainArguments:
    """Limit the micro-batch size, so that it is the same for every possible number of ranks of an elastic job."""
    ranks = elastic_ranks()
    if ranks is None:
        return arguments
    if arguments.batch_size < ranks[1]:
        raise ConfigError(
            f"--batch-size {arguments.batch_size} is too small for up to {plural(ranks[1], 'rank')}: some would have "
            "no sequences",
            hint=f"use a batch size of at least {ranks[1]}, or fewer hosts",
        )
    most = math.ceil(arguments.batch_size / ranks[1])
    return arguments.model_copy(update={"micro_batch_size": min(arguments.micro_batch_size or most, most)})


def look_ahead(arguments: TrainArguments) -> list[Location]:
    """Return the checkpoints to resume from, newest first. Raise early what would fail only at the end of the run."""
    if arguments.plot:
        require_plots()
    if arguments.model is not None:
        read_config(arguments.model)
    if not os.access(arguments.output_dir, os.W_OK):
        raise ConfigError(f"cannot write to {arguments.output_dir}", hint="use another --output-dir")
    # The name, not the time, determines the newest.
    found = checkpoint.whole_checkpoints(arguments.checkpoints)
    steps = {path: int(match[1]) for path in found if (match := _NAME.fullmatch(path.name))}
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def require_same_run(paths: Sequence[Location], arguments: TrainArguments, checksum: int) -> None:
    """Raise an error if the first checkpoint in `paths` has other data or settings. Rank 0 calls it before writing."""
    if not paths:
        return
    path, extra = paths[0], read_manifest(paths[0]).states.get("extra")
    if not isinstance(extra, dict) or not extra.keys() >= {"step", "data_crc32c", "arguments"}:
        raise ConfigError(f"{path} is not a checkpoint of `fullshard train`", hint="use another --output-dir")
    step, crc32c, saved = (decode_value(extra[name], {}) for name in ("step", "data_crc32c", "arguments"))
    now = arguments.model_dump(mode="json")
    names = [name for name in (_STREAM if crc32c == checksum else _STREAM + _DATA) if saved.get(name) != now[name]]
    found = [f"{arguments.spelled(name)} was {saved.get(name)} and is {now[name]}" for name in names]
    if saved.get("ema_decay") is not None and arguments.ema_decay is None:  # loading ignores unrequested state
        found.append(f"--ema-decay was {saved['ema_decay']} and is not set now")
    if found or crc32c != checksum:
        what = "; ".join(found) or "the data or the tokenizer has changed since"
        hint = "use the same data and settings, use another --output-dir, or remove the checkpoints to start over"
        raise ConfigError(f"{path} belongs to another run: {what}", hint=hint)
    if step > arguments.steps:
        raise ConfigError(f"the checkpoint {path} is of step {step}, but --steps is {arguments.steps}")


def run(arguments: TrainArguments) -> None:
    """Run the job in this process. If it fails and was started by a launcher, report the failure to the launcher."""
    run_worker(lambda: train(arguments))


if __name__ == "__main__":
    run(TrainArguments.model_validate_json(sys.argv[1]))
