"""Graph classification with PyTorch Geometric: the pool is the only line that differs from any other model."""

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv

from flowpool import FlowPool
from flowpool.lab.datasets import load_dataset


class Classifier(nn.Module):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.first, self.second = GCNConv(num_features, 16), GCNConv(16, 8)
        self.pool = FlowPool(in_channels=8, num_points=3, size="append")
        self.norm = nn.BatchNorm1d(self.pool.out_channels)
        self.head = nn.Linear(self.pool.out_channels, num_classes)

    def forward(self, data: Batch) -> Tensor:
        x = torch.relu(self.first(data.x, data.edge_index))
        x = torch.relu(self.second(x, data.edge_index))
        return self.head(self.norm(self.pool(x, data.batch)))


torch.manual_seed(0)
dataset = load_dataset("MUTAG")
graphs = [Data(x=graph.x, edge_index=graph.edge_index, y=torch.tensor(graph.y)) for graph in dataset]
order = torch.randperm(len(graphs)).tolist()
train = DataLoader([graphs[i] for i in order[:140]], batch_size=30, shuffle=True)
test = DataLoader([graphs[i] for i in order[140:]], batch_size=68)

model = Classifier(dataset.num_features, dataset.num_classes)
optimiser = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-2)
losses = []
for epoch in range(1, 11):
    total = 0.0
    for data in train:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(data), data.y)
        loss.backward()
        optimiser.step()
        total += loss.item() * data.num_graphs
    losses.append(total / len(train.dataset))
    print(f"epoch {epoch:2}: loss {losses[-1]:.3f}; {model.pool.report}")

model.eval()
with torch.no_grad():
    correct = sum(int((model(data).argmax(1) == data.y).sum()) for data in test)
    held_out = next(iter(test))
    score = model(held_out).diff(dim=1).squeeze(1)
print(f"one split, for show: held-out accuracy {correct / len(test.dataset):.2f}")

figure = Figure(figsize=(8, 3.2), layout="constrained")
curve, histogram = figure.subplots(1, 2)
curve.plot(range(1, 11), losses, marker="o", color="#0072b2")
curve.set(xlabel="epoch", ylabel="training loss")
for label, colour in enumerate(("#0072b2", "#d55e00")):
    histogram.hist(
        score[held_out.y == label], bins=12, alpha=0.7, color=colour, label=f"class {dataset.class_names[label]}"
    )
histogram.set(xlabel="score of held-out molecules", ylabel="molecules")
histogram.legend()
figure.savefig("train_mutag.png", dpi=110)
