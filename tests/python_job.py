"""A PyTorch job, untouched or under Plimsoll: prints its losses and parameters, and what Plimsoll reports, as JSON."""

import argparse
import contextlib
import hashlib
import json
import pathlib

import torch
from torch import nn

BATCH, SEQUENCE, WIDTH, SYMBOLS = 8, 64, 64, 50


class Model(nn.Module):
    """Convolutions and batch-norm before a transformer with dropout."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(SYMBOLS, WIDTH)
        self.smooth = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, symbols):
        hidden = self.tokens(symbols)
        hidden = hidden + self.smooth(hidden.transpose(1, 2)).transpose(1, 2)
        return self.head(self.layers(hidden))


def train_step(model, optimizer, device):
    symbols = torch.randint(SYMBOLS, (BATCH, SEQUENCE + 1)).to(device)
    optimizer.zero_grad()
    logits = model(symbols[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), symbols[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss.item().hex()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget")
    parser.add_argument("--policy", type=pathlib.Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--detect", action="store_true")
    asked = parser.parse_args()

    runtime = None
    if asked.budget:
        import plimsoll

        runtime = plimsoll.Runtime(asked.budget, asked.policy, device=asked.device)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = Model().to(asked.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with runtime.detect() if asked.detect else contextlib.nullcontext():
        for _ in range(asked.iterations):
            with runtime.iteration() if runtime and not asked.detect else contextlib.nullcontext():
                losses.append(train_step(model, optimizer, asked.device))
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(bytes(tensor.cpu().contiguous().view(-1).view(torch.uint8).tolist()))
    report = runtime.report() if runtime else None
    print(json.dumps({"losses": losses, "parameters": digest.hexdigest(), "report": report, "text": str(runtime)}))


if __name__ == "__main__":
    main()
