"""Graphs of different sizes, joined into one large graph for each batch, as graph libraries do it.

``python examples/programs/graphs.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

GRAPHS, DISTINCT = 256_000, 1024


@dataclass
class Graph:
    """Features of the nodes, pairs of nodes, a target; in a batch also the graph that each node is of."""

    x: torch.Tensor
    edge_index: torch.Tensor
    y: torch.Tensor
    batch: torch.Tensor | None = None


class Molecules(Dataset[Graph]):
    """Graphs of 6 to 29 nodes that are in memory."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.graphs = []
        for number in range(DISTINCT):
            nodes = 6 + number % 24
            edges = torch.randint(0, nodes, (2, 2 * nodes), generator=generator)
            self.graphs.append(Graph(torch.rand(nodes, 9, generator=generator), edges, torch.rand(1)))

    def __len__(self) -> int:
        return GRAPHS

    def __getitem__(self, index: int) -> Graph:
        return self.graphs[index % DISTINCT]


def collate(graphs: list[Graph]) -> Graph:
    """Joins the graphs: edges count the nodes of all graphs before theirs."""
    sizes = torch.tensor([len(graph.x) for graph in graphs])
    starts = (sizes.cumsum(0) - sizes).tolist()
    return Graph(
        x=torch.cat([graph.x for graph in graphs]),
        edge_index=torch.cat(
            [graph.edge_index + start for graph, start in zip(graphs, starts, strict=True)], dim=1
        ),
        y=torch.cat([graph.y for graph in graphs]),
        batch=torch.repeat_interleave(torch.arange(len(graphs)), sizes),
    )


def make_loader(loader_class: type[DataLoader[Any]] = DataLoader, num_workers: int = 0) -> Any:
    """Makes the loader of an epoch."""
    return loader_class(Molecules(), batch_size=16, shuffle=True, collate_fn=collate, num_workers=num_workers)


if __name__ == "__main__":
    import ringloader

    nodes = 0
    for graph in make_loader(ringloader.DataLoader, 2):
        nodes += len(graph.x)
    print(f"{nodes} nodes")
