"""A job that copies its model and its optimizer's state in every iteration: what is copied is a storage, given to another tensor.

Prints as JSON the losses of both models, how often something was evicted, and the report."""

import argparse
import contextlib
import copy
import json

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    runtime = None
    if asked.budget:
        import plimsoll

        runtime = plimsoll.Runtime(asked.budget, device=asked.device)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    model = nn.Sequential(*layers).to(asked.device)
    optimizer = torch.optim.Adam(model.parameters())
    found = []
    with runtime.detect() if runtime else contextlib.nullcontext() as loop:
        for _ in range(12):
            if loop:
                loop.mark()
            hidden = model[:3](torch.randn(256, 64, device=asked.device))
            copied, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
            loss = model[3:](hidden).pow(2).mean()
            loss.backward()
            with torch.no_grad():
                found.append(copied(torch.randn(256, 64, device=asked.device)).pow(2).mean().item())
            optimizer.step()
            optimizer.zero_grad()
            moments = [value for of_one in state["state"].values() for value in of_one.values()]
            found += [loss.item(), sum(moment.double().sum().item() for moment in moments)]
    report = runtime.report() if runtime else {}
    print(json.dumps({"found": found, "evictions": report.get("reactive_evictions"), "report": report}))


if __name__ == "__main__":
    main()
