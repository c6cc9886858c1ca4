"""An Accelerate script: user_accelerate.py LIBRARY MIXED_PRECISION DIRECTORY LOSS_SCALE. Only the import is another."""

import importlib
import json
import sys

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from tests.accelerator_script import Pairs


def main() -> None:
    library, mode, directory, scale = sys.argv[1:]
    module = importlib.import_module(library)
    options = {"mixed_precision": mode}
    if library == "fullshard":
        options["fsdp_plugin"] = module.FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["BertLayer"])
        options["kwargs_handlers"] = [module.GradScalerKwargs(init_scale=float(scale))]
    accelerator = module.Accelerator(**options)
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=60,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=16,
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Pairs(256, seed=1), batch_size=16))
    batches = list(loader)
    norms: list[float] = []
    skipped: list[bool] = []

    def trained(some: list[dict[str, torch.Tensor]]) -> list[float]:
        losses = []
        for batch in some:
            loss = model(**batch).loss
            accelerator.backward(loss)
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            skipped.append(bool(accelerator.optimizer_step_was_skipped))
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    losses = trained(batches[:12])
    accelerator.save_state(directory)
    expected = trained(batches[12:])
    accelerator.load_state(directory)
    again = trained(batches[12:])
    scaled = None if accelerator.scaler is None else accelerator.scaler.get_scale()
    found = {"losses": losses + expected, "again": again, "norms": norms, "scale": scaled, "skipped": sum(skipped)}
    sys.stdout.write(json.dumps(found | {"device": str(accelerator.device)}) + "\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
