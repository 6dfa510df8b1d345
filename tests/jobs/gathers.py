"""A job of a process or two that gather, scatter and reduce lists of tensors: a gathered list is one of lists to the operator.

Prints as JSON what this process has found, and how often something was evicted."""

import job
import torch
import torch.distributed as dist


def press():
    """What is not needed at once gives way."""
    [torch.ones(64, 64) * number for number in range(20)]


def sums(tensors):
    press()
    return [tensor.double().sum().item() for tensor in tensors]


def filled(value):
    return [torch.full((64, 64), float(value)) * (number + 1) for number in range(dist.get_world_size())]


def communicate(rank):
    own = torch.full((64, 64), 3.0) * (rank + 1)
    gathered = filled(-1)
    before = [tensor * 2 for tensor in gathered]
    press()
    dist.all_gather(gathered, own)
    found = sums(gathered) + sums(before)

    under_way = filled(-2)
    work = dist.all_gather(under_way, own, async_op=True)
    press()
    work.wait()
    found += sums(under_way)

    to_one = filled(-3)
    press()
    dist.gather(own, to_one if rank == 0 else None)
    found += sums(to_one)

    parts = filled(5)
    press()
    dist.scatter(own, parts if rank == 0 else None)
    found += sums([own])

    parts, reduced = filled(7 + rank), torch.zeros(64, 64) - 1
    press()
    dist.reduce_scatter(reduced, parts)
    found += sums([reduced])

    changed = torch.full((64, 64), 2.0) * 2
    press()
    # What is called then runs in a thread of the library's.
    future = dist.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda _: changed.mul_(5).sum())
    return found + [future.wait().item()] + sums([changed])


def main():
    runtime, device = job.begin(__doc__)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    torch.set_default_device(device)
    found = []
    for _ in range(4):
        with job.iteration(runtime):
            found.append(communicate(dist.get_rank()))
    dist.destroy_process_group()
    job.end(runtime, found)


if __name__ == "__main__":
    main()
