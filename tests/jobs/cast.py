"""A job whose layers call products that are cast (autocast) from within one operator.

Prints as JSON the losses and the sums of what it has learned."""

import job
import torch

ITERATIONS, WIDTH, LAYERS = 5, 32, 8


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden, hidden)) + hidden
        return hidden


runtime, device = job.begin(__doc__)
model = Model().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.randn(1024, WIDTH, device=device)
losses = []
for _ in range(ITERATIONS):
    with job.iteration(runtime):
        with torch.autocast(device, dtype=torch.bfloat16):
            found = model(batch)
        loss = found.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
job.end(runtime, [losses, [parameter.double().sum().item() for parameter in model.parameters()]])
