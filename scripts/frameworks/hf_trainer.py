"""The Trainer of transformers inside a replica: `mpirun -n 2 python scripts/frameworks/hf_trainer.py`."""

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import mpistrat as ms

GLOBAL_BATCH, STEPS, WORDS, LENGTH = 24, 10, 50, 16


def main() -> None:
    strategy = ms.MultiWorkerMirroredStrategy().enter_replica()
    arguments = TrainingArguments(
        per_device_train_batch_size=GLOBAL_BATCH,
        max_steps=STEPS,
        learning_rate=1e-2,
        max_grad_norm=1.0,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
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
    texts = (torch.randint(WORDS, (240, 1)) + 3 * torch.arange(LENGTH)) % WORDS
    dataset = [{"input_ids": text, "labels": text} for text in texts]
    trainer = Trainer(model, arguments, train_dataset=dataset)
    loader = DataLoader(dataset, GLOBAL_BATCH, shuffle=True, collate_fn=trainer.data_collator)
    model, loader = strategy.prepare(model, loader)
    trainer.get_train_dataloader = lambda: loader
    result = trainer.train()
    loss = strategy.reduce(ms.ReduceOp.MEAN, torch.tensor(result.training_loss), axis=None)
    strategy.print(f"loss {loss:.8f}")
    strategy.print(f"parameters {sum(p.abs().sum().item() for p in model.parameters()):.8f}")


if __name__ == "__main__":
    main()
