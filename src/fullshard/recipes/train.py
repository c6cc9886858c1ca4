"""`fullshard train` from beginning to end: data, model, sharding, steps, and what the run leaves behind.

    python -m fullshard.recipes.train ARGUMENTS.json

is what each process of a launched run executes; the file is written by the launcher.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fullshard.api import Accelerator, AutocastKwargs, InitProcessGroupKwargs
from fullshard.api.plan_check import PlanWatch
from fullshard.api.room import check_room, checkpoint_nbytes
from fullshard.checkpoint import AsyncSaver, MemoryCopies, export_hf
from fullshard.checkpoint.lease import lease
from fullshard.checkpoint.objects import Location
from fullshard.config.switches import elastic_ranks
from fullshard.config.trackers import require_trackers
from fullshard.core.errors import ConfigError, NonFiniteError
from fullshard.core.journal import JOURNAL, Happening
from fullshard.features.chunked_loss.loss import use_chunked_loss
from fullshard.launch import RankEnvironment, read_rank_environment, run_on_main
from fullshard.launch.environment import is_started_again
from fullshard.launch.journal import record_events
from fullshard.launch.preemption import listening, should_stop
from fullshard.launch.worker import run_worker
from fullshard.observe import (
    RateMeter,
    StepMetrics,
    memory_nbytes,
    require_plots,
    reset_memory_peak,
    write_text,
)
from fullshard.observe.report import write_report
from fullshard.plan.job import Job
from fullshard.recipes.arguments import TrainArguments
from fullshard.recipes.artifacts import draw_losses, final_loss, sample_text
from fullshard.recipes.console import Console, metrics_path, open_console
from fullshard.recipes.data import TrainingData, prepare_data
from fullshard.recipes.loop import StepResult, Trainer, learning_rate
from fullshard.recipes.model import build_model, read_config
from fullshard.recipes.optimizers import muon
from fullshard.recipes.planned import RunPlan, job_values, plan_run
from fullshard.recipes.profiling import StepMemory, StepProfile
from fullshard.recipes.resume import (
    find_checkpoints,
    load_copy,
    load_newest,
    require_same_run,
    roll_back,
    save,
    state_after,
)

_ADAM_BETAS = (0.9, 0.95)


def train(arguments: TrainArguments) -> None:
    """Run the whole job on this rank. Every rank of the job calls it with the same arguments.

    Raises:
        FullshardError: a fault of the settings, the data, a checkpoint or the run.
    """
    joined_before = dist.is_initialized()
    with open_console(read_rank_environment()) as console, contextlib.ExitStack() as held:
        accelerator = RunAccelerator(arguments, console)
        environment = accelerator.process.environment
        # Ranks per shard group are told here, and not taken from the host.
        sharding = arguments.run_config().sharding
        sharding.resolved_strategy().mesh_shape(environment.world_size, sharding.shard_size)
        run_on_main(environment, lambda: held.enter_context(lease(arguments.output_dir)))
        if arguments.checkpoint_dir is not None:
            run_on_main(environment, lambda: held.enter_context(lease(arguments.checkpoints)))
        arguments = for_any_size(arguments)
        checkpoints = run_on_main(environment, lambda: _prepare_output(arguments))
        record_events(arguments.output_dir)
        held.callback(JOURNAL.close)
        data = prepare_data(
            arguments, environment, lambda checksum: require_same_run(checkpoints, arguments, checksum=checksum)
        )
        console.say(f"data: {data.description}")
        copies = None
        if arguments.max_lost_steps is not None:
            copies = held.enter_context(MemoryCopies(arguments.max_lost_steps, say=console.say))
        # Rank 0's launcher is there from the beginning; that of a host that has come later knows of no attempt before.
        is_again = run_on_main(environment, is_started_again)
        is_loaded = bool(checkpoints) or (copies is not None and is_again)
        trainer = _make_trainer(arguments, data, accelerator, console, is_loaded=is_loaded)
        first_step = _go_on(checkpoints, copies, trainer, console)
        if is_loaded and not first_step:  # it was started again before there was a copy
            accelerator.free_memory()
            trainer = _make_trainer(arguments, data, accelerator, console)
        count = arguments.keep_checkpoints + 1 - min(len(checkpoints), arguments.keep_checkpoints)
        nbytes = checkpoint_nbytes(trainer.model, trainer.optimizer)
        run_on_main(environment, lambda: check_room(arguments.checkpoints, nbytes, count, console.say))
        run_on_main(environment, lambda: console.open(accelerator, arguments))
        held.callback(accelerator.finish_trackers)
        with listening():
            with _checked_plan(trainer, console), _memory_watched(trainer, console):
                stopped_at = _train_steps(trainer, copies, first_step=first_step, console=console)
            if stopped_at is None:
                with trainer.averaged():
                    _finish(trainer, data, console)
                _note_on_main(environment, Happening.END)
            else:
                _note_on_main(environment, Happening.PREEMPTION, "saved and stopped because of a signal")
                console.say(f"stopped by a signal after step {stopped_at}; the same command goes on from there")
            if arguments.plot:
                path = arguments.output_dir / "report.html"
                run_on_main(environment, lambda: write_report([arguments.output_dir], path))
                console.say(f"report: {path}")
    if dist.is_initialized() and not joined_before:
        dist.destroy_process_group()


def run(arguments: TrainArguments) -> None:
    """Run the job in this process, reporting a failure to the launcher if there is one."""
    run_worker(lambda: train(arguments))


class RunAccelerator(Accelerator):
    """The Accelerator of a run, which says what it has to say where the run says the rest.

    Args:
        arguments: of the run.
        console: of this rank.
    """

    _rolls_back = True
    _accumulates = False
    _records_events = False  # the run does, once the directory is its own

    def __init__(self, arguments: TrainArguments, console: Console) -> None:
        self._console = console
        timeout = None if arguments.timeout is None else timedelta(seconds=arguments.timeout)
        super().__init__(
            # What micro-batches there are only the run knows: it watches the plan itself.
            fsdp_plugin=arguments.run_config(check_plan=False),
            log_with=[name for name in arguments.trackers if name != "tensorboard"] or None,
            project_dir=arguments.output_dir,
            # The loop takes its loss in float32, so the dtypes of the precision are enough.
            kwargs_handlers=[
                AutocastKwargs(enabled=False),
                InitProcessGroupKwargs(timeout),
            ],
        )

    def _say(self, message: str) -> None:
        self._console.say(message)

    def finish_trackers(self) -> None:
        """End what `init_trackers` has started; the process group stays."""
        self._finish_trackers()


def _prepare_output(arguments: TrainArguments) -> list[Location]:
    """Find what to resume from, and refuse now what would fail only at the end."""
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


def _go_on(checkpoints: list[Location], copies: MemoryCopies | None, trainer: Trainer, console: Console) -> int:
    """Load what is newest, in host memory or on a disk, and say what it is; the number of steps behind it."""
    if copies is not None:
        step = load_copy(copies, checkpoints, trainer)
        if step is not None:
            console.say(f"resume: from copies in host memory, after step {step}")
            return step
    checkpoint, step = load_newest(checkpoints, trainer, console.say)
    console.say(_resume_line(trainer.arguments, checkpoint, step))
    return step


def _resume_line(arguments: TrainArguments, checkpoint: Location | None, first_step: int) -> str:
    if checkpoint is not None:
        return f"resume: from {checkpoint}, after step {first_step}"
    if arguments.resume == "never":
        return "resume: not wanted, starting at step 1"
    return f"resume: no complete checkpoint in {arguments.checkpoints}, starting at step 1"


def _make_trainer(
    arguments: TrainArguments,
    data: TrainingData,
    accelerator: Accelerator,
    console: Console,
    *,
    is_loaded: bool = False,
) -> Trainer:
    """Return the sharded model with its optimizer; with `is_loaded` its weights are loaded afterwards."""
    before = memory_nbytes(accelerator.device)
    model, origin = build_model(
        arguments.model,
        tokenizer=data.tokenizer,
        seq_len=arguments.seq_len,
        seed=arguments.seed,
        is_loaded_later=is_loaded,
    )
    model.train()
    console.say(f"model: {type(model).__name__}, {origin}")
    environment = accelerator.process.environment
    console.plan = plan_run(model, arguments, environment, accelerator.device, console.say, before=before)
    if arguments.loss_chunk is not None:
        use_chunked_loss(model, tokens=arguments.loss_chunk)
    model = accelerator.prepare(model)
    # From here on only dropout draws random numbers, and ranks must not draw the same ones.
    torch.manual_seed(arguments.seed + accelerator.process_index)
    optimizer = _make_optimizer(model, arguments, console)
    return Trainer(
        accelerator,
        model=model,
        optimizer=accelerator.prepare(optimizer),
        sequences=data.train,
        checksum=data.checksum,
        arguments=arguments,
    )


@contextlib.contextmanager
def _checked_plan(trainer: Trainer, console: Console) -> Iterator[None]:
    """Compare the third step inside with its plan, if that is wanted."""
    arguments = trainer.arguments
    if not arguments.check_plan:
        yield
        return
    further = job_values(arguments, trainer.environment.world_size)
    watch = PlanWatch(Job.from_run(arguments.run_config(), **further), console.say)
    watch.watch([trainer.model], [trainer.optimizer.optimizer])
    yield
    watch.close()


@contextlib.contextmanager
def _memory_watched(trainer: Trainer, console: Console) -> Iterator[None]:
    """Write what memory holds through the third step inside, if that is wanted."""
    if not trainer.arguments.memory_timeline:
        yield
        return
    planned = () if console.plan is None else console.plan.plan.memory.timeline
    memory = StepMemory(trainer.accelerator, trainer.arguments.output_dir, console.say, planned)
    memory.begin(trainer.model, trainer.optimizer.optimizer)
    yield
    memory.close()


def _make_optimizer(model: nn.Module, arguments: TrainArguments, console: Console) -> torch.optim.Optimizer:
    lr = learning_rate(0, arguments)
    if arguments.optimizer == "adamw":
        return torch.optim.AdamW(_parameter_groups(model, arguments.weight_decay), lr=lr, betas=_ADAM_BETAS)
    return muon(model, console.say, lr=lr, weight_decay=arguments.weight_decay, adamw_betas=_ADAM_BETAS)


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return groups that decay matrices, not biases and norms. `ndim` of a sharded parameter is the whole one's."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _train_steps(trainer: Trainer, copies: MemoryCopies | None, *, first_step: int, console: Console) -> int | None:
    """Run steps `first_step` + 1 to the last, with a checkpoint wherever one is due.

    Returns:
        The step after which a signal has stopped them, with a checkpoint; None if none has.

    Raises:
        FullshardError: the loss or the gradient is not finite.
    """
    arguments = trainer.arguments
    console.start(arguments, first_step=first_step)
    meter = _StepMeter(trainer, console.plan)
    with _profile(trainer, console) as profile, AsyncSaver() as saver:
        if arguments.async_save:
            saver.reserve([(trainer.model, trainer.optimizer.optimizer)])
        step, rollbacks = first_step, 0
        while step < arguments.steps:
            step += 1
            JOURNAL.tell(step)
            if (written := saver.check()) is not None:
                console.say(f"checkpoint: {written}")
            meter.begin()
            profile.begin_step()
            try:
                result = trainer.step(step - 1)
            except NonFiniteError as error:
                rollbacks += 1
                error.add_note(f"fullshard: this was step {step} of the run")
                if arguments.nonfinite_gradients != "rollback" or rollbacks > arguments.nonfinite_limit:
                    raise
                step = _roll_back(error, trainer, saver, step=step, console=console)
                if copies is not None:
                    copies.go_on_from(step)
                continue
            profile.end_step()
            metrics = meter.end(step, result)
            for sink in console.sinks:
                sink.write(metrics)
            if not trainer.optimizer.step_was_skipped:
                _check_finite(metrics, arguments)
            due = arguments.save_every and step % arguments.save_every == 0
            stops = should_stop() and step < arguments.steps
            meter.stood_still = 0.0
            if due or stops or step == arguments.steps:
                meter.stood_still = _save(trainer, saver, step=step, console=console)
                rollbacks = 0
            if due or step % arguments.log_every == 0:
                meter.restart_rate()
            if stops:
                break
            if copies is not None and step < arguments.steps:
                copies.after_step(step, **state_after(trainer, step))
        if (written := saver.wait()) is not None:
            console.say(f"checkpoint: {written}")
    return step if step < arguments.steps else None


class _StepMeter:
    """Measures steps.

    Attributes:
        stood_still: seconds for which a checkpoint after the last step has held training up.
    """

    def __init__(self, trainer: Trainer, plan: RunPlan | None) -> None:
        self._trainer, self._plan = trainer, plan
        self._rate, self._begin, self._skipped = RateMeter(), 0.0, 0
        self.stood_still = 0.0
        reset_memory_peak(trainer.device)

    def begin(self) -> None:
        """Begin a step."""
        self._begin = time.perf_counter()

    def end(self, step: int, result: StepResult) -> StepMetrics:
        """Return the metrics of the step, over all ranks. A collective."""
        trainer, arguments, plan = self._trainer, self._trainer.arguments, self._plan
        self._skipped += trainer.optimizer.step_was_skipped
        tokens = arguments.batch_size * arguments.seq_len
        loss_sum, data_wait, memory = trainer.sum_over_ranks(result, memory_nbytes(trainer.device))
        return StepMetrics(
            step=step,
            loss=loss_sum / tokens,
            learning_rate=learning_rate(step - 1, arguments),
            grad_norm=result.grad_norm,
            tokens=tokens,
            tokens_seen=step * tokens,
            step_seconds=time.perf_counter() - self._begin,
            tokens_per_second=(speed := self._rate.add(tokens)),
            data_wait_seconds=data_wait,
            memory_nbytes=memory,
            planned_nbytes=None if plan is None else plan.nbytes,
            mfu=None if plan is None else plan.mfu(speed),
            checkpoint_seconds=self.stood_still,
            skipped_steps=self._skipped,
        )

    def restart_rate(self) -> None:
        """Measure the rate from here on, so that a line's rate is of its own steps, without the time of a save."""
        self._rate.restart()


