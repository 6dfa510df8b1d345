"""A PyTorch job, untouched or under Plimsoll: prints its losses and parameters, and what Plimsoll reports, as JSON."""

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import signal
import sys
import threading
import time

import torch
from torch import nn

BATCH, SEQUENCE, WIDTH, SYMBOLS = 8, 64, 64, 50


class Clamp(torch.autograd.Function):
    """A function with a backward pass of its own: gradient recording is off in it."""

    @staticmethod
    def forward(context, values):
        context.save_for_backward(values)
        return values.clamp(-1, 1)

    @staticmethod
    def backward(context, gradient):
        (values,) = context.saved_tensors
        return gradient * (values.abs() <= 1)


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
        for layer in self.layers.layers:
            hidden = hidden + Clamp.apply(layer(hidden))
        return self.head(hidden)


def train_step(model, optimizer, device, before_backward):
    symbols = torch.randint(SYMBOLS, (BATCH, SEQUENCE + 1)).to(device)
    optimizer.zero_grad()
    logits = model(symbols[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), symbols[:, 1:].flatten())
    before_backward()
    loss.backward()
    optimizer.step()
    return loss.item().hex()


def fork(runtime, device):
    """Forks a loader's worker; and on the CPU a process with a budget of its own, which leaves through its parent's frames."""
    batches = torch.utils.data.DataLoader(range(8), batch_size=4, num_workers=1, timeout=100)
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    if not runtime or device != "cpu":
        return
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert status == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}"
        return
    signal.alarm(100)
    # PyTorch waits for threads that the child does not have.
    os.environ["TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT"] = "0"
    larger = torch.ones(runtime.budget).sum()
    try:
        with runtime.iteration():
            sys.exit("the parent's runtime works in the child")
    except RuntimeError as error:
        assert "this process was forked" in str(error), error
    own = type(runtime)("1GiB")
    with own.iteration():
        larger.exp_().neg()
    assert own.report()["iterations"] == 1, own.report()
    sys.exit()


class Beside(threading.Thread):
    """Another thread, and how many turns it has while iterations end. It has one only where others let go by themselves."""

    def __init__(self):
        super().__init__(daemon=True)
        sys.setswitchinterval(1000)
        self.turns, self.at_ends = 0, []

    def run(self):
        while True:
            self.turns += 1
            time.sleep(0)

    @contextlib.contextmanager
    def watch(self, guard):
        guard.__enter__()
        yield
        before = self.turns
        guard.__exit__(None, None, None)
        self.at_ends.append(self.turns - before)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget")
    parser.add_argument("--policy", type=pathlib.Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--detect", action="store_true")
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--forks", action="store_true")
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
    before_backward = (lambda: fork(runtime, asked.device)) if asked.forks else lambda: None
    beside = None
    if asked.beside:
        beside = Beside()
        beside.start()
    with runtime.detect() if asked.detect else contextlib.nullcontext():
        for _ in range(asked.iterations):
            guard = runtime.iteration() if runtime and not asked.detect else contextlib.nullcontext()
            with beside.watch(guard) if beside else guard:
                losses.append(train_step(model, optimizer, asked.device, before_backward))
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(bytes(tensor.cpu().contiguous().view(-1).view(torch.uint8).tolist()))
    report = runtime.report() if runtime else None
    found = {"losses": losses, "parameters": digest.hexdigest(), "report": report, "text": str(runtime)}
    if beside:
        found["turns_at_ends"] = beside.at_ends
    print(json.dumps(found))


if __name__ == "__main__":
    main()
