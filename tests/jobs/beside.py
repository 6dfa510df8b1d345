"""A job in which another thread runs operators of Python's, within which garbage is collected that still has something to say.

Prints as JSON what was said, and the sum of all that there is in the end."""

import gc
import threading

import job
import torch

SIZE, LOOKS = 512, 24
told = []


class Garbage:
    def __init__(self, numbers):
        self.numbers, self.itself = numbers, self

    def __del__(self):
        told.append(self.numbers.sum().item())


@torch.library.custom_op("job::look", mutates_args=())
def look(numbers: torch.Tensor) -> torch.Tensor:
    gc.collect()
    return numbers.sum()


def look_at(all_numbers, small):
    with torch.no_grad():
        for numbers in all_numbers:
            Garbage(small)
            look(numbers)


runtime, device = job.begin(__doc__)
gc.disable()
with torch.no_grad(), job.iteration(runtime):
    before = [torch.ones(SIZE, SIZE, device=device) * factor for factor in range(LOOKS)]
    small = torch.ones(64, 64, device=device) * 2
    other = threading.Thread(target=look_at, args=(before, small))
    other.start()
    other.join()
    # What the other thread has used may leave again.
    after = torch.ones(LOOKS * SIZE, SIZE, device=device)
    found = sum(numbers.sum().item() for numbers in [*before, after])
job.end(runtime, [told, found])