@contextlib.contextmanager
def _profile(trainer: Trainer, console: Console) -> Iterator[StepProfile]:
    """Give the profile that records the steps to be profiled within the block."""
    arguments = trainer.arguments
    steps = arguments.profile_steps if arguments.profile else None
    profile = StepProfile(trainer.accelerator, steps, arguments.output_dir / "profile", console.say)
    yield profile
    profile.close()


def _roll_back(error: NonFiniteError, trainer: Trainer, saver: AsyncSaver, *, step: int, console: Console) -> int:
    """Go back to the newest checkpoint because of `error` in step `step`; return the step it was written after."""
    saver.wait()
    back = roll_back(trainer, step, console.say)
    if back is None:
        error.add_note("fullshard: there is no checkpoint to go back to")
        raise error
    _note_on_main(
        trainer.environment, Happening.ROLLBACK, str(error).partition("\n")[0], to_step=back, passed_over=step - back
    )
    console.close()
    console.start(trainer.arguments, first_step=back)
    console.say(f"step {step}: {str(error).partition(chr(10))[0]}")
    console.say(f"rollback: to the checkpoint after step {back}; {step - back} batches are passed over")
    return back


def _note_on_main(environment: RankEnvironment, kind: Happening, message: str = "", **details: int) -> None:
    if environment.is_main:
        JOURNAL.note(kind, message, **details)


