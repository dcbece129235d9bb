"""scvi-tools: loaders of its own classes over annotated matrices, and a trainer of Lightning's."""

import anndata
import numpy as np
import pytest
import scipy.sparse
import scvi

from frameworks import loader_ways, training
from parity.describe import describe

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture
def cells():
    """Counts of genes, in a sparse matrix: as many cells as leave no batch of one."""
    counts = np.random.default_rng(0).poisson(2, (45, 10)).astype(np.float32)
    found = anndata.AnnData(scipy.sparse.csr_matrix(counts))
    found.obs["batch"] = [f"{index % 2}" for index in range(45)]
    found.obs["kind"] = ["unknown" if index % 3 == 0 else f"{index % 2}" for index in range(45)]
    return found


def trained(model_class, cells):
    scvi.settings.seed = 3
    model = model_class(cells, n_hidden=8, n_latent=2)
    model.train(2, batch_size=8, train_size=0.8, check_val_every_n_epoch=1, **QUIET)
    history = {name: values.iloc[:, 0].tolist() for name, values in model.history.items()}
    assert "elbo_validation" in history
    return model, [history, training.weights(model.module)]


@loader_ways.INSTALL_ONLY
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_model_of_cells(compare, cells, monkeypatch, workers, persistent):
    monkeypatch.setattr(scvi.settings, "_dl_num_workers", workers)
    monkeypatch.setattr(scvi.settings, "_dl_persistent_workers", persistent and workers > 0)

    def program(way):  # noqa: ARG001
        scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
        model, found = trained(scvi.model.SCVI, cells)
        return [found, model.get_latent_representation(batch_size=16).tolist()]

    ours = compare(program, workers=workers)
    assert {one.loader for one in ours.reports} == {"scvi.dataloaders._ann_dataloader.AnnDataLoader"}


@loader_ways.INSTALL_ONLY
def test_a_model_of_cells_some_of_which_have_a_name(compare, cells, monkeypatch):
    """The loader of such a model reads from several loaders."""
    monkeypatch.setattr(scvi.settings, "_dl_num_workers", 2)

    def program(way):  # noqa: ARG001
        scvi.model.SCANVI.setup_anndata(cells, labels_key="kind", unlabeled_category="unknown")
        return trained(scvi.model.SCANVI, cells)[1]

    compare(program)


def test_one_loader(compare, cells):
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    manager = scvi.model.SCVI(cells).adata_manager

    def program(way):
        loader = way.loader(
            scvi.dataloaders.AnnDataLoader, manager, batch_size=7, shuffle=True, num_workers=2
        )
        return [describe(batch) for _ in "ab" for batch in loader]

    compare(program)
