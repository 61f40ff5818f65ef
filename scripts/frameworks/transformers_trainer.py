"""The Trainer of transformers inside a replica: `mpirun -n 2 python scripts/frameworks/transformers_trainer.py`."""

from typing import Any

import torch
from accelerate import PartialState
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import mpistrat as ms

GLOBAL_BATCH, EPOCHS, WORDS, LENGTH = 24, 2, 50, 16


def main() -> None:
    strategy = ms.MultiWorkerMirroredStrategy().enter_replica()
    arguments = TrainingArguments(
        per_device_train_batch_size=GLOBAL_BATCH,
        num_train_epochs=EPOCHS,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_grad_norm=1.0,
        logging_steps=5,
        save_strategy="no",  # or "epoch" if strategy.is_first else "no"
        report_to="none",
        disable_tqdm=True,
    )
    # The first rank alone prints, logs and saves.
    process = PartialState()
    process.process_index = process.local_process_index = strategy.rank
    set_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,  # what is dropped depends on the rank
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    texts = (torch.randint(WORDS, (250, 1)) + 3 * torch.arange(LENGTH)) % WORDS
    dataset: Any = [{"input_ids": text, "labels": text} for text in texts]
    trainer = Trainer(model, arguments, train_dataset=dataset, eval_dataset=dataset[:50])
    loader = DataLoader(dataset, GLOBAL_BATCH, shuffle=True, collate_fn=trainer.data_collator)
    model, loader = strategy.prepare(model, loader)
    trainer.get_train_dataloader = lambda: loader
    trainer.train()
    evaluation = trainer.evaluate()  # each rank reads all of eval_dataset
    strategy.print(f"loss {evaluation['eval_loss']:.8f}")
    strategy.print(f"parameters {sum(p.abs().sum().item() for p in model.parameters()):.8f}")


if __name__ == "__main__":
    main()
