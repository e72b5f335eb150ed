"""The base class of tasks: what the inputs and outputs of a file mean."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor, nn

from ..comparison import Differences, tensor_differences

# `call(part, array)` runs a signature of a file on a channels-last float32 input and returns its outputs by name.
Call = Callable[[str, np.ndarray], dict[str, np.ndarray]]


class Host(ABC):
    """What a machine computes around the signatures of a file whose runtime has no operators for it."""

    def __init__(self, meta: dict, call: Call):
        self.meta, self.call = meta, call

    @abstractmethod
    def first(self, *arrays: np.ndarray) -> tuple[str, np.ndarray]:
        """The name of the first signature, and its input, for the inputs of the whole model."""

    @abstractmethod
    def __call__(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """The outputs of the whole model for its inputs."""


class Task:
    """One kind of model."""
    name: str  # `task` in the metadata of a file
    host: type[Host]

    def parts(self, graph: nn.Module, images: Tensor) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
        """A graph as the signatures of a file: networks with channels-last inputs, each with a sample of these.

        The first layer normalizes the pixels. `images` is a sample `(N, 3, H, W)` float32.
        """
        raise NotImplementedError(f'a file of {self.name} has no signatures')

    def check_bytes(self, meta: dict) -> None:
        """Raises a PreflightError if the input of a model cannot be the bytes of an image."""

    def differences(self, got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> Differences:
        """Compares the outputs of a file with torch's for the same images, by name."""
        return tensor_differences(got, expected)


class OpenMMLabTask(Task, ABC):
    """A task of models of mmpretrain and mmdet, whose images are preprocessed as their config says."""

    @abstractmethod
    def graph(self, model: nn.Module) -> nn.Module:
        """The model, in eval mode, as a graph with the same parameters; its `meta` is what its :class:`Host` needs.

        Raises a PreflightError if the model has a part that cannot be exported.
        """

    def shape(self, model: nn.Module, shape: Sequence[int]) -> tuple[int, ...]:
        """Height and width of the file's input for those of images."""
        return tuple(shape)

    def meta(self, model: nn.Module) -> dict:
        """What the metadata of a file has for this task alone."""
        return {}

    def check_any_size(self, model: nn.Module) -> None:
        """Raises a PreflightError if the model does not take images of any size."""

    @abstractmethod
    def preprocessed(self, model: nn.Module, graph: nn.Module, inputs: tuple[Tensor, ...],
                     expected: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """What a graph, `expected` for `inputs`, and the model with its `data_preprocessor` compute for some images."""

    @abstractmethod
    def batch(self, images: Sequence[np.ndarray], meta: dict) -> tuple[np.ndarray, ...]:
        """The inputs of a file for uint8 images `(3, h, w)`; a PreflightError if one does not fit."""

    def predict(self, sample, outputs: dict[str, np.ndarray], meta: dict) -> None:
        """Writes the outputs for an image to a data sample of OpenMMLab."""
        raise NotImplementedError(f'a file of {self.name} has no predictions')


def as_bytes(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The images of a batch, uint8, without their padding if there are `sizes`."""
    images, *sizes = inputs
    sides = sizes[0].long().tolist() if sizes else [images.shape[2:]] * len(images)
    return [image[:, :height, :width].byte() for image, (height, width) in zip(images, sides, strict=True)]
