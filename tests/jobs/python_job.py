"""A PyTorch job, untouched or under Plimsoll: prints its losses and parameters, and what Plimsoll reports, as JSON."""

import argparse
import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import io
import json
import os
import pathlib
import signal
import sys
import threading
import time
import types
import zlib

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

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


class Halves(torch.Tensor):
    """A tensor that is the sum of two others, halves of it: a class with operators of its own, views among them."""

    @staticmethod
    def __new__(cls, first, second):
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype, device=first.device)

    def __init__(self, first, second):
        self.first, self.second = first, second

    @classmethod
    def __torch_dispatch__(cls, operator, types, arguments=(), named=None):
        def whole(value):
            return value.first + value.second if isinstance(value, Halves) else value

        return Halves.of(operator(*tree_map(whole, arguments), **tree_map(whole, named or {})))

    @staticmethod
    def of(whole):
        return Halves(whole * 0.5, whole * 0.5)


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(context, whole):
        return Halves.of(whole)

    @staticmethod
    def backward(context, gradient):
        return gradient.first + gradient.second


class Join(torch.autograd.Function):
    @staticmethod
    def forward(context, halves):
        return halves.first + halves.second

    @staticmethod
    def backward(context, gradient):
        return Halves.of(gradient)


# What Plimsoll has for what goes past the dispatcher, where there is a budget.
past_dispatcher = types.SimpleNamespace(run=lambda graph, run, inputs: run(graph, inputs), touch=lambda *tensors, read=(): None)


class Graph:
    """What runs past the dispatcher, as graphs of `torch.compile` do."""

    mutated_input_idxs, constants, source_code = (), None, ""

    def __init__(self, function, is_backward, device_types=()):
        self.function, self.fx_kwargs = function, {"is_backward": is_backward}
        self.device_types = device_types

    def __call__(self, *inputs):
        return past_dispatcher.run(self, Graph.run, list(inputs))

    def run(self, inputs):
        return self.function(inputs)


def drop_out(inputs):
    (values,) = inputs
    inputs.clear()
    kept = torch.rand_like(values) > 0.1
    return [values.tanh() * kept, kept]


def drop_back(inputs):
    values, kept, gradient = inputs
    inputs.clear()
    slope = 1 - values.tanh() ** 2
    del values
    # Into what only it needs.
    return [slope.mul_(kept.logical_and_(gradient != 0)).mul_(gradient)]


class DropOut(torch.autograd.Function):
    forward_graph, backward_graph = Graph(drop_out, False), Graph(drop_back, True)

    @staticmethod
    def forward(context, values):
        result, kept = DropOut.forward_graph(values)
        context.save_for_backward(values, kept)
        return result

    @staticmethod
    def backward(context, gradient):
        return DropOut.backward_graph(*context.saved_tensors, gradient)[0]


class ByAddress(torch.autograd.Function):
    """A copy by what knows addresses only; its backward pass reads there what has been idle."""

    @staticmethod
    def forward(context, values):
        made = torch.empty_like(values)
        past_dispatcher.touch(made, read=[values])
        ctypes.memmove(made.data_ptr(), values.data_ptr(), values.nbytes)
        context.save_for_backward(made)
        return made.clone()

    @staticmethod
    def backward(context, gradient):
        (made,) = context.saved_tensors
        past_dispatcher.touch(read=[made])
        return gradient * (1 + zlib.crc32(ctypes.string_at(made.data_ptr(), made.nbytes)) % 16 / 16)


class OfLists(torch.autograd.Function):
    """Its backward pass reads what has been idle: as elements of lists that become tensors, and through a capsule."""

    @staticmethod
    def forward(context, values):
        made, lent = values.clone(), values.sin()
        context.save_for_backward(made, lent)
        return made * lent

    @staticmethod
    def backward(context, gradient):
        made, lent = context.saved_tensors
        elements = made.view(-1)
        listed = torch.tensor([elements[0], elements[-1]]).tanh().sum().item()
        if lent.is_cpu:
            listed += torch.from_dlpack(torch.utils.dlpack.to_dlpack(lent)).mean().item()
        return gradient * (1 + 0.1 * listed)


