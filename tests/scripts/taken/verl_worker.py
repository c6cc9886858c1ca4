"""verl's FSDP2 worker, call by call: `verl_worker.py MODEL PLACE all|lora|merged`. Saves what each call gives.

`calls.json` in PLACE has an empty text, or the error, for each call.
"""

from __future__ import annotations

import asyncio
import functools
import json
import runpy
import sys
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl
import verl.trainer.config
from tensordict import NonTensorData
from verl.checkpoint_engine.delta_sync.sparse_gather import gather_slot_entries_to_rank0
from verl.utils import tensordict_utils
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.fsdp_utils import collect_merged_lora_params, get_fsdp_full_state_dict
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import sft_loss

# The package around this file needs vLLM, and the file does not.
TRANSFER = runpy.run_path(f"{verl.__path__[0]}/workers/rollout/vllm_rollout/bucketed_weight_transfer.py")
place, output, kind = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
Weights = Iterable[tuple[str, torch.Tensor]]
CALLS: dict[str, str] = {}


def engine_of(save: list[str]) -> Any:
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} if kind != "all" else {}
    model = HFModelConfig(
        path=place,
        load_tokenizer=False,
        use_remove_padding=False,
        override_config={"attn_implementation": "sdpa"},
        lora={"merge": kind == "merged"},
        **lora,
    )
    exact = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    words = {"strategy": "fsdp2", "use_torch_compile": False, "mixed_precision": exact}
    offload = {"param_offload": True, "optimizer_offload": True}
    steady = {"override_optimizer_config": {"eps": 1e-3}}  # otherwise Adam magnifies what is rounded
    optimizer = FSDPOptimizerConfig(lr=1e-2, total_training_steps=8, clip_grad=1.0, **steady)
    contents = verl.trainer.config.CheckpointConfig(save_contents=save, load_contents=save)
    engine = FSDPEngineWithLMHead(model, FSDPEngineConfig(**words, **offload), optimizer, contents)
    engine.initialize()
    torch.manual_seed(0)
    for name, parameter in engine.module.named_parameters():  # each engine would draw others
        if "lora_" in name:
            torch.nn.init.constant_(parameter, 0.01 if "lora_A" in name else 0.02)
    return engine


def batch(step: int) -> Any:
    random = torch.Generator().manual_seed(7 * step + dist.get_rank())
    lengths = (5, 9, 7, 6)
    tokens = [torch.randint(3, 64, (length,), generator=random) for length in lengths]
    nested = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    tensors = {"input_ids": nested(tokens), "position_ids": nested([torch.arange(length) for length in lengths])}
    tensors["loss_mask"] = nested([torch.ones(length) for length in lengths])
    settings = {"use_remove_padding": False, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
    settings |= {"temperature": 1.0, "global_batch_size": 8, "pad_token_id": 0}
    data = tensordict_utils.get_tensordict(tensors, settings | {"pad_mode": DatasetPadMode.NO_PADDING})
    tensordict_utils.assign_non_tensor(data, global_token_num=NonTensorData(list(lengths)))
    return data


def train(engine: Any, step: int) -> dict[str, Any]:
    engine.to("cpu")
    data = batch(step)
    with engine.train_mode():
        done = engine.train_batch(data, functools.partial(sft_loss, None))
        engine.lr_scheduler_step()
    norm = done["metrics"]["grad_norm"]
    with engine.eval_mode():
        asked = batch(step)
        found = engine.infer_batch(asked, functools.partial(sft_loss, None))["model_output"]["log_probs"]
    return {"losses": [torch.tensor(each) for each in done["loss"]], "norm": torch.tensor(norm), "log": found.values()}


def whole(pair: tuple[Weights, Any]) -> dict[str, torch.Tensor]:
    """The tensors of an export, gathered if they are in parts."""
    full = ((name, getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)()) for name, tensor in pair[0])
    return {name: tensor.detach().clone() for name, tensor in full}


