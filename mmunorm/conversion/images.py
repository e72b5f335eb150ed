"""The images that users pass: a tensor, batches or a DataLoader; as batches, or as single images by index."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from .report import ConversionError

MEASURED = 512  # images of a DataLoader that statistics are taken from
FEW = 8  # images; fewer are suspicious
LARGE = 20.  # normalized images have smaller values


class _LoaderImages(Sequence):
    """The single images of a DataLoader's data set."""

    def __init__(self, loader: DataLoader):
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader.dataset)

    def __getitem__(self, index: int) -> Tensor:
        return _input(self.loader.collate_fn([self.loader.dataset[index]]))[0]


def single_images(images, name: str) -> Sequence:
    """Single images by index: a tensor `(N, C, H, W)` or a data set of images, or those of batches or a DataLoader.

    Batches are held in memory. A ConversionError if there is no image.
    """
    if isinstance(images, DataLoader) and not isinstance(images.dataset, IterableDataset):
        found = _LoaderImages(images)
    elif isinstance(images, (Tensor, Dataset)):
        found = images
    else:
        found = [image for batch in images for image in _images(batch)] if isinstance(images, Iterable) else []
    if not len(found):
        raise ConversionError(f'{name}: {type(images).__name__}; must be a tensor (N, C, H, W), batches or a '
                              'DataLoader, with at least one image')
    return found


def all_batches(batches) -> list:
    """Batches as a list: a tensor or Mapping is one; of a DataLoader, those of the first 512 samples."""
    if isinstance(batches, (Tensor, Mapping)):
        return [batches]
    if not isinstance(batches, DataLoader):
        return list(batches)
    taken, samples = [], 0
    for batch in batches:
        taken.append(batch)
        samples += num_samples(batch)
        if samples >= MEASURED:
            break
    return taken


def num_samples(batch) -> int:
    """Number of samples in a batch; 0 if unknown."""
    found = _input(batch)
    return len(found) if isinstance(found, (Tensor, list)) else 0


def _input(batch):
    """The images of a batch: itself, the first of a tuple or list, or of a Mapping `inputs` or the first image."""
    if isinstance(batch, (tuple, list)) and batch:
        return _input(batch[0])
    if isinstance(batch, Mapping):
        tensors = (value for value in batch.values() if isinstance(value, Tensor) and value.dim() >= 3)
        return batch['inputs'] if 'inputs' in batch else next(tensors, None)
    return batch


def batches_of(images: Sequence, batch_size: int, device: torch.device, name: str) -> Iterator[Tensor]:
    """Floating-point batches of all images."""
    for start in range(0, len(images), batch_size):
        stop = min(start + batch_size, len(images))
        yield floating(batch_of(images, range(start, stop), device, name), name)


def batch_of(images: Sequence, indices: Iterable[int], device: torch.device, name: str) -> Tensor:
    """A batch of images `(N, C, H, W)` on a device; smaller images are padded with zeros at the bottom and right."""
    found = []
    for i in indices:
        image = images[i]
        if not isinstance(image, Tensor) or image.dim() != 3:
            what = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise ConversionError(f'{name}[{i}]: {what}; must be a tensor (C, H, W)')
        found.append(image.to(device))
    height, width = (max(image.shape[dim] for image in found) for dim in (1, 2))
    return torch.stack([F.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])) for image in found])


def floating(images: Tensor, name: str) -> Tensor:
    if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point():
        what = f'{tuple(images.shape)} {images.dtype}' if isinstance(images, Tensor) else type(images).__name__
        raise ConversionError(f'{name}: {what}; must be floating-point, normalized images (N, C, H, W)')
    return images


def image_warnings(batches: Iterable) -> tuple[str, ...]:
    """A line on what is suspicious about images, or none; other batches are ignored."""
    images = [image for batch in batches for image in _images(batch)]
    if not images:
        return ()
    notes = [f'only {len(images)}, where a few hundred are usual'] if len(images) < FEW else []
    floats = [image for image in images if image.is_floating_point()]
    largest = max((image.abs().max().item() for image in floats), default=0.)
    if largest > LARGE:
        notes.append(f'values up to {largest:.0f}: normalize images as in the training of the model')
    return (f'suspicious images: {"; ".join(notes)}', ) if notes else ()


def _images(batch) -> list[Tensor]:
    """The single images of a batch; those of mmengine may have several sizes, in a list."""
    images = _input(batch)
    is_images = isinstance(images, list) or isinstance(images, Tensor) and images.dim() == 4
    return [image for image in images if isinstance(image, Tensor) and image.numel()] if is_images else []