class Branch:
    """An operator that takes functions, and chooses its kernel in Python."""

    @staticmethod
    def apply(values):
        return torch.cond(values.sum() > 0, lambda held: held * 1.01, lambda held: held + 0.01 * held.sin(), (values,))


class Count(TorchDispatchMode):
    """Counts operators."""

    operators = 0

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        self.operators += 1
        return operator(*arguments, **(named or {}))


class Model(nn.Module):
    """Convolutions and batch-norm before a transformer with dropout and noise."""

    def __init__(self, in_python, between, beside):
        super().__init__()
        self.in_python, self.between, self.beside = in_python, between, beside
        self.tokens = nn.Embedding(SYMBOLS, WIDTH)
        self.smooth = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, symbols):
        hidden = self.tokens(symbols)
        hidden = hidden + self.smooth(hidden.transpose(1, 2)).transpose(1, 2)
        if self.beside:
            hidden = self.run_beside(hidden)
        else:
            for layer in self.layers.layers:
                hidden = self.run_layer(layer, hidden)
        return self.head(hidden)

    def run_layer(self, layer, hidden):
        hidden = hidden * (1 + 0.1 * torch.randn_like(hidden))
        hidden = hidden + Clamp.apply(self.run_in_python(layer, hidden) if self.in_python else layer(hidden))
        return self.between.apply(hidden) if self.between else hidden

    def run_beside(self, hidden):
        """All layers, for half of the batch in a stream of its own, and so their backward passes. The two run beside each other, and
        have something of each other after each layer."""
        here = torch.cuda.current_stream()
        first, second = hidden.chunk(2)
        for layer in self.layers.layers:
            with torch.no_grad():
                shared = torch.tanh(second)
            self.beside.wait_stream(here)
            with torch.cuda.stream(self.beside):
                first.record_stream(self.beside)
                first = self.run_layer(layer, first + shared)
            second = self.run_layer(layer, second)
            here.wait_stream(self.beside)
            first.record_stream(here)
            second = second + 0.1 * first + shared
        return torch.cat([first, second])

    @staticmethod
    def run_in_python(layer, hidden):
        """The layer, checkpointed but for its products, of what passed through operators of a class of its own."""

        def keep_products():
            return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default, torch.ops.aten.bmm.default])

        hidden = Join.apply(nn.functional.silu(Halve.apply(hidden).transpose(0, 1)).transpose(0, 1))
        return checkpoint(layer, hidden, use_reentrant=False, context_fn=keep_products)


