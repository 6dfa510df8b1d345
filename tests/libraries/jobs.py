"""What jobs of other libraries have in common, and which there are."""

import torch

ITERATIONS = 24
VOCABULARY = 500

jobs = {}


def job(*modes):
    """Registers a function of a device, which returns the modules that are trained, and a function that runs an iteration of a given
    index; or, where the library has the loop, one of no arguments that runs it all, whose iterations can only be detected."""

    def register(make):
        jobs[make.__name__] = (make, modes)
        return make

    return register


def tokens(count, length=96):
    return torch.randint(5, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(3))


def trains(model, device, loss_of, optimizer=None):
    """A loop that trains a model by a loss of what is drawn with a generator."""
    model.to(device).train()
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)

    def iterate(_):
        optimizer.zero_grad()
        loss = loss_of(generator)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return iterate, [model]
