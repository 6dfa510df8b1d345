"""Operators on lists, and optimizers that work on lists, left alone or by the package within less than one of them uses: prints a line
of JSON, what each came to."""

import argparse
import contextlib
import hashlib
import json

import torch

PLACES, ROWS, COLUMNS = 6, 300, 100
OPTIMIZERS = [
    (torch.optim.SGD, dict(lr=0.1)),
    (torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)),
    (torch.optim.Adam, dict(lr=0.1, amsgrad=True, maximize=True)),
    (torch.optim.AdamW, dict(lr=0.1)),
    (torch.optim.NAdam, dict(lr=0.1)),
    (torch.optim.RAdam, dict(lr=0.1)),
    (torch.optim.Adamax, dict(lr=0.1)),
    (torch.optim.Adagrad, dict(lr=0.1)),
    (torch.optim.Adadelta, dict(lr=0.1)),
    (torch.optim.RMSprop, dict(lr=0.1, momentum=0.9, centered=True)),
    (torch.optim.Rprop, dict(lr=0.1)),
    (torch.optim.ASGD, dict(lr=0.1)),
    (torch.optim.Adafactor, dict(lr=0.1)),
]


def digest(tensors):
    """Of what they hold; copies, for they may be away."""
    held = [tensor.detach().clone().cpu().contiguous().view(-1).view(torch.uint8).tolist() for tensor in tensors]
    return hashlib.sha256(repr(held).encode()).hexdigest()


def complaint(call):
    """What the call is refused for."""
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0]


def parameters_of_an_optimizer(kind, settings, device):
    """What they come to in three steps: where all lie as their gradients do; not all; or one is there twice. The last stay together."""
    torch.manual_seed(1)
    few = ROWS // 10
    # A GPU steps all at once: one that is there twice comes to whatever is first.
    doubled = [(few, [], 1)] if device == "cpu" else []
    for rows, odd, twice in [(ROWS, [], 0), (few, [torch.randn(COLUMNS, few).t(), torch.randn(())], 0), *doubled]:
        parameters = [torch.randn(rows, COLUMNS) for _ in range(PLACES)] + odd
        parameters = [parameter.to(device).requires_grad_() for parameter in parameters]
        optimizer = kind(parameters + parameters[:twice], foreach=True, **settings)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, device=device)
            optimizer.step()
        yield from parameters


def run(device):
    for kind, settings in OPTIMIZERS:
        yield digest(parameters_of_an_optimizer(kind, settings, device))
    torch.manual_seed(0)
    weights, slopes, means, squares = ([torch.randn(ROWS, COLUMNS, device=device) for _ in range(PLACES)] for _ in range(4))
    factors = [0.1 * place for place in range(PLACES)]
    number = torch.tensor(1.1, device=device)
    steps = [torch.tensor(1.0, device=device) for _ in range(PLACES)]
    torch._foreach_abs_(squares)
    yield digest(torch._foreach_add(weights, slopes, alpha=2))
    yield digest(torch._foreach_norm(slopes))
    yield digest(torch._foreach_max(slopes))
    yield digest(torch._foreach_pow(2.0, slopes))
    torch._foreach_addcdiv_(weights, slopes, squares, factors)
    torch._foreach_addcmul_(weights, slopes, squares, torch.tensor(factors))
    torch._foreach_lerp_(means, slopes, 0.3)
    torch._foreach_mul_(slopes, number)
    torch._foreach_add_(steps, 1)
    adam = dict(lr=1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False)
    torch._fused_adamw_(weights, slopes, means, squares, [], steps, **adam)
    infinite = torch.zeros(1, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(slopes, infinite, number)
    # Where shapes differ, or layouts do, they stay whole, and so what is refused is refused.
    torch._foreach_mul_([*weights, weights[0]], [*slopes, slopes[0][0]])
    torch._foreach_add_([*means, squares[0].t()], [*slopes, weights[0].view(COLUMNS, ROWS)])
    for one, other in [(weights, slopes[:3]), (weights[:3], slopes), ([], [])]:
        yield complaint(lambda: torch._foreach_add_(one, other))
    yield complaint(lambda: torch._foreach_addcmul_(weights, slopes, squares, torch.tensor([0.5])))
    # Traced with sizes that are symbols.
    double = torch.compile(lambda tensors: torch._foreach_mul(tensors, 2.0), dynamic=True, backend="aot_eager")
    yield digest(double([slopes[0][1:], slopes[0][2:]]))
    for tensors in (weights, slopes, means, squares, steps, [infinite]):
        yield digest(tensors)


def check_pieces(device):
    """Where pieces end of lists of those rows: nowhere, where kernels could be others for a piece, or one place is of another."""

    def ends(*lists):
        return torch.ops.plimsoll.pieces([tensor for tensors in lists for tensor in tensors], len(lists))

    rows = [torch.randn(ROWS, COLUMNS, device=device) for _ in range(PLACES)]
    likewise = [row.clone() for row in rows]
    otherwise = [row.clone().t() for row in rows]
    numbers = [torch.randn((), device=device) for _ in rows]
    every = list(range(1, PLACES + 1))
    assert ends(rows, likewise) == ends(rows, otherwise) == ends(rows, likewise, numbers) == every
    assert ends(numbers, numbers) == [], "all of that is one piece"
    mixed = likewise[:3] + otherwise[3:]
    for lists in [(mixed, rows), (rows, otherwise, [row.clone().t() for row in likewise[:3]] + likewise[3:])]:
        assert ends(*lists) == [], "of some places they lie alike"
    assert ends(rows[:2] + [rows[2].half()]) == ends([*rows, rows[0][:, ::2]]) == []
    assert ends([*rows, rows[0]]) == ends(rows, [*likewise[:-1], rows[0]]) == [], "two places are one"
    one = torch.randn(PLACES, ROWS, COLUMNS, device=device)
    assert ends(list(one), likewise) == every, "two places are beside each other in one storage"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    watched = contextlib.nullcontext()
    if asked.budget:
        import plimsoll

        watched = plimsoll.Runtime(asked.budget, device=asked.device).detect()
    with watched:
        found = list(run(asked.device))
        if asked.budget:
            check_pieces(asked.device)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