def share_work(model, how, device, backend):
    """The model of this process among those that share its work."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.distributed.init_process_group(backend)
    if how == "replicated":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.2)
    mesh = torch.distributed.device_mesh.init_device_mesh(torch.device(device).type, (torch.distributed.get_world_size(),))
    for layer in model.layers.layers:
        if how == "sharded":
            torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
        else:
            halves = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
            parallelize_module(layer, mesh, halves)
    return torch.distributed.fsdp.fully_shard(model, mesh=mesh) if how == "sharded" else model


class Hooked:
    """Updates each parameter as soon as its gradient is there, and lets go of that."""

    def __init__(self, parameters):
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(functools.partial(self.update, torch.optim.AdamW([parameter], lr=1e-3)))

    @staticmethod
    def update(of_one, parameter):
        of_one.step()
        of_one.zero_grad()

    def step(self):
        pass

    zero_grad = step


def train_step(model, optimizer, device, before_backward, sequence=SEQUENCE):
    symbols = torch.randint(SYMBOLS, (BATCH, sequence + 1)).to(device)
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
    larger = torch.ones(min(runtime.budget, 2**24)).sum()
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


def save(model, optimizer):
    """What a checkpoint holds, and a list of all parameters."""
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    numbers = [parameter.tolist() for parameter in model.parameters()]
    return hashlib.sha256(file.getvalue() + repr(numbers).encode()).hexdigest()


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


def flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget")
    parser.add_argument("--host-limit")
    parser.add_argument("--policy", type=pathlib.Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--sequence", type=int, default=SEQUENCE)
    parser.add_argument("--detect", action="store_true")
    parser.add_argument("--mark", action="store_true")
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--elsewhere", action="store_true")
    parser.add_argument("--forks", action="store_true")
    parser.add_argument("--hooked", action="store_true")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--saves", action="store_true")
    parser.add_argument("--save-traces", type=pathlib.Path)
    parser.add_argument("--in-python", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--streams", action="store_true")
    parser.add_argument("--past-dispatcher", choices=["graphs", "addresses", "functions", "lists"])
    parser.add_argument("--shared", choices=["replicated", "sharded", "split"])
    parser.add_argument("--backend", default="gloo")
    return parser.parse_args()


def make(asked):
    """The model, and its optimizer."""
    between = {"graphs": DropOut, "addresses": ByAddress, "functions": Branch, "lists": OfLists}.get(asked.past_dispatcher)
    model = Model(asked.in_python, between, torch.cuda.Stream() if asked.streams else None).to(asked.device)
    if asked.compiled:
        # One layer, of sizes that are symbols to the compiler.
        model.layers.layers[1] = torch.compile(model.layers.layers[1], dynamic=True)
    if asked.shared:
        model = share_work(model, asked.shared, asked.device, asked.backend)
    adam = dict(lr=1e-3, fused=asked.fused or None)
    return model, Hooked(model.parameters()) if asked.hooked else torch.optim.AdamW(model.parameters(), **adam)


def train(asked, runtime, model, optimizer, beside):
    """The losses, and what there is between two of them."""
    losses = []
    before_backward = (lambda: fork(runtime, asked.device)) if asked.forks else lambda: None
    if asked.saves:
        before_backward = lambda: losses.append(save(model, optimizer))
    whole = asked.detect or asked.mark
    with runtime.detect() if whole else contextlib.nullcontext() as loop:
        for _ in range(asked.iterations):
            guard = runtime.iteration() if runtime and not whole else contextlib.nullcontext()
            if asked.mark:
                loop.mark()
            with beside.watch(guard) if beside else guard:
                losses.append(train_step(model, optimizer, asked.device, before_backward, asked.sequence))
    return losses


def elsewhere(job, runtime, iterations):
    """What `job` comes to in another thread, while this one looks at the report."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        came_to = pool.submit(job)
        while not came_to.done():
            assert not runtime or runtime.report()["iterations"] <= iterations
            time.sleep(0.01)
        return came_to.result()


def bits(model):
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        digest.update(bytes(tensor.cpu().contiguous().view(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()


def main():
    asked = flags()
    runtime = None
    if asked.budget:
        import plimsoll

        runtime = plimsoll.Runtime(asked.budget, asked.policy, device=asked.device, host_limit=asked.host_limit)
        past_dispatcher.run, past_dispatcher.touch = plimsoll._compiled.run_as_region, plimsoll.touch
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    model, optimizer = make(asked)
    beside = Beside() if asked.beside else None
    if beside:
        beside.start()
    count = Count() if asked.in_python else contextlib.nullcontext()

    def job():
        with count:
            return train(asked, runtime, model, optimizer, beside)

    losses = elsewhere(job, runtime, asked.iterations) if asked.elsewhere else job()
    report = runtime.report() if runtime else None
    found = {"losses": losses, "parameters": bits(model), "report": report, "text": str(runtime)}
    if asked.in_python:
        found["operators"] = count.operators
    if asked.save_traces:
        found["traces"] = [str(path) for path in runtime.save_traces(asked.save_traces, "mine")]
        parameters = [parameter.untyped_storage().nbytes() for parameter in model.parameters()]
        found["parameter_bytes"] = sum(parameters)
    if asked.shared:
        torch.distributed.destroy_process_group()
    if beside:
        found["turns_at_ends"] = beside.at_ends
    print(json.dumps(found))


if __name__ == "__main__":
    main()
