"""`fullshard train` from beginning to end: data, model, sharding, steps, and what the run leaves behind.

    python -m fullshard.recipes.train ARGUMENTS.json

is what each process of a launched run executes; the file is written by the launcher.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fullshard.api.room import check_room, checkpoint_nbytes
from fullshard.checkpoint import AsyncSaver, MemoryCopies, export_hf, save_checkpoint
from fullshard.checkpoint.lease import lease
from fullshard.checkpoint.objects import Location
from fullshard.config.switches import elastic_ranks
from fullshard.config.trackers import require_trackers
from fullshard.core.errors import ConfigError, NonFiniteError
from fullshard.core.files import write_text
from fullshard.core.journal import JOURNAL, Happening
from fullshard.core.version import __version__
from fullshard.launch import RankEnvironment, run_on_main
from fullshard.launch.device import name_of
from fullshard.launch.journal import record_events
from fullshard.launch.preemption import listening, should_stop
from fullshard.launch.worker import run_worker
from fullshard.observe import (
    JsonlSink,
    StepMetrics,
    memory_nbytes,
    plot_losses,
    read_metrics,
    require_plots,
    reset_memory_peak,
)
from fullshard.observe.report import write_report
from fullshard.plan.report import as_dict
from fullshard.recipes.arguments import TrainArguments
from fullshard.recipes.data import TrainingData, prepare_data
from fullshard.recipes.model import read_config
from fullshard.recipes.profiling import Recorder
from fullshard.recipes.resume import find_checkpoints, go_on, load_newest, require_same_run, whole_in
from fullshard.recipes.trainer import RunAccelerator, Trainer, learning_rate


def for_any_size(arguments: TrainArguments) -> TrainArguments:
    """Return arguments for a varying number of hosts: more micro-batches, as large on few ranks as on many.

    Raises:
        ConfigError: the batch cannot be shared by some number of ranks that there may be.
    """
    ranks = elastic_ranks()
    if ranks is None:
        return arguments
    if arguments.batch_size < ranks[1]:
        raise ConfigError(
            f"--batch-size {arguments.batch_size} on up to {ranks[1]} ranks: some would have nothing to do",
            hint=f"use {ranks[1]} or more, or fewer hosts",
        )
    most = math.ceil(arguments.batch_size / ranks[1])
    return arguments.model_copy(update={"micro_batch_size": min(arguments.micro_batch_size or most, most)})


def train(arguments: TrainArguments) -> None:
    """Run the whole job on this rank. Every rank of the job calls it with the same arguments.

    Raises:
        FullshardError: a fault of the settings, the data, a checkpoint or the run.
    """
    joined_before = dist.is_initialized()
    with contextlib.ExitStack() as held:
        accelerator = RunAccelerator(arguments)
        environment, say = accelerator.process.environment, accelerator.say
        # Ranks per shard group are told here, and not taken from the host.
        sharding = arguments.run_config().sharding
        sharding.resolved_strategy().mesh_shape(environment.world_size, sharding.shard_size)
        # Nothing is looked at, written or removed before the directories are this job's alone.
        run_on_main(environment, lambda: held.enter_context(lease(arguments.output_dir)))
        if arguments.checkpoint_dir is not None:
            run_on_main(environment, lambda: held.enter_context(lease(arguments.checkpoints)))
        arguments = for_any_size(arguments)
        checkpoints = run_on_main(environment, lambda: _look_ahead(arguments))
        record_events(arguments.output_dir)
        held.callback(JOURNAL.close)
        data = prepare_data(
            arguments, environment, lambda checksum: require_same_run(checkpoints, arguments, checksum=checksum)
        )
        say(f"data: {data.description}")
        copies = None
        if (most := arguments.max_lost_steps) is not None:
            copies = held.enter_context(MemoryCopies(most, say=say))
        trainer = Trainer(arguments, accelerator, data)
        first_step = go_on(checkpoints, copies, trainer, say)
        count = arguments.keep_checkpoints + 1 - min(len(checkpoints), arguments.keep_checkpoints)
        nbytes = checkpoint_nbytes(trainer.model, trainer.optimizer)
        run_on_main(environment, lambda: check_room(arguments.checkpoints, nbytes, count, say))
        run_on_main(environment, lambda: _write_down(trainer))
        held.callback(lambda: [tracker.finish() for tracker in accelerator.trackers])
        with listening():
            stopped_at = Loop(trainer, copies).run(first_step)
            if stopped_at is None:
                with contextlib.nullcontext() if trainer.ema is None else trainer.ema.swapped():
                    _finish(trainer, data)
                note(environment, Happening.END)
            else:
                note(environment, Happening.PREEMPTION, "saved and stopped because of a signal")
                say(f"stopped by a signal after step {stopped_at}; the same command goes on from there")
            if arguments.plot:
                path = arguments.output_dir / "report.html"
                run_on_main(environment, lambda: write_report([arguments.output_dir], path))
                say(f"report: {path}")
    if dist.is_initialized() and not joined_before:
        dist.destroy_process_group()


class Loop:
    """The steps of a run, each reported, with a checkpoint wherever one is due."""

    def __init__(self, trainer: Trainer, copies: MemoryCopies | None) -> None:
        self._trainer, self._copies, self._saver = trainer, copies, AsyncSaver()
        self._arguments, self._say = trainer.arguments, trainer.accelerator.say
        self._metrics: JsonlSink | None = None
        self._window, self._tokens = time.perf_counter(), 0  # over which tokens per second are counted
        self._skipped, self._stood_still = 0, 0.0
        reset_memory_peak(trainer.device)

    def run(self, first_step: int) -> int | None:
        """Run steps `first_step` + 1 to the last.

        Returns:
            The step after which a signal has stopped them, with a checkpoint; None if none has.

        Raises:
            FullshardError: the loss or the gradient is not finite.
        """
        trainer, arguments = self._trainer, self._arguments
        steps = arguments.profile_steps if arguments.profile else None
        recorder = Recorder(trainer.accelerator, arguments.output_dir, self._say, steps=steps)
        self._open_metrics(first_step)
        with self._saver, contextlib.closing(self):
            if arguments.async_save:
                self._saver.reserve([(trainer.model, trainer.optimizer.optimizer)])
            step, rollbacks, stops = first_step, 0, False
            while step < arguments.steps and not stops:
                step += 1
                JOURNAL.tell(step)
                self._tell_saved(self._saver.check())
                recorder.begin_step()
                try:
                    metrics = self._step(step)
                except NonFiniteError as error:
                    rollbacks += 1
                    error.add_note(f"fullshard: this was step {step} of the run")
                    if arguments.nonfinite_gradients != "rollback" or rollbacks > arguments.nonfinite_limit:
                        raise
                    step = self._roll_back(error, step)
                    continue
                recorder.end_step()
                self._report(metrics)
                due = bool(arguments.save_every) and step % arguments.save_every == 0
                stops = should_stop() and step < arguments.steps
                self._stood_still = 0.0
                if due or stops or step == arguments.steps:
                    self._save(step)
                    rollbacks = 0
                if due or step % arguments.log_every == 0:  # a line's rate is of its own steps, without saving
                    self._window, self._tokens = time.perf_counter(), 0
                if self._copies is not None and step < arguments.steps and not stops:
                    self._copies.after_step(step, **trainer.state_after(step))
            self._tell_saved(self._saver.wait())
        recorder.close()
        return step if step < arguments.steps else None

    def close(self) -> None:
        """Close the metrics file."""
        if self._metrics is not None:
            self._metrics.close()

    def _open_metrics(self, last_step: int) -> None:
        if self._trainer.environment.is_main:
            self.close()
            self._metrics = JsonlSink(self._arguments.output_dir / "metrics.jsonl", last_step=last_step)

    def _step(self, step: int) -> StepMetrics:
        """Make a step; return its metrics over all ranks. Collective."""
        trainer, arguments, begin = self._trainer, self._arguments, time.perf_counter()
        loss_sum, norm, waited = trainer.step(step - 1)
        rows = trainer.gather(torch.tensor([loss_sum, waited, memory_nbytes(trainer.device)], dtype=torch.float64))
        tokens = arguments.batch_size * arguments.seq_len
        self._tokens += tokens
        self._skipped += trainer.optimizer.step_was_skipped
        speed, plan = self._tokens / max(time.perf_counter() - self._window, 1e-9), trainer.plan
        time_of = None if plan is None or plan.cluster.device.is_cpu else plan.time  # a CPU's peak is unmeasured
        return StepMetrics(
            step=step,
            loss=float(rows[:, 0].sum()) / tokens,
            learning_rate=learning_rate(step - 1, arguments),
            grad_norm=norm,
            tokens=tokens,
            tokens_seen=step * tokens,
            step_seconds=time.perf_counter() - begin,
            tokens_per_second=speed,
            data_wait_seconds=float(rows[:, 1].mean()),
            memory_nbytes=tuple(map(int, rows[:, 2].tolist())),
            planned_nbytes=None if plan is None else plan.memory.needed + trainer.process_nbytes,
            mfu=None if time_of is None else time_of.mfu * speed / time_of.tokens_per_second,
            checkpoint_seconds=self._stood_still,
            skipped_steps=self._skipped,
        )

    def _report(self, metrics: StepMetrics) -> None:
        """Report a step, and stop before a checkpoint holds what is no number."""
        trainer, arguments = self._trainer, self._arguments
        if self._metrics is not None:
            self._metrics.write(metrics)
            trainer.accelerator.log(metrics.scalars(), metrics.step)
        if metrics.step % arguments.log_every == 0 or metrics.step == arguments.steps:
            self._say(metrics.line(arguments.steps))
        norm = metrics.grad_norm if metrics.grad_norm is not None and arguments.precision != "fp16" else 0.0
        # In fp16 the scaler passes over gradients that overflow.
        if not (trainer.optimizer.step_was_skipped or math.isfinite(metrics.loss + norm)):
            raise NonFiniteError(
                f"step {metrics.step} has loss {metrics.loss} and gradient norm {metrics.grad_norm}; "
                "the run has stopped, and its last checkpoint is from before",
                hint="lower --lr, or compute in bf16 or fp32",
            )

    def _save(self, step: int) -> None:
        """Save after `step` steps; what is written in the background is reported when it is complete. Collective."""
        arguments, begin = self._arguments, time.perf_counter()
        self._tell_saved(self._saver.wait())
        (self._saver.save if arguments.async_save else save_checkpoint)(
            path := arguments.checkpoints / f"step-{step:06d}",
            **self._trainer.state_after(step),
            total_limit=arguments.keep_checkpoints,
            # Only an incomplete or damaged one can be there: `find_checkpoints` refuses to begin before a whole one.
            overwrite=True,
        )
        self._stood_still = time.perf_counter() - begin
        self._tell_saved(None if self._saver.is_saving else path)

    def _tell_saved(self, path: Location | None) -> None:
        if path is not None:
            self._say(f"checkpoint: {path}")

    def _roll_back(self, error: NonFiniteError, step: int) -> int:
        """Go back to the newest checkpoint because of `error` in step `step`, and past the data since; its step."""
        trainer, why = self._trainer, str(error).partition("\n")[0]
        self._saver.wait()
        batches = step + trainer.skipped_batches
        paths = run_on_main(trainer.environment, lambda: whole_in(self._arguments.checkpoints))
        if not paths:
            error.add_note("fullshard: there is no checkpoint to go back to")
            raise error
        trainer.optimizer.zero_grad()
        _, back = load_newest(paths, trainer, self._say)
        trainer.skipped_batches = batches - back
        note(trainer.environment, Happening.ROLLBACK, why, to_step=back, passed_over=step - back)
        self._open_metrics(back)
        self._say(f"step {step}: {why}")
        self._say(f"rollback: to the checkpoint after step {back}; {step - back} batches are passed over")
        if self._copies is not None:
            self._copies.go_on_from(back)
        return back


def note(environment: RankEnvironment, kind: Happening, message: str = "", **details: int) -> None:
    """Note an event in the run's journal, on rank 0."""
    if environment.is_main:
        JOURNAL.note(kind, message, **details)


