"""A job that copies modules and states by Python's `copy`: a teacher that follows the model, and the best state so far.

Prints as JSON the losses, the sums of what was copied, and the bytes of all of it."""

import copy

import job
import torch

ITERATIONS = 6


def bytes_of(state):
    return sum(tensor.untyped_storage().nbytes() for tensor in state.values())


runtime, device = job.begin(__doc__)
model = torch.nn.Sequential(*(job.Layer(64) for _ in range(3))).to(device)
teacher = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def iterate():
    batch = torch.randn(64, 64, device=device)
    optimizer.zero_grad()
    loss = (model(batch) - teacher(batch + 0.1)).square().mean()
    loss.backward()
    optimizer.step()
    for own, followed in zip(teacher.parameters(), model.parameters()):
        own.lerp_(followed, 0.1)
    return loss.item(), copy.deepcopy(model.state_dict())


losses, states = [], []
for _ in range(ITERATIONS):
    with job.iteration(runtime):
        loss, state = iterate()
    losses.append(loss)
    states.append(state)
sums = [[tensor.double().sum().item() for tensor in state.values()] for state in states]
copied_bytes = sum(map(bytes_of, states)) + bytes_of(teacher.state_dict())
job.end(runtime, {"losses": losses, "sums": sums, "copied_bytes": copied_bytes})
