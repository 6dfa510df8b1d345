"""Stretches of a program that use tensors by their addresses: each is one operator to the runtime."""

import torch


def within(enter, use, results=lambda _: []):
    """What `use` returns, in the region that `enter` enters; `results` says which tensors of that it made.

    A signal may raise between any two calls: what is open is asked for, and not remembered.
    """
    depth = torch.ops.plimsoll.region_depth()
    try:
        enter()
        returned = use()
        torch.ops.plimsoll.leave_region(results(returned))
    except BaseException:
        torch.ops.plimsoll.fail_regions(depth)
        raise
    return returned
