"""The images that users pass: a tensor, a data set, a DataLoader or batches, as single images or as batches."""
from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from .report import ConversionError

MEASURED = 512  # maximum number of images of a data set that statistics are taken from
STACKED = 16  # images in a batch of single images
MAX_CHANNELS = 4  # of an image; a tensor with more may be a batch of tokens
FEW = 8  # different images; fewer are suspicious
LARGE = 20.  # normalized images have smaller values


class _LoaderImages(Sequence):
    """The images of a DataLoader as batches of one, by index, in the order of its data set."""

    def __init__(self, loader: DataLoader):
        self.loader = loader
        # At most once each: samplers of mmengine do not end.
        self.indices = sorted(set(islice(loader.sampler, len(loader.dataset))))
        if hasattr(loader.dataset, 'paths'):
            self.paths = [loader.dataset.paths[i] for i in self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Tensor:
        return _image(self.batch([index]))[0]

    def batch(self, indices: Sequence[int]):
        return self.loader.collate_fn([self.loader.dataset[self.indices[i]] for i in indices])


def single_images(images, name: str) -> Sequence:
    """Single images by index, of what :func:`mmunorm.adapt` takes; what cannot be indexed is held in memory.

    Raises:
        ConversionError: there is none.
    """
    kind = type(images).__name__
    if _has_indices(images):
        images = _LoaderImages(images)
    elif isinstance(images, Mapping):
        images = [images]
    elif not _is_sequence(images):
        images = list(images) if isinstance(images, Iterable) else []
    if not len(images):
        raise ConversionError(f'{name}: {kind}; must be a tensor (N, C, H, W), images (C, H, W), batches, a data set '
                              'or a DataLoader, with at least one image')
    first = None if isinstance(images, (Tensor, _LoaderImages)) else _image(images[0])
    if isinstance(first, Tensor) and first.dim() == 4:
        return [image for i in range(len(images)) for image in _image(images[i])]
    return images


def all_batches(images, takes: Callable[[object], bool]) -> list:
    """Batches of what :func:`mmunorm.convert_norms` takes; `takes` returns whether the model takes a batch.

    Of a data set, or the DataLoader of one, these are up to 512 images, evenly spaced.
    """
    if isinstance(images, (Tensor, Mapping)):
        return [images]
    if _has_indices(images) and len(images.dataset) > MEASURED:
        loaded, size = _LoaderImages(images), images.batch_size or STACKED
        chosen = evenly_spaced(len(loaded), MEASURED)
        return [loaded.batch(chosen[start:start + size]) for start in range(0, len(chosen), size)]
    if not _is_sequence(images):
        images = list(images)
    first = _image(images[0]) if len(images) else None
    # Three dimensions are an image, or a batch of tokens; convolutions take a single image, too.
    is_single = isinstance(first, Tensor) and first.dim() == 3 and (isinstance(images, Dataset) or takes(
        default_collate([images[0]])) and (len(first) <= MAX_CHANNELS or not takes(images[0])))
    if not is_single:
        return [images[i] for i in range(len(images))]
    number = len(images) if isinstance(images, (list, tuple)) else MEASURED
    return _stacked([images[i] for i in evenly_spaced(len(images), number)])


def _stacked(samples: list) -> list:
    """Batches of samples; successive images of equal shape share a batch."""
    batches = []
    for _, group in groupby(samples, lambda sample: _image(sample).shape):
        group = list(group)
        batches += [default_collate(group[start:start + STACKED]) for start in range(0, len(group), STACKED)]
    return batches


def _has_indices(images) -> bool:
    """Whether this is a DataLoader whose samples can be read by index."""
    return (isinstance(images, DataLoader) and images.batch_sampler is not None
            and not isinstance(images.dataset, IterableDataset))


def _is_sequence(images) -> bool:
    return hasattr(images, '__len__') and hasattr(images, '__getitem__')


def _image(sample):
    """The image or images of a sample or batch: itself, the first of a tuple, or a tensor of a Mapping."""
    if isinstance(sample, (tuple, list)) and sample:
        return _image(sample[0])
    if isinstance(sample, Mapping):
        tensors = [value for value in sample.values() if isinstance(value, Tensor) and value.dim() >= 3]
        return tensors[0] if tensors else sample
    return sample


def batches_of(images: Sequence, batch_size: int, device: torch.device, name: str) -> Iterator[Tensor]:
    """Floating-point batches of all images."""
    for start in range(0, len(images), batch_size):
        stop = min(start + batch_size, len(images))
        yield floating(batch_of(images, range(start, stop), device, name), name)


def batch_of(images: Sequence, indices: Iterable[int], device: torch.device, name: str) -> Tensor:
    """A batch of images `(N, C, H, W)` on a device; smaller images are padded with zeros at the bottom and right."""
    found = []
    for i in indices:
        image = _image(images[i])
        if not isinstance(image, Tensor) or image.dim() != 3 or found and len(image) != len(found[0]):
            what = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise ConversionError(f'{name}[{i}]: {what}; must be a tensor (C, H, W) with the C of the others')
        found.append(image.to(device))
    height, width = (max(image.shape[dim] for image in found) for dim in (1, 2))
    return torch.stack([F.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])) for image in found])


def floating(images: Tensor, name: str) -> Tensor:
    if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point():
        what = f'{tuple(images.shape)} {images.dtype}' if isinstance(images, Tensor) else type(images).__name__
        raise ConversionError(f'{name}: {what}; must be floating-point, normalized images (N, C, H, W)')
    return images


def evenly_spaced(number: int, at_most: int) -> list[int]:
    """Up to `at_most` evenly spaced indices below `number`."""
    return torch.linspace(0, number - 1, min(at_most, number)).long().tolist()


def image_warnings(batches: Iterable, few: int = FEW) -> tuple[str, ...]:
    """What is suspicious about images, such as copies of one of them, in one line each; batches of others are ignored.

    `few` is the number of different images below which it is mentioned.
    """
    images = [image for batch in batches for image in _images(batch)]
    if not images:
        return ()
    number, notes = len(images), []
    constant = sum(bool((image == image.flatten()[0]).all()) for image in images)
    different = len({zlib.crc32(image.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
                     for image in images})
    floats = [image for image in images if image.is_floating_point()]
    largest = max((image.abs().max().item() for image in floats), default=0.)
    if constant * 2 > number:
        notes.append(f'{constant} of {number} have one value everywhere')
    if different < few:
        notes.append(f'only {different} different, where a few hundred are usual')
    elif different * 2 < number:
        notes.append(f'only {different} of {number} different')
    if largest > LARGE:
        notes.append(f'values up to {largest:.0f}: normalize images as in the training of the model')
    return (f'suspicious images: {"; ".join(notes)}', ) if notes else ()


def _images(batch) -> Iterable[Tensor]:
    """The single images of a batch, also of mmengine's, with images of several sizes in a list."""
    inputs = batch.get('inputs') if isinstance(batch, Mapping) else None
    images = inputs if isinstance(inputs, (list, tuple)) else _image(batch)
    is_images = isinstance(images, (list, tuple)) or isinstance(images, Tensor) and images.dim() == 4
    return [image for image in images if isinstance(image, Tensor) and image.numel()] if is_images else []
