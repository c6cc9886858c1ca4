"""A run of the real engine as one rank of many, without the other ranks and without data.

Every tensor is on the meta device. The engine itself determines the layout, the hooks, the schedule and the byte
counts. Only the arithmetic and the network are missing.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.api.counting import as_numbers
from fullshard.api.planning import model_shape
from fullshard.api.plugin import dtype_or_none
from fullshard.api.virtual.attention import dividing
from fullshard.api.virtual.device import VirtualDevice, instead
from fullshard.api.virtual.group import playing
from fullshard.comm.mesh import Mesh, init_mesh
from fullshard.core.errors import ConfigError, plural
from fullshard.core.events import Event, EventKind, EventSink
from fullshard.core.imports import import_extra
from fullshard.engine.lookup import units_of
from fullshard.features import MixedPrecisionPolicy, OffloadPolicy, describe, keep_head, shard_model
from fullshard.features.meta_device import WEIGHTS
from fullshard.features.quantized_weights.quantize import quantize
from fullshard.features.recompute import checkpoint_modules
from fullshard.features.summary import Sharding
from fullshard.features.unit_selection import embedding_modules, unit_modules
from fullshard.plan.activations import page_nbytes
from fullshard.plan.axes import check_groups, sent_nbytes
from fullshard.plan.families import family_of
from fullshard.plan.hardware import DEVICES, Cluster, check_rank
from fullshard.plan.job import Job
from fullshard.plan.layout import lay_out
from fullshard.plan.optimizers import OPTIMIZERS
from fullshard.plan.schedule import predict_step
from fullshard.plan.traffic import Traffic, traffic_of

SENT = ("gather", "reduce", "replicate", "cp", "sp")
"""The purposes for which a rank sends bytes in a step."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """The engine's actions in its second step, and the planner's prediction of them."""

    sharding: Sharding  # the description of the sharding that is reported at start-up
    events: list[Event]
    predicted: list[Event]
    traffic: Traffic  # predicted bytes that this rank sends
    counted: tuple[int, ...]  # actual bytes that this rank sends (gather, reduce, replicate, cp, sp)
    main_nbytes: int  # bytes of the main weights
    predicted_main_nbytes: int

    @property
    def differences(self) -> list[str]:
        """Return a list that describes all differences between the engine and the planner."""
        ran, planned = (
            dict.fromkeys(e.unit for e in es if e.kind is EventKind.FORWARD_BEGIN)
            for es in (self.events, self.predicted)
        )
        if idle := [unit for unit in planned if unit not in ran]:
            units = plural(len(idle), "planned unit")
            return [f"{units} did not run, the first is {idle[0]}: a simulation passes only tokens"]
        found = []
        # The saved tensors of a model depend on its kernels, and the meta device has others.
        events, predicted = ([e for e in es if e.what != "activations"] for es in (self.events, self.predicted))
        for index, (got, expected) in enumerate(zip(events, predicted, strict=False)):
            if got != expected:
                found.append(f"event {index}: the engine has {got}, the planner {expected}")
                break
        if len(events) != len(predicted):
            found.append(f"the engine has {len(events)} events, but the planner has {len(predicted)}")
        sent = tuple(getattr(self.traffic, f"{name}_nbytes") for name in SENT)
        if sent != self.counted:
            found.append(f"({', '.join(SENT)}) bytes: the engine sends {self.counted}, the planner says {sent}")
        if self.main_nbytes != self.predicted_main_nbytes:
            found.append(f"main weights: {self.main_nbytes} bytes, the planner says {self.predicted_main_nbytes}")
        return found


class NoWeights:
    """A weight source that claims to have every parameter but loads nothing, because meta tensors have no data."""

    def start(self, *_: Any) -> None:
        """Do nothing."""

    read = start

    def make_whole(self, module: nn.Module, _: torch.device) -> None:
        """Allocate the module's buffers, so that nothing initializes them. They return to the meta device."""
        buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        module._buffers.update({name: torch.empty_like(buffer, device="cpu") for name, buffer in buffers.items()})

    def holds(self, *_: Any) -> bool:
        """Return True for every slot, because this source claims to have all parameters."""
        return True

    initialize = read_parts = holds


