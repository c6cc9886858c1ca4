"""Accelerate's dialect: the keys of its files, and one flat table of all keys for its flags and variables."""

import dataclasses
import math
from functools import partial
from typing import Any

from fullshard.config import values
from fullshard.config.axes import AxesConfig
from fullshard.config.dialect import (
    Dialect,
    Key,
    Note,
    Problem,
    Reading,
    Setting,
    Settings,
    Status,
    checked,
    no_effect,
    refused,
    rows,
    switch,
)
from fullshard.config.fsdp import FSDP_KEYS, finish_fsdp, make_hybrid
from fullshard.config.xla import require_xla
from fullshard.core.errors import ConfigError

_PLAIN = tuple(f"MULTI_{kind}" for kind in ("CPU", "GPU", "NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON"))
_SHARDED = ("FSDP", "DEEPSPEED", "XLA")
_OTHER_PARALLELISM = ("TP", "MEGATRON_LM")
_BACKENDS = ("INDUCTOR", "EAGER", "AOT_EAGER", "CUDAGRAPHS", "ONNXRT", "OPENXLA", "TENSORRT", "TVM", "NO")


def _environment(value: Any) -> Settings:
    if values.one_of(value, ("LOCAL_MACHINE", "AMAZON_SAGEMAKER")) == "AMAZON_SAGEMAKER":
        raise ConfigError(
            "AMAZON_SAGEMAKER is not supported because fullshard only starts jobs on your own machines",
            hint="use LOCAL_MACHINE",
        )
    return {}


def _distributed_type(value: Any) -> Settings | str:
    name = values.one_of(value, (*_SHARDED, "NO", *_PLAIN, *_OTHER_PARALLELISM))
    if name in _OTHER_PARALLELISM:
        raise ConfigError(f"{name} is not supported because fullshard splits models only by sharding", hint="use FSDP")
    if name == "XLA":
        return require_xla("XLA", "use FSDP")
    if name == "NO":
        return {"launch.num_processes": 1}
    if name == "MULTI_CPU":
        return {"sharding.strategy": "NO_SHARD", "launch.device": "cpu"}
    return {"sharding.strategy": "NO_SHARD"} if name in _PLAIN else {}


ONLY_TORCHAO = "use torchao (fp8_backend AO, or AORecipeKwargs): only its weights define how to gather them in 8 bits"


def _fp8_backend(value: Any) -> Settings:
    if (name := values.one_of(value, ("AO", "TE", "MSAMP", "NO"))) in ("TE", "MSAMP"):
        raise ConfigError(f"{name} is not supported", hint=ONLY_TORCHAO)
    return {}  # without a backend, Accelerate, too, uses torchao if it is installed


def hosts(value: Any) -> Settings:
    """Read the number of hosts, written as one number or as `MIN:MAX`."""
    low, colon, high = values.text(value).partition(":")
    if not colon or values.integer(low) == values.integer(high):
        return {"launch.num_machines": values.integer(low)}
    return {"launch.min_machines": values.integer(low), "launch.num_machines": values.integer(high)}


def _num_processes(value: Any) -> Settings | str:
    if ":" in str(value):
        raise ConfigError(
            f"{value} processes are not supported: only the number of hosts may vary, and each host has a fixed "
            "number of processes",
            hint="use --nnodes MIN:MAX and --nproc_per_node",
        )
    number = values.integer(value)
    return "-1 leaves the number to the launcher" if number == -1 else {"launch.num_processes": number}


def _main_function(value: Any) -> Settings | str:
    return {} if values.text(value) == "main" else "the script is run from its first line"


def _backend(value: Any) -> Settings:
    name = "NO" if value is False else values.one_of(value, _BACKENDS)
    return {"sharding.compile": name != "NO", **({"sharding.compile_backend": name.lower()} if name != "NO" else {})}


def _of_one(what: str, instead: str = "use 1, or remove it") -> Any:
    def read(value: Any) -> Settings:
        if values.integer(value) > 1:
            raise ConfigError(f"{what} parallelism is not supported here, got {value!r}", hint=instead)
        return {}

    return read