def _look_ahead(arguments: TrainArguments) -> list[Location]:
    """Find what to resume from, and refuse now what would fail only at the end. On rank 0."""
    if arguments.plot:
        require_plots()
    require_trackers(arguments.trackers, "--log-with")
    if arguments.model is not None:
        read_config(arguments.model)
    if not os.access(arguments.output_dir, os.W_OK):
        raise ConfigError(f"cannot write to {arguments.output_dir}", hint="use another --output-dir")
    checkpoints = find_checkpoints(arguments)
    require_same_run(checkpoints, arguments)
    return checkpoints


def _write_down(trainer: Trainer) -> None:
    """Write down what the run is, now that it will go on, and start its trackers. On rank 0."""
    arguments, accelerator = trainer.arguments, trainer.accelerator
    values, defaults = arguments.model_dump(mode="json"), type(arguments)().model_dump(mode="json")
    settings = {
        arguments.spelled(name): {"value": value, "origin": "default" if value == defaults[name] else "given"}
        for name, value in values.items()
    }
    versions = {"fullshard": __version__, "torch": torch.__version__, "python": platform.python_version()}
    place = {"host": socket.gethostname(), "device": name_of(trainer.device), "ranks": accelerator.num_processes}
    files: dict[str, Any] = {"settings": settings, "environment": versions | place}
    if trainer.plan is not None:
        files["plan"] = as_dict(trainer.plan) | {"process": trainer.process_nbytes}
    for name, content in files.items():
        write_text(arguments.output_dir / f"{name}.json", json.dumps(content, indent=2) + "\n")
    write_text(arguments.output_dir / "arguments.json", arguments.to_json())
    accelerator.init_trackers(arguments.output_dir.name, values, {"wandb": {"dir": str(arguments.output_dir)}})


