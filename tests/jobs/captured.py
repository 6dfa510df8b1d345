"""A job that captures CUDA graphs where something is away, or would have to leave, and goes on with what it has.

Prints as JSON what it has found, and how often something was evicted."""

import job
import torch

SIZE, KEPT, OTHERS, ITERATIONS = 256, 6, 4, 4


def refusals(uses):
    """What is said of those that are refused, while a graph is captured of all of them."""
    refused, graph = [], torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        for use in uses:
            try:
                use()
            except torch.OutOfMemoryError as error:
                refused.append(str(error))
        try:
            graph.capture_end()
        except RuntimeError:
            pass  # a device that only stands in for one makes no graphs, and does all at once
    torch.cuda.synchronize()
    return refused


def iterate(runtime, device):
    def make_room():
        return [torch.ones(SIZE, SIZE, device=device) for _ in range(OTHERS)]

    kept = [torch.randn(SIZE, SIZE, device=device).sin() for _ in range(KEPT)]
    others = make_room()
    # The first is gone before it is used, perhaps while it is copied.
    refused = refusals([kept[0].sum, lambda: kept.pop(0), *(value.sum for value in kept[1:]), make_room])
    assert bool(refused) == (runtime is not None), refused
    assert all("while a CUDA graph is captured" in text for text in refused), refused
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
