"""The translation model for mmengine's Runner: a network, its loss and its search."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from torch import Tensor

from mmunorm.norms.base import check_count

from .search import CachedDecoder, Hypothesis, beam_search
from .text.ids import BOS, PAD


@MODELS.register_module()
class TranslationModel(BaseModel):
    """Translates; trained with label-smoothed cross-entropy (arXiv 1706.03762).

    Args:
        backbone (dict): config of the network, such as `dict(type='UNTransformer', vocab_size=8000)`.
        label_smoothing (float): share of the target's probability that is uniform over tokens. Defaults to 0.1.
        beam (int): beam size; 1 is greedy search. Defaults to 4.
        length_penalty (float): p in `score / length^p`, from 0 to 10. Defaults to 1.
        **kwargs: `data_preprocessor` and `init_cfg` of mmengine's BaseModel.

    Raises:
        ValueError: an argument is out of range.
    """

    stress_obstacle = 'token ids'  # for projects/paper/tools/compare_norms.py --stress
    extra_length = 20  # tokens that a translation may have beyond twice those of its source

    def __init__(self, backbone: dict, label_smoothing: float = 0.1, beam: int = 4, length_penalty: float = 1.,
                 **kwargs):
        super().__init__(**kwargs)
        if not 0 <= label_smoothing < 1:
            raise ValueError(f'label_smoothing must be at least 0 and below 1, got {label_smoothing!r}')
        if not 0 <= length_penalty <= 10:
            raise ValueError(f'length_penalty must be from 0 to 10, got {length_penalty!r}')
        self.backbone = MODELS.build(backbone)
        self.label_smoothing = label_smoothing
        self.beam = check_count('beam', beam, minimum=1)
        self.length_penalty = length_penalty

    def forward(self, source: Tensor, target: Tensor | None = None, index: Tensor | None = None,
                mode: str = 'tensor') -> Tensor | dict | list[dict]:
        """Translates, or computes the loss.

        Args:
            source: ids `(N, S)`, int64, each row with EOS and padded on the right.
            target: ids `(N, T)`, in the same format, for 'tensor' and 'loss'. Defaults to None.
            index: `(N,)`, the line of the data set for each row. Defaults to None, for the row numbers.
            mode: 'tensor' returns the logits `(N, T', V)` of each token of the target, T' of the longest; 'loss' a dict
                of the loss, a mean over tokens, and the perplexity; 'predict' a list of dicts with `index`,
                `hypotheses` (ids without special tokens, int64 on the CPU, the best first) and their `scores`.

        Raises:
            ValueError: `mode` is unknown, or a row has no token.
        """
        if mode == 'predict':
            lines = range(len(source)) if index is None else index.tolist()
            return [dict(index=line, hypotheses=[torch.tensor(ids, dtype=torch.long) for _, ids in hypotheses],
                         scores=[score for score, _ in hypotheses])
                    for line, hypotheses in zip(lines, self.translate(source), strict=True)]
        if mode not in ('tensor', 'loss'):
            raise ValueError(f"mode must be 'tensor', 'loss' or 'predict', got {mode!r}")
        logits = self.backbone(source, shifted(target))
        if mode == 'tensor':
            return logits
        logits, labels = logits.flatten(0, 1), target[:, :logits.shape[1]].flatten()
        log_probs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        plain = F.nll_loss(log_probs, labels, ignore_index=PAD)
        smooth = -log_probs.mean(dim=-1)[labels.ne(PAD)].mean()
        return dict(loss=plain.lerp(smooth, self.label_smoothing), perplexity=plain.detach().exp())

    def translate(self, source: Tensor) -> list[list[Hypothesis]]:
        """The best translations of sources `(N, S)`: see :func:`projects.translation.translation.search.beam_search`.

        The maximum length of a translation is twice that of its source plus `extra_length` tokens.
        """
        limits = [2 * length + self.extra_length for length in source.ne(PAD).sum(dim=1).tolist()]
        with torch.no_grad():
            return beam_search(CachedDecoder(self.backbone, source), limits, self.beam, self.length_penalty)


def shifted(target: Tensor) -> Tensor:
    """The decoder's input for a target `(N, T)`: shifted right, beginning with BOS."""
    begin = torch.full_like(target[:, :1], BOS)
    return torch.cat([begin, target[:, :-1]], dim=1).masked_fill(target.eq(PAD), PAD)
