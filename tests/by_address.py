"""A job that hands tensors to functions which read and write them by their addresses, past every operator.

Prints as JSON what has come of it, and how often something was evicted."""

import contextlib
import io

import job
import torch


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


def main():
    runtime, _ = job.begin(__doc__)
    uses = (change_elements, swap_bytes, go_back_to_a_generator_s_state, save_constants, save_again_after_an_interruption)
    found = []
    for _ in range(4):
        with runtime.iteration() if runtime else contextlib.nullcontext():
            found.append({use.__name__: use() for use in uses})
    job.end(runtime, found)


if __name__ == "__main__":
    main()
