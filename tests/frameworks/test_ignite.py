"""ignite: engines over a loader that was passed in, and `auto_dataloader`, which builds torch's."""

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import EpochOutputStore

from frameworks import loader_ways, training


def train(loader, check):
    model = training.small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Engine(lambda _engine, batch: training.step(model, optimizer, batch))
    evaluator = Engine(lambda _engine, batch: model(batch[0]).sum().item())
    losses, sums = [], EpochOutputStore()
    sums.attach(evaluator)
    seen = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate():
        evaluator.run(check)
        seen.append(list(sums.data))

    trainer.run(loader, max_epochs=2)
    return [losses, seen, training.weights(model)]


def test_an_engine_over_our_loader(compare):
    def program(way):
        loader = way.DataLoader(training.Points(), batch_size=5, shuffle=True, num_workers=2)
        check = way.DataLoader(training.Points(9), batch_size=4, num_workers=1, persistent_workers=True)
        return train(loader, check)

    compare(program)


def test_a_stream_of_unknown_length_that_goes_round(compare):
    """With `epoch_length` set the engine asks for a new iterator wherever the old one ends."""

    def program(way):
        loader = way.DataLoader(training.Stream(10), batch_size=4, num_workers=2)
        losses = []
        engine = Engine(lambda _engine, batch: losses.append(batch[0].sum().item()))
        engine.run(loader, max_epochs=2, epoch_length=7)
        assert len(losses) == 14
        return losses

    ours = compare(program)
    assert len(ours.made) > 1


@loader_ways.INSTALL_ONLY
def test_auto_dataloader(compare):
    def program(way):  # noqa: ARG001
        loader = idist.auto_dataloader(training.Points(), batch_size=5, shuffle=True, num_workers=2)
        check = idist.auto_dataloader(training.Points(9), batch_size=4, num_workers=1)
        return train(loader, check)

    compare(program)
