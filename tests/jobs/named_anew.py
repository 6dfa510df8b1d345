"""What dropped storages are made from dies while an operator is made ready whose result gets its number.

Prints what was found as JSON, and the report."""

import job
import torch

STORAGES, NUMBERS, ITERATIONS = 8, 1 << 18, 20


def main():
    runtime, _ = job.begin(__doc__)
    weight, found = torch.nn.Parameter(torch.ones(NUMBERS)), set()
    for iteration in range(ITERATIONS):
        # More than is planned for.
        ballast = torch.zeros(5 * NUMBERS) if iteration > 5 and iteration % 2 else None
        roots = [torch.arange(NUMBERS, dtype=torch.float32) * (scale + 1) for scale in range(STORAGES)]
        with job.iteration(runtime):
            made = [root * 2.0 for root in roots]
            at_once = [torch.zeros(NUMBERS) + 1.0 for _ in range(4)]
            total = sum(part.sum() for part in at_once)
            del at_once, roots
            results = []
            for index in range(STORAGES):
                result = made[index] + 1.0
                made[index] = None
                results.append(result)
                results[-1] = result.mul(0.5)
                del result
            total = total + sum(result[:10].sum() for result in results) + (weight * 2.0).sum()
            total.backward()
            weight.grad = None
            found.add(total.item())
            del results, made, total
        del ballast
    job.end(runtime, sorted(found))


if __name__ == "__main__":
    main()
