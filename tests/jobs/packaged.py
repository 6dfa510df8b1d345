"""A job that learns from a model that AOTInductor has packaged, which reads its inputs by their addresses. The package is where
`PACKAGE` says, and is made if it is not there.

Prints as JSON what has come of it, and how often something was evicted."""

import os

import job
import torch


def packaged(path):
    if not os.path.exists(path):
        teacher = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).eval()
        exported = torch.export.export(teacher, (torch.ones(64, 64),))
        torch._inductor.aoti_compile_and_package(exported, package_path=path)
    # As `torch._inductor.aoti_load_package` does, without Inductor.
    return torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)


def main():
    runtime, _ = job.begin(__doc__)
    teacher = packaged(os.environ["PACKAGE"])
    torch.manual_seed(0)
    pupil = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(12)])
    optimizer = torch.optim.SGD(pupil.parameters(), lr=0.1)
    found = []
    for _ in range(8):
        with job.iteration(runtime):
            given = torch.randn(64, 64) * 2
            told = pupil(given)
            with torch.no_grad():
                [wanted] = teacher.boxed_run([given])
            loss = (told - wanted).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    job.end(runtime, found)


if __name__ == "__main__":
    main()