def _save(trainer: Trainer, saver: AsyncSaver, *, step: int, console: Console) -> float:
    """Save after `step` steps; what is written in the background is reported when it is complete.

    Returns:
        Seconds that training stood still.
    """
    begin = time.perf_counter()
    if (earlier := saver.wait()) is not None:
        console.say(f"checkpoint: {earlier}")
    written = save(trainer, step, saver)
    seconds = time.perf_counter() - begin
    if not saver.is_saving:
        console.say(f"checkpoint: {written}")
    return seconds


def _check_finite(metrics: StepMetrics, arguments: TrainArguments) -> None:
    """Stop before a checkpoint holds what is no number. In fp16 the scaler passes over gradients that overflow."""
    norm = 0.0 if metrics.grad_norm is None else metrics.grad_norm
    if math.isfinite(metrics.loss) and (math.isfinite(norm) or arguments.precision == "fp16"):
        return
    raise NonFiniteError(
        f"step {metrics.step} has loss {metrics.loss} and gradient norm {metrics.grad_norm}; "
        "the run has stopped, and its last checkpoint is from before",
        hint="lower --lr, or compute in bf16 or fp32",
    )


def _finish(trainer: Trainer, data: TrainingData, console: Console) -> None:
    """Evaluate, and write the run's results; say where each is."""
    arguments, environment = trainer.arguments, trainer.environment
    output = arguments.output_dir
    console.say(run_on_main(environment, lambda: final_loss(metrics_path(arguments))))
    held_out = None
    if len(data.held_out):
        held_out = trainer.evaluate(data.held_out, limit=arguments.eval_sequences)
        console.say(f"held-out loss: {held_out:.4f} nats/token")
    console.say(f"unigram entropy: {data.unigram_entropy:.4f} nats/token (what token frequencies alone would reach)")
    if arguments.sample_tokens:
        text = sample_text(
            trainer.model,
            data.tokenizer,
            prompt=arguments.prompt,
            tokens=arguments.sample_tokens,
            device=trainer.device,
        )
        run_on_main(environment, lambda: write_text(output / "sample.txt", text + "\n"))
        console.say(f"sample: {output / 'sample.txt'}")
    if arguments.export:
        export_hf(output / "export", model=trainer.model, tokenizer=data.tokenizer, overwrite=True)
        console.say(f"export: {output / 'export'}")
    if arguments.plot:
        run_on_main(
            environment,
            lambda: draw_losses(
                output / "loss.png",
                metrics_path(arguments),
                unigram_entropy=data.unigram_entropy,
                held_out_loss=held_out,
            ),
        )
        console.say(f"loss curve: {output / 'loss.png'}")
    console.say(f"metrics: {metrics_path(arguments)}")


if __name__ == "__main__":
    run_worker(lambda: train(TrainArguments.read(Path(sys.argv[1]))))
