"""A recurrent network that predicts the next word of made-up sentences: a program for one process."""

import argparse
import math
import random
import time

import torch
import torch.nn as nn

parser = argparse.ArgumentParser(description="A recurrent language model")
parser.add_argument("--model", default="LSTM", help="LSTM, GRU, RNN_TANH or RNN_RELU")
parser.add_argument("--words", type=int, default=25, help="size of the vocabulary, at least")
parser.add_argument("--emsize", type=int, default=32, help="size of word embeddings")
parser.add_argument("--nhid", type=int, default=32, help="hidden units per layer")
parser.add_argument("--nlayers", type=int, default=2)
parser.add_argument("--lr", type=float, default=10, help="initial learning rate")
parser.add_argument("--clip", type=float, default=0.25, help="gradient clipping")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch_size", type=int, default=20)
parser.add_argument("--bptt", type=int, default=15, help="sequence length")
parser.add_argument("--dropout", type=float, default=0.2)
parser.add_argument("--tied", action="store_true", help="tie the embedding and softmax weights")
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--log-interval", type=int, default=10, help="in batches")
parser.add_argument("--save", default="model.pt", help="where to save the best model")
args = parser.parse_args()

torch.manual_seed(args.seed)
device = torch.device("cpu")

# Load data


class Corpus:
    """Sentences of a subject, a verb and an object, as numbers of words."""

    def __init__(self):
        parts = [[f"{part}{i}" for i in range(8)] for part in ("who", "does", "what")]
        self.dictionary = [word for part in parts for word in part] + ["<eos>"]
        self.dictionary += [f"unused{i}" for i in range(args.words - len(self.dictionary))]
        self.train = self.tokenize(parts, sentences=1500)
        self.valid = self.tokenize(parts, sentences=150)
        self.test = self.tokenize(parts, sentences=140)

    def tokenize(self, parts, sentences):
        source = random.Random(sentences)
        words = []
        for _ in range(sentences):
            kind = source.randrange(4)  # words of one kind go together
            words += [part[2 * kind + source.randrange(2)] for part in parts] + ["<eos>"]
        return torch.tensor([self.dictionary.index(word) for word in words])


def batchify(data, bsz):
    """The text in `bsz` columns, each of which goes on from batch to batch."""
    nbatch = data.size(0) // bsz
    data = data.narrow(0, 0, nbatch * bsz)
    data = data.view(bsz, -1).t().contiguous()
    return data.to(device)


corpus = Corpus()
eval_batch_size = 10
train_data = batchify(corpus.train, args.batch_size)
val_data = batchify(corpus.valid, eval_batch_size)
test_data = batchify(corpus.test, eval_batch_size)

# Build the model


class RNNModel(nn.Module):
    def __init__(self, rnn_type, ntoken, ninp, nhid, nlayers, dropout, tie_weights):
        super().__init__()
        self.ntoken, self.rnn_type, self.nlayers, self.nhid = ntoken, rnn_type, nlayers, nhid
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        if rnn_type in ("LSTM", "GRU"):
            self.rnn = getattr(nn, rnn_type)(ninp, nhid, nlayers, dropout=dropout)
        else:
            nonlinearity = {"RNN_TANH": "tanh", "RNN_RELU": "relu"}[rnn_type]
            self.rnn = nn.RNN(ninp, nhid, nlayers, nonlinearity=nonlinearity, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        if tie_weights:
            self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.ntoken)
        return nn.functional.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        zeros = weight.new_zeros(self.nlayers, bsz, self.nhid)
        return (zeros, zeros.clone()) if self.rnn_type == "LSTM" else zeros


ntokens = len(corpus.dictionary)
model = RNNModel(
    args.model, ntokens, args.emsize, args.nhid, args.nlayers, args.dropout, args.tied
).to(device)
criterion = nn.NLLLoss()

# Training code


def repackage_hidden(h):
    """The hidden states, detached from their history."""
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(args.bptt, len(source) - 1 - i)
    data = source[i : i + seq_len]
    target = source[i + 1 : i + 1 + seq_len].view(-1)
    return data, target


def evaluate(data_source):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(eval_batch_size)
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, args.bptt):
            data, targets = get_batch(data_source, i)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(data_source) - 1)


def train():
    model.train()
    total_loss = 0.0
    start_time = time.time()
    hidden = model.init_hidden(args.batch_size)
    for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()

        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)

        total_loss += loss.item()
        if batch % args.log_interval == 0 and batch > 0:
            cur_loss = total_loss / args.log_interval
            ms_per_batch = (time.time() - start_time) * 1000 / args.log_interval
            print(
                f"| epoch {epoch:3d} | {batch:5d}/{len(train_data) // args.bptt:5d} batches "
                f"| lr {lr:02.2f} | ms/batch {ms_per_batch:5.2f} "
                f"| loss {cur_loss:5.2f} | ppl {math.exp(cur_loss):8.2f}"
            )
            total_loss = 0.0
            start_time = time.time()


lr = args.lr
best_val_loss = None

try:
    for epoch in range(1, args.epochs + 1):
        epoch_start_time = time.time()
        train()
        val_loss = evaluate(val_data)
        print(
            f"| end of epoch {epoch:3d} | time: {time.time() - epoch_start_time:5.2f}s "
            f"| valid loss {val_loss:5.4f} | valid ppl {math.exp(val_loss):8.4f}"
        )
        if not best_val_loss or val_loss < best_val_loss:
            with open(args.save, "wb") as f:
                torch.save(model, f)
            best_val_loss = val_loss
        else:
            # Anneal the learning rate if the validation loss has not improved.
            lr /= 4.0
except KeyboardInterrupt:
    print("Exiting from training early")

with open(args.save, "rb") as f:
    model = torch.load(f, weights_only=False)

test_loss = evaluate(test_data)
print(f"| end of training | test loss {test_loss:5.4f} | test ppl {math.exp(test_loss):8.4f}")