def _finish(trainer: Trainer, data: TrainingData) -> None:
    """Evaluate, and write the run's results; say where each is. Collective."""
    arguments, environment, say = trainer.arguments, trainer.environment, trainer.accelerator.say
    output, metrics = arguments.output_dir, arguments.output_dir / "metrics.jsonl"
    records = list(read_metrics(metrics)) if environment.is_main else []
    losses = [record.loss for record in records]
    if last := losses[-max(1, len(losses) // 10) :]:  # single batches scatter widely
        say(f"training loss: {sum(last) / len(last):.4f} nats/token (mean of the last {len(last)} steps)")
    held_out, entropy = None, run_on_main(environment, data.train.unigram_entropy)
    if len(data.held_out):
        held_out = trainer.evaluate(data.held_out, limit=arguments.eval_sequences)
        say(f"held-out loss: {held_out:.4f} nats/token")
    say(f"unigram entropy: {entropy:.4f} nats/token (what token frequencies alone would reach)")
    if arguments.sample_tokens:
        text = trainer.sample(data.tokenizer)
        run_on_main(environment, lambda: write_text(output / "sample.txt", text + "\n"))
        say(f"sample: {output / 'sample.txt'}")
    if arguments.export:
        export_hf(output / "export", model=trainer.model, tokenizer=data.tokenizer, overwrite=True)
        say(f"export: {output / 'export'}")
    if arguments.plot:
        lines = {"unigram_entropy": entropy, "held_out_loss": held_out}
        steps = [record.step for record in records]
        run_on_main(environment, lambda: plot_losses(output / "loss.png", steps=steps, losses=losses, **lines))
        say(f"loss curve: {output / 'loss.png'}")
    say(f"metrics: {metrics}")


def run(arguments: TrainArguments) -> None:
    """Run the job in this process, reporting a failure to the launcher if there is one."""
    run_worker(lambda: train(arguments))


if __name__ == "__main__":
    run(TrainArguments.read(Path(sys.argv[1])))
