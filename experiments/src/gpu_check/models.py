"""The models that are checked, in plain PyTorch: as the Rust loops have them."""

import contextlib

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# Characters of the text that the Rust loops learn, where a model has no larger vocabulary.
ALPHABET = 64
# Blocks of each stage, by net.
BLOCKS = {"resnet50": (3, 4, 6, 3), "resnet152": (3, 8, 36, 3)}


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


def convolution(inputs, outputs, side, stride=1):
    return nn.Conv2d(inputs, outputs, side, stride, padding=side // 2, bias=False)


def batch_norm(width):
    norm = nn.BatchNorm2d(width)
    norm.num_batches_tracked = None  # which the Rust loop does not count
    return norm


class Bottleneck(nn.Module):
    """Three convolutions, the second over the stride, and a residual around them; in place of nothing, as in the Rust loop."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1, self.bn1 = convolution(inputs, width, 1), batch_norm(width)
        self.conv2, self.bn2 = convolution(width, width, 3, stride), batch_norm(width)
        self.conv3, self.bn3 = convolution(width, 4 * width, 1), batch_norm(4 * width)
        as_it_is = stride == 1 and inputs == 4 * width
        shrunk = [] if as_it_is else [convolution(inputs, 4 * width, 1, stride), batch_norm(4 * width)]
        self.around = nn.Sequential(*shrunk)

    def forward(self, hidden):
        inside = functional.relu(self.bn1(self.conv1(hidden)))
        inside = functional.relu(self.bn2(self.conv2(inside)))
        return functional.relu(self.around(hidden) + self.bn3(self.conv3(inside)))


class Resnet(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.conv1, self.bn1 = convolution(3, 64, 7, 2), batch_norm(64)
        blocks, inputs = [], 64
        for stage, count in enumerate(BLOCKS[config["arch"]]):
            for block in range(count):
                width = 64 << stage
                blocks.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
                inputs = 4 * width
        self.blocks = nn.ModuleList(blocks)
        self.fc = nn.Linear(inputs, config["classes"])

    def batch(self, config, device):
        size = config["image_size"]
        pictures = torch.randn(config["batch"], 3, size, size, device=device)
        return pictures, torch.randint(config["classes"], (config["batch"],), device=device)

    def forward(self, pictures, recompute):
        hidden = functional.max_pool2d(functional.relu(self.bn1(self.conv1(pictures))), 3, 2, padding=1)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if recompute else block(hidden)
        return self.fc(torch.flatten(functional.adaptive_avg_pool2d(hidden, 1), 1))


class Loop:
    """A model that learns one batch, again and again. `asked` describes it and names its device."""

    def __init__(self, asked):
        config, self.device, self.bf16 = asked["config"], asked["device"], asked["bf16"]
        is_gpt = asked["family"] == "gpt"
        if not is_gpt and config.get("arch") not in BLOCKS:
            raise ValueError("there is no such net here")
        torch.manual_seed(1)
        with torch.device(self.device):
            self.model = (Gpt if is_gpt else Resnet)(config)
        # All parameters in one operator (fused), or in several (foreach); or one after another, as libtorch's C++ half does.
        how = {asked["optimizer"]: True} if asked.get("optimizer") else {"foreach": False}
        if is_gpt:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config["learning_rate"], **how)
        else:
            learning_rate, momentum = config["learning_rate"], config["momentum"]
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=learning_rate, momentum=momentum, **how)
        self.inputs, self.targets = self.model.batch(config, self.device)
        if asked.get("streams") and self.device == "cpu":
            raise ValueError("a processor has no streams")
        if asked.get("streams") and not is_gpt:
            raise ValueError("both streams would write the statistics of batches")
        self.beside = torch.cuda.Stream() if asked.get("streams") else None

    def loss(self, recompute):
        if not self.beside:
            return functional.cross_entropy(self.model(self.inputs, recompute), self.targets)
        # Half of the batch in a stream of its own, beside the other half; and so the backward passes.
        here = torch.cuda.current_stream()
        halves = zip(self.inputs.chunk(2), self.targets.chunk(2))
        self.beside.wait_stream(here)
        losses = []
        for stream, (inputs, targets) in zip([self.beside, here], halves):
            with torch.cuda.stream(stream):
                losses.append(functional.cross_entropy(self.model(inputs, recompute), targets))
        here.wait_stream(self.beside)
        losses[0].record_stream(here)
        return sum(losses) / 2

    def iteration(self, recompute=False, saved=contextlib.nullcontext):
        """One iteration, and its loss: recomputing every block, or in a context for the tensors that are saved."""
        self.optimizer.zero_grad()
        # What one stream has cast the other would have to wait for.
        shares_casts = not self.beside
        with torch.autocast(self.device.split(":")[0], torch.bfloat16, self.bf16, shares_casts), saved():
            loss = self.loss(recompute)
        loss.backward()
        self.optimizer.step()
        return loss.item()
