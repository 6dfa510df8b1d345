"""A job that begins to capture a CUDA graph where something would have to leave, and goes on without.

Prints as JSON what it has found, and how often something was evicted."""

import job
import torch

SIZE, KEPT, OTHERS, ITERATIONS = 256, 6, 4, 4


def iterate(runtime, device):
    kept = [torch.randn(SIZE, SIZE, device=device).sin() for _ in range(KEPT)]
    refused = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            try:
                [torch.ones(SIZE, SIZE, device=device) for _ in range(OTHERS)]
            except torch.OutOfMemoryError as error:
                refused = str(error)
    except RuntimeError as error:
        assert "apture" in str(error), error
    assert ("while a CUDA graph is captured" in refused) == (runtime is not None), refused
    others = [torch.ones(SIZE, SIZE, device=device) for _ in range(OTHERS)]
    return [value.double().sum().item().hex() for value in kept + others]


def main():
    runtime, device = job.begin(__doc__)
    found = []
    for _ in range(ITERATIONS):
        with job.iteration(runtime):
            found += iterate(runtime, device)
    job.end(runtime, found)


if __name__ == "__main__":
    main()