def shard_size(value: Any) -> Settings:
    """Read the number of ranks per shard group. A size of 1 sets nothing."""
    size = values.integer(value)
    return {"sharding.shard_size": size} if size > 1 else {}


def _size(value: Any) -> Settings:
    if values.integer(value) < 1:
        raise ConfigError(f"expected 1 or more, got {value!r}", hint="omit the key to use one replica")
    return {}


AUTO = "auto leaves it to the script"


def is_auto(value: Any) -> bool:
    """Return whether a value is DeepSpeed's `auto`."""
    return isinstance(value, str) and value.strip().lower() == "auto"


_STEPS = "training.gradient_accumulation_steps"


def _clipping(value: Any) -> Settings | str:
    if is_auto(value) or values.is_none(value):
        return AUTO
    limit = values.number(value)
    return {"training.gradient_clipping": limit} if limit != 0 else {}  # DeepSpeed's 0 does not clip


STEP_KEYS = (
    Key(
        "gradient_accumulation_steps",
        target=_STEPS,
        read=lambda value: AUTO if is_auto(value) else {_STEPS: values.coerce(_STEPS, value)},
        variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    ),
    Key(
        "gradient_clipping",
        target="training.gradient_clipping",
        read=_clipping,
        variable="ACCELERATE_GRADIENT_CLIPPING",
    ),
)
"""Keys about an optimizer step, which DeepSpeed and Accelerate's launcher share."""

DYNAMO_KEYS = (
    Key("dynamo_backend", target="sharding.compile_backend", read=_backend),
    *rows("dynamo_booleans", checked(values.boolean)),
    *rows("dynamo"),
)

FP8_KEYS = (
    Key("fp8_backend", because="AO is the only one", read=_fp8_backend),
    Key("fp8_enable_fsdp_float8_all_gather", target="precision.fp8_all_gather"),
    Key("fp8_pad_inner_dim", target="precision.fp8_pad_inner_dim"),
)

PARALLELISM_KEYS = (
    Key("parallelism_config_dp_shard_size", Status.TRANSLATED, "sharding.shard_size", read=shard_size),
    Key("parallelism_config_dp_replicate_size", Status.TRANSLATED, "sharding.strategy", read=_size),
    *refused(
        "tensor parallelism is set up in the script",
        "parallelism_config_tp_size",
        read=_of_one(
            "tensor", "set all sizes in the script: Accelerator(parallelism_config=ParallelismConfig(tp_size=...))"
        ),
    ),
    *refused("the script sets it up", "parallelism_config_pp_size", read=_of_one("pipeline")),
    *refused("the script sets it up", "parallelism_config_ep_size", read=_of_one("expert")),
    *no_effect(
        "torch is the only one", "parallelism_config_cp_backend", read=checked(partial(values.one_of, known=("TORCH",)))
    ),
    *(Key(f"parallelism_config_{name}", target=f"parallelism.{name}") for name in AxesConfig.model_fields),
)

ON_EACH_HOST = "Accelerate uses it to run commands on the hosts of a TPU; start the launcher on each host instead"

