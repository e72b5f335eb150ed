"""Records without a training."""
import numpy as np

from projects.paper.paper.norm_record import (
    OFFLINE_GRADIENT,
    ONLINE_GRADIENT,
    NormRecordWriter,
    RecordedNorm,
    row_dtypes,
)

NAMES = ['backbone.patch_embed.norm', 'backbone.stages.0.blocks.0.norm1', 'backbone.norm3']


def write_record(folder, steps=60, norm='UN', seed=0, gradient=True):
    """A record of three layers of 30 channels: normal, log-normal and constant activations.

    Gradients are normal noise, or missing. Layer i has an outlier on each step of the second half that a
    multiple of 3 - i divides.
    """
    rng = np.random.default_rng(seed)
    layers = [RecordedNorm(name, norm, 30, OFFLINE_GRADIENT if norm == 'UN' else ONLINE_GRADIENT) for name in NAMES]
    writer = NormRecordWriter(folder / 'norm_statistics', layers,
                              dict(run=folder.name, config='some_config.py', interval=1, processes=1))
    rows, snapshot = (np.zeros(count, dtype) for count, dtype in zip((steps, 1), row_dtypes(layers), strict=True))
    rows['step'] = np.arange(1, steps + 1)
    noise = rng.standard_normal((steps, 30))
    rows['activation'] = np.concatenate([10 + noise, np.exp(noise), np.ones((steps, 30))], axis=1)
    rows['gradient'] = 1e-6 * rng.standard_normal((steps, 90)) if gradient else np.nan
    late = rows['step'] > steps // 2
    rows['outliers'] = -1 if norm != 'UN' else np.stack(
        [np.cumsum(late & (rows['step'] % (3 - i) == 0)) for i in range(3)], axis=1)
    if steps:
        # Of every third channel's mean square, the mean is half.
        snapshot['step'] = 1
        snapshot['mean'] = np.where(np.arange(90) % 3 == 0, np.sqrt(rows['activation'][0] / 2), 0)
        writer.append(rows, snapshot)
    return folder
