"""Plain PyTorch beside Plimsoll: the same models, left alone, recomputed and offloaded by PyTorch's own means.

The argument is JSON: the device and the models. Prints one line of JSON for each model and way.
"""

import contextlib
import gc
import json
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WARM_UP, MEASURED = 3, 5
# Characters of the text that the Rust loops learn, where a model has no larger vocabulary.
ALPHABET = 64


class Block(nn.Module):
    """Pre-norm causal attention and a two-layer perceptron, each with a residual around it."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden):
        batch, sequence, width = hidden.shape
        parts = self.query_key_value(self.attention_norm(hidden))
        query, key, value = parts.view(batch, sequence, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=True)
        attended = self.out(attended.transpose(1, 2).reshape(batch, sequence, width))
        hidden = hidden + functional.dropout(attended, self.dropout)
        return hidden + functional.dropout(self.contract(functional.gelu(self.expand(self.perceptron_norm(hidden)))), self.dropout)


class Gpt(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, self.dropout = config["width"], config["dropout"]
        self.symbols = config.get("vocabulary") or ALPHABET
        self.tokens = nn.Parameter(0.02 * torch.randn(self.symbols, width))
        self.positions = nn.Parameter(0.02 * torch.randn(config["sequence"], width))
        self.blocks = nn.ModuleList(Block(width, config["heads"], self.dropout) for _ in range(config["layers"]))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, self.symbols)

    def batch(self, config, device):
        shape = (config["batch"], config["sequence"])
        return torch.randint(ALPHABET, shape, device=device), torch.randint(ALPHABET, shape, device=device).flatten()

    def forward(self, tokens, recompute):
        hidden = functional.dropout(functional.embedding(tokens, self.tokens) + self.positions, self.dropout)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if recompute else block(hidden)
        return self.head(self.norm(hidden)).view(-1, self.symbols)


class Resnet(nn.Module):
    def __init__(self, config):
        super().__init__()
        import torchvision.models

        self.net = getattr(torchvision.models, config["arch"])(num_classes=config["classes"])

    def batch(self, config, device):
        size = config["image_size"]
        pictures = torch.randn(config["batch"], 3, size, size, device=device)
        return pictures, torch.randint(config["classes"], (config["batch"],), device=device)

    def forward(self, pictures, recompute):
        net = self.net
        hidden = net.maxpool(net.relu(net.bn1(net.conv1(pictures))))
        for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
            for block in stage:
                hidden = checkpoint(block, hidden, use_reentrant=False) if recompute else block(hidden)
        return net.fc(torch.flatten(net.avgpool(hidden), 1))


def measure(described, way, device):
    config = described["config"]
    torch.manual_seed(1)
    with torch.device(device):
        model = (Gpt if described["family"] == "gpt" else Resnet)(config)
    # One parameter after another, as the optimizers of libtorch's C++ half do.
    if described["family"] == "gpt":
        optimizer = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"], foreach=False)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=config["learning_rate"], momentum=config["momentum"], foreach=False)
    inputs, targets = model.batch(config, device)
    on_cuda = device.startswith("cuda")
    times = []
    for iteration in range(WARM_UP + MEASURED):
        if on_cuda and iteration == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        optimizer.zero_grad()
        mixed = torch.autocast(device.split(":")[0], torch.bfloat16, enabled=described["bf16"])
        offload = torch.autograd.graph.save_on_cpu(pin_memory=on_cuda) if way == "save_on_cpu" else contextlib.nullcontext()
        with mixed, offload:
            loss = functional.cross_entropy(model(inputs, way == "checkpoint"), targets)
        loss.backward()
        optimizer.step()
        loss.item()
        times.append(time.perf_counter() - started)
    found = {"makespan_ns": int(1e9 * statistics.median(times[WARM_UP:])), "iterations": MEASURED}
    if on_cuda:
        found["allocated_peak_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_peak_bytes"] = torch.cuda.max_memory_reserved()
    return found


def main():
    asked = json.loads(sys.argv[1])
    device = asked["device"]
    # Offloading takes page-locked memory for every tensor, which is slow to get: last.
    for way in ("plain", "checkpoint", "save_on_cpu"):
        for described in asked["models"]:
            found = {"model": described["name"], "way": way, "torch": torch.__version__}
            try:
                if described["family"] == "resnet" and described["config"]["arch"] == "cifar":
                    raise RuntimeError("torchvision has no such net")
                found.update(measure(described, way, device))
            except Exception as error:
                found["failure"] = (str(error).splitlines() or [repr(error)])[0]
            print(json.dumps(found), flush=True)
            if device.startswith("cuda"):
                gc.collect()
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
