"""A job that hands tensors to functions which read and write them by their addresses, past every operator.

Prints as JSON what has come of it, and how often something was evicted."""

import contextlib
import ctypes
import functools
import io
import os
import tempfile
import warnings

import job
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Constants(torch.nn.Module):
    def __init__(self, constant):
        super().__init__()
        self.constant = constant
        self.others = (constant * 2, constant * 3)

    def forward(self, hidden: torch.Tensor):
        return hidden + self.constant + self.others[0] * self.others[1]


def press(count=20):
    """What is not needed at once gives way."""
    [torch.ones(64, 64) * number for number in range(count)]


def change_elements():
    changed, other = torch.full((64, 64), 2.0) * 2, torch.full((64, 64), 3.0) * 2
    changed.apply_(lambda value: value + 1)
    press()
    changed.map_(other=other, callable=lambda own, given: own * given)
    press()
    changed.map2_(other, other, lambda own, one, two: own - one + two)
    press()
    # A function of the program's may run operators.
    few, table = torch.zeros(8), torch.arange(4096.0) * 2
    press(400)
    few.apply_(lambda value: (table + value).sum().item())
    traced = torch.jit.trace(lambda hidden: hidden.clone().apply_(abs), torch.ones(8), check_trace=False)
    return [changed.sum().item(), few.sum().item(), traced(few).sum().item()]


def swap_bytes():
    swapped = torch.arange(4096, dtype=torch.int32) * 1
    press(400)
    swapped.untyped_storage().byteswap(torch.int32)
    press(400)
    return [swapped.double().sum().item()]


def go_back_to_a_generator_s_state():
    state = torch.get_rng_state().clone()
    drawn = torch.rand(64)
    press(400)
    torch.set_rng_state(state)
    return [torch.equal(torch.rand(64), drawn)]


def save(program):
    press()
    file = io.BytesIO()
    torch.jit.save(program, file)
    file.seek(0)
    press()
    return torch.jit.load(file)(torch.ones(64, 64)).sum().item()


def save_constants():
    constant = torch.full((64, 64), 0.5) * 3
    traced = torch.jit.trace(lambda hidden: hidden * constant, torch.ones(64, 64), check_trace=False)

    def call(hidden):
        return traced(hidden) + 1

    module = torch.jit.script(Constants(constant).eval())
    return [save(program) for program in (traced, torch.jit.script(call), module, torch.jit.freeze(module))]


def save_a_traced_module():
    layer = torch.nn.Linear(64, 64)
    layer.weight.data = layer.weight.data * 2
    traced = torch.jit.trace(layer, torch.ones(64, 64), check_trace=False)
    saved = save(traced)
    press()
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "module.ff")
        torch.jit.save_jit_module_to_flatbuffer(m=traced, f=file)
        press()
        flat = torch.jit.jit_module_from_flatbuffer(file)(torch.ones(64, 64)).sum().item()
    return [saved, len(traced._save_to_buffer_for_lite_interpreter()), flat]


@functools.cache
def exported():
    return torch.export.export(torch.nn.Linear(64, 64), (torch.ones(64, 64),))


def save_an_exported_program():
    doubled = [parameter * 2 for parameter in exported().state_dict.values()]
    press()
    file = io.BytesIO()
    torch.export.save(exported(), file)
    file.seek(0)
    press()
    loaded = torch.export.load(file).state_dict.values()
    return [[one.sum().item(), other.sum().item()] for one, other in zip(doubled, loaded)]


class Ranked:
    def __init__(self, values):
        self.values = values

    def __getstate__(self):
        return {"ranks": self.values.argsort()}


def save_what_is_computed_then():
    several = [torch.randn(4096) * number for number in range(8)]
    file, nothing = io.BytesIO(), torch.empty(0)
    torch.save([nothing, nothing.view(torch.int32)], io.BytesIO())
    torch.save([[values, Ranked(values[:1024])] for values in several], file)
    file.seek(0)
    return [[one.sum().item(), other.ranks[0].item()] for one, other in torch.load(file, weights_only=False)]


def share_with_other_processes():
    # It cannot be made again: what is made from it is, as long as it is there.
    shared = torch.tensor([2.0] * 4096)
    doubled = shared * 2
    press()
    shared.share_memory_()
    press()
    return [shared.sum().item(), doubled.sum().item(), shared.is_shared()]


def launch_from_a_compiled_function():
    @torch.compiler.disable
    def add(values):
        first = ctypes.c_float.from_address(values.data_ptr())
        first.value += 0.5

    @job.by_address
    def launch(values):
        add(values)

    @torch.compile(backend="eager")
    def change(hidden):
        hidden = hidden * 2
        press()
        # Here the graph breaks.
        launch(hidden)
        press()
        return hidden + 1

    return [change(torch.ones(64, 64) * 2).sum().item() for _ in range(2)]


def save_again_after_an_interruption():
    saved = torch.full((64, 64), 7.0) * 2
    press()
    if hasattr(torch.ops, "plimsoll") and hasattr(torch.ops.plimsoll, "enter_read"):
        enter = torch.ops.plimsoll.enter_read

        def enter_and_be_interrupted(*what):
            enter(*what)
            raise KeyboardInterrupt

        torch.ops.plimsoll.enter_read = enter_and_be_interrupted
        with contextlib.suppress(KeyboardInterrupt):
            torch.save(saved, io.BytesIO())
        torch.ops.plimsoll.enter_read = enter
    press()
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return [torch.load(file).sum().item()]


