"""A small convolutional network for 64x64 colour images."""

from __future__ import annotations

from torch import nn


def make_model(classes: int) -> nn.Module:
    """Three convolutions and a linear layer: some 15 ms a step for 64 images on one core."""

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    return nn.Sequential(
        *block(3, 16, 2),
        *block(16, 32, 2),
        *block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )
