"""A job that copies its model and its optimizer's state in every iteration: what is copied is a storage, given to another tensor.

Prints as JSON the losses of both models, how often something was evicted, and the report."""

import contextlib
import copy

import job
import torch
from torch import nn


def main():
    runtime, device = job.begin(__doc__)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    found = []
    with runtime.detect() if runtime else contextlib.nullcontext() as loop:
        for _ in range(12):
            if loop:
                loop.mark()
            hidden = model[:3](torch.randn(256, 64, device=device))
            copied, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
            loss = model[3:](hidden).pow(2).mean()
            loss.backward()
            with torch.no_grad():
                found.append(copied(torch.randn(256, 64, device=device)).pow(2).mean().item())
            optimizer.step()
            optimizer.zero_grad()
            moments = [value for of_one in state["state"].values() for value in of_one.values()]
            found += [loss.item(), sum(moment.double().sum().item() for moment in moments)]
    job.end(runtime, found)


if __name__ == "__main__":
    main()
