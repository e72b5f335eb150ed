"""Small Transformers in float64, and batches of sentences for them."""
import torch

from projects.deep.deep.residuals import RESIDUALS
from projects.translation.translation import TranslationModel, UNTransformer
from projects.translation.translation.text.ids import EOS, PAD

SCHEMES = sorted(RESIDUALS.module_dict)
WITHOUT_NORM = ('RFixup', 'ReZero', 'ScaledResidual', 'TFixup')
ARCH = dict(encoder_layers=2, decoder_layers=3, embed_dims=16, feedforward_channels=24, num_heads=2)
VOCABULARY = 12


def backbone_cfg(residual='PreNorm', norm='UN', **kwargs):
    norm_cfg = {} if residual in WITHOUT_NORM else dict(norm_cfg=dict(type=norm))
    settings = dict(vocab_size=VOCABULARY, arch=ARCH, dropout=0., residual_cfg=dict(type=residual))
    return dict(type='UNTransformer', **{**settings, **norm_cfg, **kwargs})


def transformer(residual='PreNorm', norm='UN', **kwargs):
    cfg = backbone_cfg(residual, norm, **kwargs)
    del cfg['type']
    return UNTransformer(**cfg).double()


def task(residual='PreNorm', norm='UN', beam=4, length_penalty=1., **kwargs):
    return TranslationModel(backbone_cfg(residual, norm, **kwargs), beam=beam, length_penalty=length_penalty).double()


def randomize(model, seed=0):
    """Statistics, scales and shifts as of a trained model, and BranchNorm in the middle of its ramp."""
    generator = torch.Generator().manual_seed(seed)

    def rand(tensor):
        return torch.rand(tensor.shape, generator=generator, dtype=torch.float64)

    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith('updates'):
                tensor.fill_(1500)
            elif name.endswith('bias'):
                tensor.copy_(rand(tensor) - 0.5)
            elif tensor.is_floating_point() and ('norm' in name or 'residual' in name or '.scale.' in name):
                tensor.copy_(rand(tensor) + 0.5)
    return model


def sentences(*lengths, seed=0):
    """Ids of words, each row with its end and padded: `(N, longest)`."""
    generator = torch.Generator().manual_seed(seed)
    batch = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(batch, lengths, strict=True):
        row[:length] = torch.randint(4, VOCABULARY, (length, ), generator=generator)
        row[length - 1] = EOS
    return batch