CLUSTER_KEYS = (
    Key("compute_environment", because="it is LOCAL_MACHINE on every cluster", read=_environment),
    Key(
        "distributed_type",
        Status.TRANSLATED,
        "sharding.strategy",
        because="FSDP shards; NO starts one process, whatever num_processes is; MULTI_* puts replicas on all ranks",
        read=_distributed_type,
    ),
    Key("mixed_precision", target="precision.mode", variable="ACCELERATE_MIXED_PRECISION"),
    Key("fp16", Status.TRANSLATED, "precision.mode", read=switch("precision.mode", "fp16")),
    Key("use_cpu", target="launch.device", read=switch("launch.device", "cpu"), variable="ACCELERATE_USE_CPU"),
    Key("debug", target="launch.debug", variable="ACCELERATE_DEBUG_MODE"),
    Key("num_processes", target="launch.num_processes", read=_num_processes),
    Key("num_machines", target="launch.num_machines", read=hosts),
    *no_effect("hosts connect to main_process_ip on any network", "same_network", read=checked(values.boolean)),
    Key("main_training_function", Status.NO_EFFECT, because="the complete script is run", read=_main_function),
    Key(
        "enable_cpu_affinity",
        Status.NO_EFFECT,
        because="processes are not bound to processors",
        read=lambda on: "processes are not bound to processors; start them under numactl" if values.boolean(on) else {},
        variable="ACCELERATE_CPU_AFFINITY",
    ),
    Key("dynamo_config", section=Dialect("dynamo_config", DYNAMO_KEYS, prefix="dynamo_")),
    Key("dynamo_backend", Status.TRANSLATED, "sharding.compile_backend", read=_backend),
    Key("fp8_config", section=Dialect("fp8_config", FP8_KEYS, prefix="fp8_")),
    *refused(
        ON_EACH_HOST, *("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "command_file", "commands")
    ),
    *rows("cluster"),
)


def finish_parallelism(reading: Reading) -> None:
    """Translate the sizes of axes: parameters are sharded over `dp_shard_size` x `cp_size` x `sp_size` ranks.

    Translate `dp_replicate_size` to a hybrid strategy, or to NO_SHARD if none of these sizes is set.
    """
    entry = reading.entries.get("parallelism_config_dp_replicate_size")
    _finish_shard_size(reading, is_hybrid=entry is not None and str(entry.value) != "1")
    size, number = reading.setting("sharding.shard_size"), reading.setting("launch.num_processes")
    try:
        replicas = values.integer(entry.value) if entry is not None else 1
    except ValueError:
        return  # it has been reported as a problem
    others = (reading.entries.get(f"parallelism_config_{kind}_size") for kind in ("tp", "pp", "ep"))
    if entry is None or replicas <= 1 or any(other is not None and str(other.value) != "1" for other in others):
        return  # the number of processes includes other kinds of parallelism, which are refused
    said = Setting("sharding.strategy", "NO_SHARD", entry.origin, entry.key)
    if number is not None and number.value != replicas * (1 if size is None else size.value):
        ranks = f"{replicas} replicas of {'1 rank' if size is None else f'{size.value} ranks'}"
        message = f"{entry.key} requires {ranks}, but num_processes is {number.value}"
        hint = "set num_processes to dp_replicate_size x dp_shard_size x cp_size x sp_size"
        reading.problems.append(Problem((entry.origin, number.origin), message, hint))
    elif size is not None:
        make_hybrid(reading, said)
    else:
        reading.settings.append(said)
        text = f"without dp_shard_size means {replicas} unsharded replicas of the model: NO_SHARD"
        reading.notes.append(Note(entry.origin, entry.key, Status.TRANSLATED, text))


def _finish_shard_size(reading: Reading, *, is_hybrid: bool) -> None:
    """Count the ranks of context and sequence parallelism in the shard size, if one is set or required."""
    axes = [
        found for axis in ("cp", "sp") if (found := reading.setting(f"parallelism.{axis}_size")) and found.value > 1
    ]
    size = reading.setting("sharding.shard_size")
    if axes and (size.key.endswith("dp_shard_size") if size is not None else is_hybrid):
        ranks = math.prod(setting.value for setting in [*axes, *([] if size is None else [size])])
        reading.settings = [setting for setting in reading.settings if setting is not size]
        reading.settings.append(dataclasses.replace(size or axes[0], path="sharding.shard_size", value=ranks))


def _finish_flat(reading: Reading) -> None:
    finish_fsdp(reading)
    finish_parallelism(reading)


_FLAT_NAMES = {key.name for key in DYNAMO_KEYS}

FLAT = Dialect(
    "Accelerate's launcher",
    (
        *FSDP_KEYS,
        *PARALLELISM_KEYS,
        *DYNAMO_KEYS,
        *FP8_KEYS,
        *(key for key in CLUSTER_KEYS if key.section is None and key.name not in _FLAT_NAMES),
        *STEP_KEYS,
    ),
    finish=_finish_flat,
)
"""All keys in one flat table, for flags and variables. `find` accepts the names of flags without dashes."""