def over_the_wire(weights: Weights) -> dict[str, torch.Tensor]:
    """Send weights through verl's buckets in shared memory, as its worker does to vLLM."""
    handle, found = f"ipc:///tmp/verl-{uuid.uuid4()}.sock", {}
    sender = TRANSFER["BucketedWeightSender"](handle, bucket_size_mb=1, use_shm=True)
    receiver = TRANSFER["BucketedWeightReceiver"](handle, device=torch.device("cpu"), use_shm=True)

    def take(bucket: list[tuple[str, torch.Tensor]], *_: Any, **__: Any) -> None:
        found.update({name: tensor.clone() for name, tensor in bucket})

    async def both() -> None:
        receiving = asyncio.to_thread(receiver.receive_weights, take)
        await asyncio.gather(receiving, sender.async_send_weights(weights))

    asyncio.run(both())
    return found


def deltas(engine: Any, before: dict[str, torch.Tensor]) -> None:
    """Apply verl's changed elements to the last weights, as rank 0 sends them to an engine, and check the result."""
    made = {name: tensor.to(torch.bfloat16) for name, tensor in before.items()}
    for slots, _, counts, indices, values, group in engine.get_per_tensor_param_delta_shard()[0]:
        pairs = [(indices, values)] if group is None else gather_slot_entries_to_rank0(indices, values, counts, group)
        for (name, _), (index, value) in zip(slots, pairs or [], strict=False):
            made[name].view(-1)[index.long()] = value
    after = whole((engine.module.state_dict().items(), None))
    wrong = sum(int((made[name] != tensor.to(torch.bfloat16)).sum()) for name, tensor in after.items())
    assert dist.get_rank() or not wrong, f"{wrong} elements are wrong"


def attempt(name: str, call: Callable[[], Any]) -> Any:
    """Call, and save the tensors that rank 0 gets. Write down an error."""
    try:
        found = call()
        CALLS[name] = ""
    except Exception as error:
        found, CALLS[name] = None, f"{type(error).__name__}: {error}"
    if dist.get_rank() == 0 and isinstance(found, dict):
        torch.save(found, output / f"{name}.pt")
    dist.barrier()
    return found


def reload(save: list[str]) -> None:
    """Save a checkpoint with verl's manager, load it into another engine, and train both further."""
    where = output.parent / "parts"
    first = engine_of(save)
    train(first, 1)
    first.save_checkpoint(str(where), global_step=1)
    second = engine_of(save)
    second.load_checkpoint(str(where), del_local_after_load=False)
    one, other = train(first, 2), train(second, 2)
    assert torch.equal(one["log"], other["log"])


dist.init_process_group("gloo")
engine = engine_of(["hf_model", "extra"])
attempt("train-1", lambda: train(engine, 1))
attempt("get_fsdp_full_state_dict", lambda: get_fsdp_full_state_dict(engine.module))
attempt("save_checkpoint hf_model,extra", lambda: engine.save_checkpoint(str(output / "checkpoint")))
if kind == "lora":
    for summon in (False, True):
        words = {"layered_summon": summon, "base_sync_done": True}
        attempt(f"adapters-{summon}", lambda words=words: whole(engine.get_per_tensor_param(**words)))
    attempt("base", lambda: whole(engine.get_per_tensor_param(base_sync_done=False)))
    attempt("collect_merged_lora_params", lambda: collect_merged_lora_params(engine.module))
else:
    attempt("get_per_tensor_param", lambda: whole(engine.get_per_tensor_param()))
attempt("BucketedWeightSender", lambda: over_the_wire(engine.get_per_tensor_param()[0]))
if kind == "all":
    before = whole((engine.module.state_dict().items(), None))
    attempt("prime_delta_snapshots", engine.prime_delta_snapshots)
attempt("train-2", lambda: train(engine, 2))
if kind == "all":
    attempt("get_per_tensor_param_delta_shard", lambda: deltas(engine, before))
attempt("save_checkpoint model,optimizer,extra", lambda: reload(["model", "optimizer", "extra"]))
if dist.get_rank() == 0:
    (output / "calls.json").write_text(json.dumps(CALLS, indent=1))
dist.destroy_process_group()
