"""A `RunConfig` as the YAML of Accelerate's launcher, and notes on all that Accelerate's file cannot say.

The file has FSDP version 2, unless only version 1 can express the configuration: DDP, and hybrid sharding with an
unknown number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from fullshard.config.accelerate import CLUSTER_KEYS, DYNAMO_KEYS
from fullshard.config.dialect import shown
from fullshard.config.fsdp import FSDP_KEYS
from fullshard.config.schema import SETTINGS, RunConfig
from fullshard.config.settings import About
from fullshard.core.strategy import Axis, Strategy, parse_strategy

_WRAPS = {
    "auto": "TRANSFORMER_BASED_WRAP",
    "class": "TRANSFORMER_BASED_WRAP",
    "size": "SIZE_BASED_WRAP",
    "none": "NO_WRAP",
}
_KEYS = {key.target: key.name for key in (*CLUSTER_KEYS, *FSDP_KEYS, *DYNAMO_KEYS) if key.target}
"""The reader's table, the other way round."""

_TOP_LEVEL = (
    "launch.num_processes",
    "launch.num_machines",
    "launch.machine_rank",
    "launch.main_process_ip",
    "launch.main_process_port",
    "launch.rdzv_backend",
    "launch.debug",
)
_FSDP = (
    "sharding.cpu_offload",
    "sharding.wrap_min_numel",
    "sharding.ignored_modules",
    "sharding.activation_checkpointing",
    "sharding.cpu_ram_efficient_loading",
    "checkpoint.state_dict_type",
)
_VERSION_1_FSDP = ("sharding.backward_prefetch", "sharding.forward_prefetch", "sharding.sync_module_states")
_COMPILE = ("sharding.compile_mode", "sharding.compile_fullgraph", "sharding.compile_dynamic")
_SAID_OTHERWISE = ("sharding.shard_size", "sharding.compile")
"""Settings without a key of their own, which a mesh and a backend say."""

_DYNAMO_BACKENDS = ("eager", "aot_eager", "inductor", "cudagraphs", "onnxrt", "tensorrt", "tvm")


@dataclass(frozen=True, slots=True)
class Remark:
    """A remark on a setting that Accelerate's file says differently or not at all.

    Attributes:
        path: the setting, `group.name`.
        text: its effect there.
    """

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


def write_accelerate(config: RunConfig) -> tuple[str, list[Remark]]:
    """Return the configuration as YAML that `accelerate launch --config_file` and fullshard read.

    Returns:
        The text, and a remark on each setting that would read back differently, or means something else there.
    """
    from ruamel.yaml import YAML

    writer = _Writer(config)
    document = writer.document()
    text = StringIO()
    yaml = YAML()
    yaml.version = (1, 1)  # Accelerate reads 1.1, where a bare `no` is false
    yaml.width = 2**31  # one line for a value, however long
    yaml.dump(document, text)
    return text.getvalue().removeprefix("%YAML 1.1\n---\n"), writer.remarks


