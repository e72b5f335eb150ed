"""Fold rules of the translation model: examples, residual streams, and its shared weight."""
import torch

from mmunorm.fusion import Example, JointFold, fold_rule
from projects.deep.deep.residuals.folding import branch_factors, post_norm_streams

from .model import TranslationModel
from .transformer import DecoderLayer, EncoderLayer, UNTransformer

fold_rule(EncoderLayer, DecoderLayer)(branch_factors)


def _sentences(backbone):
    """Two sentences and prefixes of their translations, the second of each shorter."""
    ids = torch.randint(4, backbone.vocab_size, (2, 2, 9), generator=torch.Generator().manual_seed(0))
    ids[:, 1, 6:] = 0
    return ids.to(next(backbone.parameters()).device)


@fold_rule(UNTransformer, methods=())
def un_transformer(model):
    yield Example(lambda model: model(*_sentences(model)))
    for stack in ('encoder', 'decoder'):
        yield from post_norm_streams(getattr(model, stack), stack)
    yield JointFold(copies=('output', ))


@fold_rule(TranslationModel, methods=())
def translation_model(model):
    def call(model):
        source, target = _sentences(model.backbone)
        model.extra_length = -10  # of a copy: translations of 8 and 2 tokens take the code paths of longer ones
        model(source, mode='predict')
        return model(source, target)

    yield Example(call)
