"""The PyTorch program of docs/from_pytorch.md. Its losses are constants of crates/phalanx/tests/it/from_pytorch.rs."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, WIDTH, BATCH, SEQ = 32, 32, 4, 8


class Trigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.present = nn.Embedding(VOCAB, WIDTH)
        self.past = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.head = nn.Linear(4 * WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        past = F.pad(self.past(ids)[:, :-1], (0, 0, 1, 0))  # the first token of a row has none before it
        h = self.up(self.norm(self.present(ids) + past))
        return self.head(F.gelu(h, approximate="tanh"))


def number(i):
    """A weight: the same numbers in both programs."""
    return ((37 * i + 11) % 101 - 50) / 128


torch.set_default_dtype(torch.float64)
model = Trigram()
with torch.no_grad():
    for name, weight in model.named_parameters():
        if name == "norm.weight":
            continue  # ones
        # `x @ w` there has the shape [in, out], nn.Linear's weight [out, in].
        shape = weight.shape[::-1] if name in ("up.weight", "head.weight") else weight.shape
        values = torch.tensor([number(i) for i in range(weight.numel())]).reshape(shape)
        weight.copy_(values if shape == weight.shape else values.T)
ids = torch.tensor([(13 * i + 5) % VOCAB for i in range(BATCH * SEQ)]).reshape(BATCH, SEQ)
targets = torch.tensor([(i * i + 3) % VOCAB if i % 5 else -100 for i in range(BATCH * SEQ)])

matrices = [w for w in model.parameters() if w.dim() > 1]
vectors = [w for w in model.parameters() if w.dim() == 1]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
for step in range(5):
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    print(f"{loss.item():.15f}")
