"""Jobs that train on graphs, points, dynamics and sequences."""

import torch

from jobs import job, trains


@job("marked", "detected")
def geometric_attends(device):
    """Batches of graphs of as many nodes and edges as there happen to be."""
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GATConv, GCNConv, global_mean_pool

    attend, mix, read = GATConv(16, 64, heads=4), GCNConv(256, 128), torch.nn.Linear(128, 5)
    model = torch.nn.ModuleList([attend, mix, read])

    def graph(generator):
        nodes = int(torch.randint(20, 120, (), generator=generator))
        edges = torch.randint(0, nodes, (2, 4 * nodes), generator=generator)
        kind = torch.randint(0, 5, (1,), generator=generator)
        return Data(x=torch.randn(nodes, 16, generator=generator), edge_index=edges, y=kind)

    def loss_of(generator):
        batch = Batch.from_data_list([graph(generator) for _ in range(8)]).to(device)
        hidden = mix(attend(batch.x, batch.edge_index).relu(), batch.edge_index).relu()
        return torch.nn.functional.cross_entropy(read(global_mean_pool(hidden, batch.batch)), batch.y)

    return trains(model, device, loss_of)


@job("marked")
def e3nn_forces(device):
    """Products of tensors that TorchScript has compiled; the loss holds the energy's gradient."""
    from e3nn.nn import FullyConnectedNet
    from e3nn.o3 import FullyConnectedTensorProduct, Irreps, spherical_harmonics

    directions = Irreps.spherical_harmonics(2)
    kinds = [Irreps("4x0e"), Irreps("16x0e+8x1o+4x2e"), Irreps("16x0e+8x1o+4x2e"), Irreps("1x0e")]

    class Convolution(torch.nn.Module):
        def __init__(self, before, after):
            super().__init__()
            self.product = FullyConnectedTensorProduct(before, directions, after, shared_weights=False)
            self.weights = FullyConnectedNet([8, 32, self.product.weight_numel], torch.relu)

        def forward(self, nodes, pairs, harmonics, distances):
            messages = self.product(nodes[pairs[0]], harmonics, self.weights(distances))
            return messages.new_zeros(len(nodes), messages.shape[1]).index_add(0, pairs[1], messages)

    layers = torch.nn.ModuleList(Convolution(*kinds[index : index + 2]) for index in range(3))

    def loss_of(generator):
        atoms = torch.randn(40, 4, generator=generator).to(device)
        places = torch.randn(40, 3, generator=generator).to(device).requires_grad_()
        pairs = torch.randint(0, 20, (2, 400), generator=generator).add(torch.tensor([[0], [20]])).to(device)
        apart = places[pairs[0]] - places[pairs[1]]
        harmonics = spherical_harmonics(directions, apart, True, "component")
        near = torch.exp(-((apart.norm(dim=1, keepdim=True) - torch.linspace(0, 3, 8, device=device)) ** 2))
        for layer in layers:
            atoms = layer(atoms, pairs, harmonics, near)
        energy = atoms.sum()
        (forces,) = torch.autograd.grad(energy, places, create_graph=True)
        return forces.square().mean() + energy.square()

    return trains(layers, device, loss_of)


@job("marked")
def gpytorch_exact(device):
    """A Gaussian process: matrices of every point with every other, and their Cholesky factors."""
    from gpytorch.distributions import MultivariateNormal
    from gpytorch.kernels import RBFKernel, ScaleKernel
    from gpytorch.likelihoods import GaussianLikelihood
    from gpytorch.means import ConstantMean
    from gpytorch.mlls import ExactMarginalLogLikelihood
    from gpytorch.models import ExactGP

    points = torch.rand(900, 3, generator=torch.Generator().manual_seed(2)).to(device)
    values, likelihood = (6 * points.sum(1)).sin(), GaussianLikelihood().to(device)

    class Process(ExactGP):
        def __init__(self):
            super().__init__(points, values, likelihood)
            self.mean, self.kernel = ConstantMean(), ScaleKernel(RBFKernel(ard_num_dims=3))

        def forward(self, points):
            return MultivariateNormal(self.mean(points), self.kernel(points))

    process = Process()
    marginal = ExactMarginalLogLikelihood(likelihood, process)
    return trains(process, device, lambda _: -marginal(process(points), values))


@job("marked", "detected")
def torchdiffeq_adjoint(device):
    """An equation that is solved there and back, in steps as long as the error allows."""
    from torchdiffeq import odeint_adjoint

    layers = [torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 32)]

    class Slope(torch.nn.Sequential):
        def forward(self, _, place):
            return super().forward(place**3)

    slope, times = Slope(*layers), torch.linspace(0, 1, 5).to(device)

    def loss_of(generator):
        start = torch.randn(256, 32, generator=generator).to(device)
        return (odeint_adjoint(slope, start, times, rtol=1e-3, atol=1e-3)[-1] - start).abs().mean()

    return trains(slope, device, loss_of)


@job("marked")
def torch_packs(device):
    """A recurrent net over sequences of lengths of their own, packed: no iteration is another one's program."""
    from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

    recur, read = torch.nn.LSTM(32, 128, 2, dropout=0.2), torch.nn.Linear(128, 10)

    def loss_of(generator):
        lengths = torch.randint(5, 40, (8,), generator=generator)
        sequences = [torch.randn(int(length), 32, generator=generator).to(device) for length in lengths]
        states, _ = pad_packed_sequence(recur(pack_sequence(sequences, enforce_sorted=False))[0])
        last = states[lengths.to(device) - 1, torch.arange(8, device=device)]
        return torch.nn.functional.cross_entropy(read(last), torch.randint(0, 10, (8,), generator=generator).to(device))

    return trains(torch.nn.ModuleList([recur, read]), device, loss_of)


@job("marked")
def torch_searches_lines(device):
    """L-BFGS, whose steps evaluate the loss as often as the search along a line takes."""
    layers = [torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512), torch.nn.Tanh(), torch.nn.Linear(512, 1)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=6, history_size=4, line_search_fn="strong_wolfe")
    points = torch.randn(512, 64, generator=torch.Generator().manual_seed(1)).to(device)
    values = points.sin().sum(1, keepdim=True)

    def closure():
        optimizer.zero_grad()
        loss = (model(points) - values).square().mean()
        loss.backward()
        return loss

    return lambda _: optimizer.step(closure).detach(), [model]