def simulate(build: Callable[[], nn.Module], job: Job, *, world_size: int, rank: int = 0) -> Simulation:
    """Shard the model that `build` creates, without data, for `world_size` ranks. Run two steps as one of them."""
    check_rank(rank, world_size)
    if job.method == "qlora":
        raise ConfigError(
            "the simulation does not support bitsandbytes layers",
            hint="use --method lora --quantize nf4-double, which also stores linear layers in 4 bits",
        )
    check_axes(job)
    shard_size = job.row.mesh_shape(world_size, job.shard_size)[1]
    with torch.device("meta"):
        model = _trained(build().float(), job)
    shape = model_shape(model)
    if job.wrap_embeddings:
        shape = shape.with_own_embeddings()
    events: list[Event] = []
    cluster = Cluster(DEVICES["H100"], world_size, 1)
    check_groups(shape, job, cluster, groups=world_size, shard_size=shard_size)
    device = VirtualDevice(cluster)  # whose clocks nobody reads
    with playing(device, rank, world_size), instead(torch, "autocast", _autocast), contextlib.ExitStack() as stack:
        if job.axes:  # to see torch's functional collectives
            stack.enter_context(device.running())
        mesh = init_mesh(shard_size=shard_size, device=torch.device("meta"))
        of_axes = stack.enter_context(dividing(model, job, cluster.device))
        shard_without_weights(model, job, mesh, events.append)
        sent = _second_step(model, job, mesh, of_axes, events)
    layout = lay_out(
        shape,
        strategy=job.row,
        world_size=world_size,
        shard_size=job.shard_size,
        dtypes=job.dtypes,
        offload=job.on_host,
    )
    if job.on_host.activations:
        # Of any device: how large a page is there is in no event that is compared.
        layout = layout.with_pages(lambda block: page_nbytes(block, job, DEVICES["H100"]))
    predicted = predict_step(layout, dataclasses.replace(job.schedule, optimizer=OPTIMIZERS["sgd"]))
    return Simulation(
        sharding=describe(model),
        events=events,
        predicted=predicted,
        traffic=dataclasses.replace(traffic_of(predicted, layout), **sent_nbytes(shape, job)),
        counted=sent,
        main_nbytes=sum(
            tensor.nbytes for unit in units_of(model) for bucket in unit.buckets for tensor in bucket.stored
        ),
        predicted_main_nbytes=sum(bucket.main_nbytes for bucket in layout.buckets),
    )


def _autocast(device_type: str, **options: Any) -> contextlib.AbstractContextManager[Any]:
    """Return torch's autocast context, or one that does nothing on the meta device, which autocast does not support."""
    return contextlib.nullcontext() if device_type == "meta" else torch.amp.autocast(device_type, **options)


def _trained(model: nn.Module, job: Job) -> nn.Module:
    """Prepare a float32 model for the job's training method: add adapters and quantize it if the job uses them."""
    if job.method == "full":
        return model
    peft = import_extra("peft", extra="sft", purpose="simulating adapters")
    targets = job.lora_targets or "all-linear"
    config = peft.LoraConfig(
        r=job.adapter_rank,
        target_modules=targets if targets == "all-linear" else [name.strip() for name in targets.split(",")],
        lora_dropout=job.lora_dropout or 0.0,
    )
    adapted: nn.Module = peft.get_peft_model(model.to(getattr(torch, job.stored_dtype)), config)
    if job.quantize is not None:
        quantize(adapted, job.quantize)
    return adapted


def shard_without_weights(model: nn.Module, job: Job, mesh: Mesh, event_sink: EventSink) -> None:
    """Shard a model on the meta device with the settings of a job. Its parameters have no data."""
    units = unit_modules(model)
    apart = embedding_modules(model) if job.wrap_embeddings else ()
    if job.checkpointing != "none":
        checkpoint_modules(model, units, reentrant=job.reentrant, selective=job.checkpointing == "selective")
    model.__dict__[WEIGHTS] = NoWeights()
    dtypes = job.dtypes
    shard_model(
        model,
        unit_modules=[*units, *apart],
        strategy=job.strategy,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=dtype_or_none(dtypes.compute_dtype),
            reduce_dtype=dtype_or_none(dtypes.reduce_dtype),
            gather_as=dtype_or_none(dtypes.gather_as),
            reduce_as=dtype_or_none(dtypes.reduce_as),
        ),
        offload_policy=OffloadPolicy(**dataclasses.asdict(job.on_host)),
        forward_prefetch=job.forward_prefetch,
        backward_prefetch=job.backward_prefetch,
        event_sink=event_sink,
    )
    if apart:
        keep_head(apart[1])


