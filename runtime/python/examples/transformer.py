"""A complete program with Plimsoll: a transformer learns to reverse sequences within a budget, and what it runs may be saved for
a policy to learn on.

    python3 transformer.py 200MiB --traces traces/
    python3 transformer.py 200MiB --policy transformer.policy
"""

import argparse

import torch

import plimsoll

SYMBOLS = 8000


class Reverser(torch.nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.symbols = torch.nn.Embedding(SYMBOLS, width)
        heads = width // 64
        self.transformer = torch.nn.Transformer(width, heads, layers, layers, 4 * width, batch_first=True)
        self.head = torch.nn.Linear(width, SYMBOLS)

    def forward(self, source, target):
        ahead = self.transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        seen = self.transformer(self.symbols(source), self.symbols(target), tgt_mask=ahead, tgt_is_causal=True)
        return self.head(seen)


def train_step(model, optimizer, source, target):
    with torch.autocast("cuda", torch.bfloat16, enabled=source.is_cuda):
        logits = model(source, target[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), target[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("budget", help="such as 200MiB")
    parser.add_argument("--policy", help="a policy file, or the name of a baseline")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--traces", help="a folder to save traces in")
    asked = parser.parse_args()

    runtime = plimsoll.Runtime(asked.budget, asked.policy, device=asked.device)
    torch.manual_seed(0)
    model = Reverser(asked.width, asked.layers).to(asked.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(asked.iterations):
        source = torch.randint(SYMBOLS, (asked.batch, asked.sequence))
        with runtime.iteration():
            loss = train_step(model, optimizer, source.to(asked.device), source.flip(1).to(asked.device))
    print(f"loss {loss:.3f}\n{runtime}")
    if asked.traces:
        print(*runtime.save_traces(asked.traces, "transformer"), sep="\n")


if __name__ == "__main__":
    main()