@dataclass
class _Writer:
    config: RunConfig
    remarks: list[Remark] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Return the file's content, and add a remark for whatever it cannot hold."""
        launch = self.config.launch
        fsdp, parallelism = self._strategy()
        document: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP",
            "mixed_precision": self._precision(),
            "use_cpu": launch.device == "cpu",
            **self._named(_TOP_LEVEL),
            "fsdp_config": fsdp | self._wrap() | self._named(_FSDP),
        }
        if launch.gpu_ids is not None:
            document["gpu_ids"] = ",".join(launch.gpu_ids)
        if parallelism:
            document["parallelism_config"] = parallelism
        if launch.device in ("cuda", "tpu"):
            self._say("launch.device", "Accelerate chooses accelerators itself, unless use_cpu is true")
        if launch.num_processes is None:
            self._say("launch.num_processes", "accelerate launch needs --num_processes, because none is set")
        self._several_hosts(document)
        self._prefetch(document["fsdp_config"])
        self._activations(document["fsdp_config"])
        self._compile(document)
        self._leave_out()
        return document

    def _strategy(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the keys of `fsdp_config` and of `parallelism_config` that say how a model is divided."""
        sharding = self.config.sharding
        row = sharding.resolved_strategy()
        if row.is_hybrid:
            return self._hybrid(row)
        if row.code is None:
            nearest = row.with_axes(Axis.SHARD)
            self._say("sharding.strategy", f"{row.name} is written as {nearest.name}: Accelerate has no word for it")
            row = nearest
        if sharding.shard_size is not None:
            self._say("sharding.shard_size", f"left out: it is fixed by {row.name} and the number of processes")
        if not row.shards:
            return self._version_1(row, "version 2 of Accelerate's FSDP cannot replicate"), {}
        return self._version_2(row), {}

    def _hybrid(self, row: Strategy) -> tuple[dict[str, Any], dict[str, Any]]:
        total = self.config.launch.num_processes
        if total is None:
            if self.config.sharding.shard_size is not None:
                self._say("sharding.shard_size", "left out: without num_processes the shard group is one host there")
            return self._version_1(row, "version 2 needs the number of processes for hybrid sharding"), {}
        size = self.config.sharding.resolved_shard_size(total // self.config.launch.num_machines)
        replicas, size = row.mesh_shape(total, size)
        if replicas == 1:
            self._say("sharding.shard_size", "left out: one shard group holds all processes")
            plain = row.with_axes(Axis.SHARD)
            self._say("sharding.strategy", f"{row.name} over one shard group is written as {plain.name}")
            return self._version_2(plain), {}
        if size == 1:
            self._say("sharding.shard_size", "left out: shard groups of one rank shard nothing")
            plain = row.with_axes(Axis.REPLICATE)
            self._say("sharding.strategy", f"{row.name} with shard groups of one rank is written as {plain.name}")
            return self._version_1(plain, "version 2 of Accelerate's FSDP cannot replicate"), {}
        if self.config.sharding.shard_size is None:
            self._say("sharding.shard_size", f"written as {size}, the ranks of one host")
        self._say("sharding.strategy", f"{row.name} is written as fsdp_reshard_after_forward and parallelism_config")
        mesh = {"parallelism_config_dp_replicate_size": replicas, "parallelism_config_dp_shard_size": size}
        # Without these Accelerate's launcher hands on the text "None".
        ones = {"parallelism_config_tp_size": 1, "parallelism_config_cp_size": 1, "parallelism_config_sp_size": 1}
        return self._version_2(row), mesh | ones

    def _version_1(self, row: Strategy, because: str) -> dict[str, Any]:
        self._say_if_overridden(row)
        self._say("sharding.strategy", f"{row.name} is written for version 1 of Accelerate's FSDP: {because}")
        return {"fsdp_version": 1, "fsdp_sharding_strategy": row.name}

    def _version_2(self, row: Strategy) -> dict[str, Any]:
        sharding = self.config.sharding
        said = parse_strategy(sharding.strategy)
        if said.code is not None and not (said.is_hybrid or said.frees_after_forward):
            self._say("sharding.strategy", f"{said.name} is written as fsdp_reshard_after_forward")
        if sharding.reshard_after_forward in (None, "auto"):
            self._say("sharding.reshard_after_forward", f"written as {shown(row.frees_after_forward)}")
        return {"fsdp_version": 2, "fsdp_reshard_after_forward": row.frees_after_forward}

    def _say_if_overridden(self, row: Strategy) -> None:
        if self.config.sharding.reshard_after_forward is not None:
            self._say("sharding.reshard_after_forward", f"left out: {row.name} says it")

    def _wrap(self) -> dict[str, Any]:
        sharding = self.config.sharding
        keys: dict[str, Any] = {"fsdp_auto_wrap_policy": _WRAPS[sharding.wrap]}
        if sharding.wrap == "class":
            keys["fsdp_transformer_layer_cls_to_wrap"] = ",".join(sharding.wrap_classes)
        return keys

    def _precision(self) -> str:
        mode = self.config.precision.mode
        if mode == "fp32":
            self._say("precision.mode", "fp32 is written as no: Accelerate leaves the model's own dtypes")
            return "no"
        return mode

    def _several_hosts(self, document: dict[str, Any]) -> None:
        launch = self.config.launch
        if launch.num_machines == 1:
            return
        if launch.machine_rank is None:
            self._say("launch.machine_rank", "accelerate launch takes 0 on every host: pass --machine_rank there")
        if launch.rdzv_backend is None:
            backend = "c10d" if launch.machine_rank is None else "static"
            document["rdzv_backend"] = backend
            self._say("launch.rdzv_backend", f"written as {backend}, which it comes to")

    def _prefetch(self, fsdp: dict[str, Any]) -> None:
        """Write prefetching for version 1; Accelerate's version 2 decides it itself, and warns of these keys."""
        if fsdp["fsdp_version"] == 1:
            fsdp.update(self._named(_VERSION_1_FSDP))
            fsdp["fsdp_use_orig_params"] = True  # fullshard always keeps them
            return
        for path in _VERSION_1_FSDP:
            if self._changed(path):
                fsdp[_KEYS[path]] = self.config.value(path)
                self._say(path, "fullshard reads it from the file, version 2 of Accelerate's FSDP ignores it")

    def _activations(self, fsdp: dict[str, Any]) -> None:
        sharding = self.config.sharding
        if not sharding.offload_activations:
            return
        if fsdp["fsdp_version"] == 2 and sharding.activation_checkpointing:
            fsdp[_KEYS["sharding.offload_activations"]] = True
        else:
            reason = "version 2 of Accelerate's FSDP moves the inputs of checkpointed units, and nothing else"
            self._say("sharding.offload_activations", f"left out: {reason}")

    def _compile(self, document: dict[str, Any]) -> None:
        sharding = self.config.sharding
        backend = sharding.compile_backend
        if sharding.compile and backend.lower() in _DYNAMO_BACKENDS:
            document["dynamo_config"] = {
                "dynamo_backend": backend.upper(),
                **self._named(_COMPILE),
                "dynamo_use_regional_compilation": True,  # unit by unit, as here
            }
            if backend != backend.lower():
                self._say("sharding.compile_backend", f"written as {backend.upper()}")
            return
        if sharding.compile:
            self._say("sharding.compile", f"left out: Accelerate does not know the backend {backend}")
        for path in ("sharding.compile_backend", *_COMPILE):
            if self._changed(path):
                self._say(path, "left out: nothing is compiled")

    def _leave_out(self) -> None:
        for path, setting in SETTINGS.items():
            unknown = "" if path in _KEYS or path in _SAID_OTHERWISE else "Accelerate has no such setting"
            reason, value = About.of(setting).accelerate or unknown, shown(self.config.value(path))
            if reason and self._changed(path):
                flag, left_out = f"not in Accelerate's file: pass {reason} {value}", f"{value} is left out: {reason}"
                self._say(path, flag if reason.startswith("--") else left_out)

    def _named(self, paths: tuple[str, ...]) -> dict[str, Any]:
        return {_KEYS[path]: value for path in paths if (value := self.config.value(path)) is not None}

    def _changed(self, path: str) -> bool:
        return bool(self.config.value(path) != SETTINGS[path].default)

    def _say(self, path: str, text: str) -> None:
        self.remarks.append(Remark(path, text))
