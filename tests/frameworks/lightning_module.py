"""Modules of the Lightning tests and script."""

from typing import Any

import lightning
import torch
from torch import nn

from frameworks import training


class Classifier(lightning.LightningModule):
    """Notes every loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = training.small_model()
        self.losses: list[float] = []
        self.classes: list[list[int]] = []

    def _loss(self, batch: Any) -> torch.Tensor:
        features, classes = batch
        loss = nn.functional.cross_entropy(self.net(features), classes)
        self.losses.append(loss.item())
        self.classes.append(classes.tolist())
        return loss

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:  # noqa: ARG002
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_index: int, dataloader_idx: int = 0) -> None:  # noqa: ARG002
        self.log("loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Pairs(Classifier):
    """Trains on two loaders at once."""

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:  # noqa: ARG002
        return self._loss(batch["first"]) + self._loss(batch["second"])


class Watching(lightning.LightningModule):
    """Notes the numbers of the samples of each step, and may stop the program behind a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = training.small_model()
        self.seen: list[Any] = []
        self.stop_after = stop_after

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:  # noqa: ARG002
        if len(self.seen) == self.stop_after:
            raise StoppedError
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        self.seen.append([numbers.tolist() for _, numbers in parts])
        losses = [
            nn.functional.cross_entropy(self.net(features), numbers % training.CLASSES)
            for features, numbers in parts
        ]
        return torch.stack(losses).sum()

    def validation_step(self, batch: Any, batch_index: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class StoppedError(Exception):
    """The program ends here."""
