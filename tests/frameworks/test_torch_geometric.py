"""torch_geometric: loaders that are classes of torch's, and batches that are graphs."""

import importlib.util
import os

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader, DynamicBatchSampler, NeighborLoader, NodeLoader
from torch_geometric.sampler import BaseSampler, SamplerOutput

from frameworks import loader_ways
from parity.describe import describe

SAMPLES_NEIGHBOURS = any(importlib.util.find_spec(name) for name in ("pyg_lib", "torch_sparse"))


def graphs(count=18):
    made = []
    for index in range(count):
        nodes = 2 + index % 4
        ring = torch.arange(nodes)
        edges = torch.stack([ring, ring.roll(-1)])
        made.append(Data(x=torch.full((nodes, 3), float(index)), edge_index=edges, y=torch.tensor([index])))
    return made


def one_graph(nodes=40):
    ring = torch.arange(nodes)
    edges = torch.cat([torch.stack([ring, ring.roll(-step)]) for step in (1, 3)], dim=1)
    return Data(x=torch.arange(3.0 * nodes).reshape(nodes, 3), edge_index=edges, y=ring % 4)


def content(batch):
    return [type(batch).__name__, *((key, describe(value)) for key, value in sorted(batch.to_dict().items()))]


class PythonSampler(BaseSampler):
    """Takes one neighbour of each seed at random, without compiled extras."""

    def __init__(self, graph):
        self.edges = graph.edge_index

    def sample_from_nodes(self, index, **_):
        seeds = index.node
        chosen = []
        for row in seeds.tolist():
            outgoing = (self.edges[0] == row).nonzero().flatten()
            chosen.append(int(outgoing[torch.randint(len(outgoing), ())]))
        edge = torch.tensor(chosen)
        nodes, inverse = torch.unique(torch.cat([seeds, self.edges[1][edge]]), return_inverse=True)
        row, col = inverse[: len(seeds)], inverse[len(seeds) :]
        return SamplerOutput(node=nodes, row=row, col=col, edge=edge, metadata=(index.input_id, index.time))

    def sample_from_edges(self, index, **_):
        raise NotImplementedError


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"follow_batch": ["x"]}])
def test_batches_of_graphs(compare, options):
    def program(way):
        loader = way.loader(DataLoader, graphs(), batch_size=4, shuffle=True, num_workers=2, **options)
        return [content(batch) for _ in range(2) for batch in loader]

    compare(program)


def test_graphs_are_collated_into_shared_memory(way_name):
    """PyG allocates its own shared memory for large batches: it lies in the ring's, and is copied nowhere."""
    large = [Data(x=torch.full((2000, 16), float(index))) for index in range(6)]
    with loader_ways.use(way_name) as way:
        loader = way.loader(DataLoader, large, batch_size=3, num_workers=1)
        sums = [batch.x.sum().item() for batch in loader]
    assert sums == [2000 * 16 * 3.0, 2000 * 16 * 12.0]
    (made,) = way.made
    assert made.counters()["in_place"] >= 2


def test_a_sampler_of_batches_by_size(compare):
    def program(way):
        sampler = DynamicBatchSampler(graphs(), max_num=12)
        loader = way.loader(DataLoader, graphs(), batch_sampler=sampler, num_workers=2)
        return [content(batch) for batch in loader]

    compare(program)


@pytest.mark.parametrize("in_worker", [False, True])
def test_node_loader(compare, in_worker):
    """Filtered in the main process, its own iterator stands around ours."""

    def program(way):
        graph = one_graph()
        loader = way.loader(
            NodeLoader,
            graph,
            PythonSampler(graph),
            input_nodes=torch.arange(0, 40, 2),
            filter_per_worker=in_worker,
            batch_size=6,
            shuffle=True,
            num_workers=2,
        )
        return [content(batch) for _ in range(2) for batch in loader]

    compare(program)


def test_worker_affinity(compare):
    """`enable_cpu_affinity` swaps `worker_init_fn` for the time of a `with`."""
    core = min(os.sched_getaffinity(0))

    def where(graph):
        graph.cores = torch.tensor(sorted(os.sched_getaffinity(0)))
        return graph

    def program(way):
        graph = one_graph()
        loader = way.loader(
            NodeLoader,
            graph,
            PythonSampler(graph),
            filter_per_worker=True,
            transform=where,
            batch_size=20,
            num_workers=1,
        )
        with loader.enable_cpu_affinity(loader_cores=[core]):
            inside = [content(batch) for batch in loader]
            cores = next(iter(loader)).cores
        assert cores.tolist() == [core]
        return [inside, [content(batch) for batch in loader]]

    compare(program)


@pytest.mark.skipif(not SAMPLES_NEIGHBOURS, reason="NeighborLoader needs pyg-lib or torch-sparse")
def test_neighbor_loader(compare):
    def program(way):
        loader = way.loader(NeighborLoader, one_graph(), num_neighbors=[2, 2], batch_size=8, num_workers=2)
        return [content(batch) for batch in loader]

    compare(program)
