"""skorch: the classes of the loaders are arguments of the net."""

import numpy as np
import torch
from skorch import NeuralNetClassifier

from frameworks import training


def fit(way):
    net = NeuralNetClassifier(
        training.small_model(),
        criterion=torch.nn.CrossEntropyLoss,
        max_epochs=2,
        batch_size=8,
        iterator_train=way.DataLoader,
        iterator_valid=way.DataLoader,
        iterator_train__shuffle=True,
        iterator_train__num_workers=2,
        iterator_valid__num_workers=1,
        verbose=0,
        **({"iterator_train__max_shared_bytes": 1 << 24} if way.name == "class" else {}),
    )
    features, classes = zip(*(training.point(index) for index in range(40)), strict=True)
    net.fit(np.stack([row.numpy() for row in features]), np.array(classes, dtype=np.int64))
    predicted = net.predict_proba(torch.stack(features)).tolist()
    history = [net.history[:, name] for name in ("train_loss", "valid_loss", "valid_acc")]
    return [history, predicted, training.weights(net.module_)]


def test_fit_and_predict(compare):
    ours = compare(fit)
    # Two epochs of training and validation, and a prediction.
    assert len(ours.made) == 5


def test_a_dataset_in_place_of_arrays(compare):
    def program(way):
        net = NeuralNetClassifier(
            training.small_model(),
            criterion=torch.nn.CrossEntropyLoss,
            max_epochs=2,
            batch_size=6,
            train_split=None,
            iterator_train=way.DataLoader,
            iterator_train__num_workers=2,
            iterator_train__persistent_workers=True,
            verbose=0,
        )
        net.fit(training.Points(), y=None)
        return [net.history[:, "train_loss"], training.weights(net.module_)]

    compare(program)