def check_axes(job: Job) -> None:
    """Raise `ConfigError` if the job has an axis that cannot be simulated."""
    reasons = {
        "tp": "layers are not split",
        "ep": "Transformers' exchange reads how many tokens each rank gets, which tensors without data do not tell",
    }
    if asked := [f"{axis} = {job.axes[axis]} ({why})" for axis, why in reasons.items() if axis in job.axes]:
        raise ConfigError(
            f"the simulation does not support {' and '.join(asked)}", hint="remove them, or use fullshard plan"
        )


def _second_step(
    model: nn.Module, job: Job, mesh: Mesh, of_axes: dict[str, Any], events: list[Event]
) -> tuple[int, ...]:
    """Run two steps; the first records the order of units. Keep the events of the second, and return its bytes."""
    groups = [getattr(way, "group", None) for way in (mesh.gather, mesh.reduce, mesh.replicate)]  # None: of one rank
    groups += [of_axes.get(axis) for axis in ("cp", "sp")]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        events.clear()
        before = [group.sent_nbytes if group else 0 for group in groups]
        for _ in range(job.accumulation):
            _loss(model, job).backward()
        optimizer.step()
        optimizer.zero_grad()
    return tuple(g.sent_nbytes - earlier if g else 0 for g, earlier in zip(groups, before, strict=True))


def transformers_model(values: dict[str, Any], *, attention: str | None = None) -> Callable[[], nn.Module]:
    """Return a function that builds the causal or encoder-decoder model that a `config.json` describes."""
    transformers = import_extra("transformers", extra="hf", purpose="simulating a Transformers model")
    kind_of_model = family_of(values)
    if not isinstance(kind_of_model, str) or kind_of_model not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"Transformers {transformers.__version__}, which builds the model, does not support model_type "
            f"{kind_of_model!r}",
            hint="update Transformers, or use fullshard plan, which does not build the model",
        )

    def build() -> nn.Module:
        try:
            config = transformers.AutoConfig.for_model(**as_numbers({**values, "model_type": kind_of_model}))
            config.use_cache = False
            if not config.is_encoder_decoder:
                kind = transformers.AutoModelForCausalLM
            elif type(config) in transformers.AutoModelForSeq2SeqLM._model_mapping:
                kind = transformers.AutoModelForSeq2SeqLM
            else:
                kind = transformers.AutoModelForSpeechSeq2Seq
            model: nn.Module = kind.from_config(config, attn_implementation=attention)
        except ImportError:  # of the library that computes its attention
            raise
        except Exception as error:  # each family checks its fields in its own way
            raise ConfigError(
                f"Transformers {transformers.__version__} does not accept the file as a {kind_of_model} "
                f"configuration: {error}",
                hint="use the model's complete config.json",
            ) from error
        return model

    return build


_OWN_MASK = ("bloom", "opt")
"""Families that derive positions from a two-dimensional mask, and therefore get no mask here."""


def _loss(model: nn.Module, job: Job) -> torch.Tensor:
    """Run a forward on token ids and labels of the job's shape, and return the loss, which the model computes."""
    length = job.seq_len // job.shared_by
    tokens = torch.zeros(job.micro_batch, length, dtype=torch.long, device="meta")
    # A whole mask, because Transformers would look at the values of anything less.
    mask = torch.ones(job.micro_batch, 1, length, length, dtype=torch.bool, device="meta")
    config: Any = model.config
    inputs = {"input_ids": tokens} | ({} if config.model_type in _OWN_MASK else {"attention_mask": mask})
    if getattr(config, "is_encoder_decoder", False):
        if model.main_input_name == "input_features":  # speech: two frames become one position
            frames = 2 * config.max_source_positions
            inputs = {"input_features": torch.zeros(job.micro_batch, config.num_mel_bins, frames, device="meta")}
        inputs |= {"decoder_input_ids": tokens, "decoder_attention_mask": mask}
    loss: torch.Tensor = model(**inputs, labels=tokens).loss
    return loss
