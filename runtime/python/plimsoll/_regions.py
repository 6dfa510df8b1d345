"""Stretches of a program that use tensors by their addresses: each is one operator to the runtime."""

import torch


def unseen(operator, *arguments):
    """What an operator of the runtime's returns, called by no mode and no class of tensors: the program has not called it."""
    with torch._C.DisableTorchFunction():
        return operator(*arguments)


def within(enter, use, results=lambda _: []):
    """What `use` returns, in the region that `enter` enters; `results` says which tensors of that it made.

    A signal may raise between any two calls: what is open is asked for, and not remembered.
    """
    depth = unseen(torch.ops.plimsoll.region_depth)
    try:
        unseen(enter)
        returned = use()
        unseen(torch.ops.plimsoll.leave_region, results(returned))
    except BaseException:
        unseen(torch.ops.plimsoll.fail_regions, depth)
        raise
    return returned


def touching(read, written, touch, results=lambda _: []):
    """What `touch` returns; the tensors stay there meanwhile."""
    return within(lambda: torch.ops.plimsoll.enter_region(read, written, [], 0, "plimsoll::region_once"), touch, results)


def tensors_in(value):
    """The tensors in a value, and in what it is made of."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]
