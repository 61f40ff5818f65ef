"""A GPT-2 of Hugging Face's, made from a config, in a loop of PyTorch's: a program for one process."""

import argparse

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

parser = argparse.ArgumentParser(description="A causal language model")
parser.add_argument("--examples", type=int, default=512, help="made-up texts")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--vocab-size", type=int, default=8192)
parser.add_argument("--n-positions", type=int, default=128)
parser.add_argument("--n-embd", type=int, default=256)
parser.add_argument("--n-layer", type=int, default=4)
parser.add_argument("--n-head", type=int, default=4)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()

torch.manual_seed(args.seed)


class Text(Dataset):
    """Each token follows from the one before."""

    def __init__(self, examples):
        starts = torch.randint(args.vocab_size, (examples, 1))
        self.tokens = (starts + 7 * torch.arange(args.n_positions)) % args.vocab_size

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


train_dataloader = DataLoader(Text(args.examples), shuffle=True, batch_size=args.batch_size)
eval_dataloader = DataLoader(Text(args.examples // 8), batch_size=args.batch_size)
config = GPT2Config(
    vocab_size=args.vocab_size,
    n_positions=args.n_positions,
    n_embd=args.n_embd,
    n_layer=args.n_layer,
    n_head=args.n_head,
    resid_pdrop=args.dropout,
    embd_pdrop=args.dropout,
    attn_pdrop=args.dropout,
    bos_token_id=None,
    eos_token_id=None,
)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
steps = args.epochs * len(train_dataloader)
lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=steps)

for epoch in range(args.epochs):
    model.train()
    for batch in train_dataloader:
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()

    model.eval()
    losses = 0.0
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**batch)
        losses += outputs.loss.item() * len(batch["input_ids"])
    print(f"epoch {epoch}: loss {losses / len(eval_dataloader.dataset):.6f}")

torch.save(model.state_dict(), "gpt2.pt")