def go_by_lengths():
    recurrent = torch.nn.LSTM(4, 4)
    inputs = torch.randn(700, 2, 4, requires_grad=True)
    packed = pack_padded_sequence(inputs, torch.tensor([700, 5]))
    press(400)
    with torch.no_grad():
        come_out, _ = recurrent(packed)
    press(400)
    padded, _ = pad_packed_sequence(come_out)
    press(400)
    (packed.data**2).sum().backward()
    # As many as a batch of small storages has.
    many = pack_padded_sequence(torch.randn(2, 600, 4), torch.full((600,), 2))
    _, lengths = pad_packed_sequence(many)
    return [padded.sum().item(), inputs.grad.sum().item(), lengths.sum().item()]


def align():
    chances = torch.randn(2, 600, 2).log_softmax(2)
    spoken, written = torch.full((600,), 2), torch.ones(600, dtype=torch.int32)
    press(400)
    inferred = chances.clone()
    press(400)
    with torch.inference_mode():
        loss = torch.nn.functional.ctc_loss(inferred, torch.ones(600, 1, dtype=torch.long), spoken, written).item()
    press(400)
    return [loss, torch.nn.functional.ctc_loss(chances, torch.ones(600, 1, dtype=torch.long), spoken, written).item()]


def split():
    whole, borders = torch.randn(1100), torch.arange(1, 1041, 2)
    press(400)
    parts = torch.tensor_split(whole, borders)
    return [sum(place * part.sum().item() for place, part in enumerate(parts))]


def draw_evenly():
    engine = torch.quasirandom.SobolEngine(60)
    press(400)
    engine.fast_forward(5)
    press(400)
    return [engine.draw(9).sum().item()]


def share_copies():
    shared = torch.from_dlpack(torch.full((64, 64), 2.0) * 2, copy=True)
    press(400)
    return [shared.mul_(3).sum().item()]


def quantize():
    quantized = torch.quantize_per_channel(torch.randn(600, 4), torch.rand(600) + 0.1, torch.zeros(600).long(), 0, torch.qint8)
    scales, points = quantized.q_per_channel_scales(), quantized.q_per_channel_zero_points()
    press(400)
    return [quantized.dequantize().sum().item(), scales.sum().item(), points.sum().item()]


def change_what_is_saved():
    leaf = torch.full((64, 64), 2.0, requires_grad=True)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        saved = leaf * 1
        squares, of_some = saved**2, saved.double()[2:]
        cubes = of_some**3
        press(400)
        saved.mul_(3)
        of_some.detach().view(torch.float32).zero_()
        press(400)
        (squares.sum() + saved.sum() + cubes.sum()).backward()
    return [leaf.grad.sum().item()]


def look_at_operators():
    values, halves = torch.randn(1, 1, 4096), torch.ones(1, 1, 4096) / 2
    press(400)
    _, slopes = torch.func.jvp(lambda given: torch.max_pool1d(given, 2), (values,), (halves,))
    scales = torch.choose_qparams_optimized((values.flatten() * 2).requires_grad_(), 4096, 16, 0.16, 8)
    split = make_fx(lambda whole: torch.tensor_split(whole, torch.tensor([3, 700])))(torch.randn(4096))
    return [slopes.sum().item(), scales[0].item(), [str(node.target) for node in split.graph.nodes]]


def nest():
    parts = [torch.randn(2 + place % 3, 2) for place in range(300)]
    nested = torch.nested.nested_tensor(parts, requires_grad=True)
    press(400)
    turned = nested.transpose(1, 2)
    press(400)
    padded = torch.nested.to_padded_tensor((turned * 2).transpose(1, 2).contiguous(), 0.0)
    press(400)
    padded.square().sum().backward()
    press(400)
    return [padded.sum().item(), torch.nested.to_padded_tensor(nested.grad, 0.0).sum().item()]


def draw_below():
    values, highest = torch.randn(2048) * 1, torch.full((2048,), 9) * 1
    press(400)
    return [torch.randint_like(values, highest[7]).sum().item()]


def grow():
    values, grown = torch.randn(64, 64), torch.randn(2048) * 2
    press(400)
    with warnings.catch_warnings(action="ignore"):
        torch.inner(values, values, out=grown)
    press(400)
    begun_empty = torch.empty(0)
    torch.sin(grown, out=begun_empty)
    doubled = begun_empty * 2
    del begun_empty
    press(400)
    return [grown.sum().item(), grown._version, doubled.sum().item()]


def shrink():
    values = torch.randn(2048, 3) * 2
    with warnings.catch_warnings(action="ignore"):
        torch.linalg.vector_norm(values, out=values)
    press(400)
    return [values.item()]


def normalise_from_one_buffer():
    norm = torch.nn.BatchNorm1d(1100)
    buffer = torch.ones(4, 1100)
    norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var = buffer.unbind()
    before = buffer * 1
    normalised = norm(torch.randn(8, 1100) * 3)
    press(400)
    normalised.sum().backward()
    return [value.sum().item() for value in (before, normalised, buffer, norm.weight.grad)]


def main():
    runtime, _ = job.begin(__doc__)
    uses = [change_elements, swap_bytes, go_back_to_a_generator_s_state, save_constants, save_again_after_an_interruption]
    uses += [go_by_lengths, align, split, draw_evenly, share_copies, quantize, change_what_is_saved, look_at_operators]
    uses += [nest, draw_below, grow, shrink, normalise_from_one_buffer, save_a_traced_module, share_with_other_processes]
    uses += [launch_from_a_compiled_function, save_an_exported_program, save_what_is_computed_then]
    found = []
    for _ in range(4):
        with job.iteration(runtime):
            found.append({use.__name__: use() for use in uses})
    job.end(runtime, found)


if __name__ == "__main__":
    main()
