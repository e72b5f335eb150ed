"""Beam search; with a beam of 1, greedy search."""
from __future__ import annotations

import torch
from torch import Tensor

from .text.ids import BOS, EOS, PAD
from .transformer import Memory, UNTransformer

Hypothesis = tuple[float, list[int]]  # score and tokens, without special tokens at the ends


class CachedDecoder:
    """Decodes a batch of sources token by token, with cached keys and values.

    Args:
        model (UNTransformer): in eval mode.
        source (Tensor): ids `(N, S)`, int64.
    """

    def __init__(self, model: UNTransformer, source: Tensor):
        self.model = model
        self.memory = model.encode(source)
        self.cache = [{} for _ in model.decoder]

    def step(self, prefixes: Tensor) -> Tensor:
        """The logits `(N, B, V)` after prefixes `(N, B, t)`, which grow by one token in each call."""
        position = prefixes.shape[-1] - 1
        logits = self.model.decode(prefixes[..., -1].reshape(-1, 1), self.memory, cache=self.cache, position=position)
        return logits.view(*prefixes.shape[:2], -1)

    def select(self, parents: Tensor, rows: list[int]) -> None:
        """Selects the prefixes `parents` `(N, B)` of each sentence, then the sentences `rows`."""
        kept = torch.tensor(rows, device=parents.device)
        flat = (parents + torch.arange(len(parents), device=parents.device)[:, None] * parents.shape[1])[kept].flatten()
        for layer in self.cache:
            layer['self'] = tuple(values.index_select(0, flat) for values in layer['self'])
        if len(rows) < len(parents):
            for layer in self.cache:
                layer['memory'] = tuple(values.index_select(0, kept) for values in layer['memory'])
            self.memory = Memory(*(None if values is None else values[kept] for values in self.memory))


@torch.no_grad()
def beam_search(decoder: CachedDecoder, limits: list[int], beam: int, length_penalty: float) -> list[list[Hypothesis]]:
    """Beam search.

    A hypothesis is finished if EOS is among its `beam` best continuations. A sentence is finished if it has `beam`
    finished hypotheses, or at its limit, where only EOS is allowed. The score is the sum of log probabilities divided
    by `length^length_penalty`; the length includes EOS. PAD and BOS are never chosen.

    Args:
        decoder: `step` and `select` like those of :class:`CachedDecoder`, on N sentences.
        limits: the maximum length of each translation, including EOS.
        beam: beam size.
        length_penalty: 0 prefers short hypotheses, 1 is the mean over tokens.

    Returns:
        For each sentence one to `beam` hypotheses, the best one first.
    """
    finished: list[list[Hypothesis]] = [[] for _ in limits]
    active = list(range(len(limits)))
    device = decoder.memory.tokens.device
    prefixes = torch.full((len(limits), beam, 1), BOS, device=device)
    # The first token has one prefix, the others fill the beam.
    scores = torch.tensor([0.] + [-torch.inf] * (beam - 1), device=device).expand(len(limits), -1)
    for length in range(1, max(limits) + 1):
        logits = decoder.step(prefixes)
        log_probs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        log_probs[..., [PAD, BOS]] = -torch.inf
        at_limit = [limits[sentence] == length for sentence in active]
        if any(at_limit):
            is_other = torch.arange(log_probs.shape[-1], device=device) != EOS
            must_end = torch.tensor(at_limit, device=device)[:, None, None]
            log_probs = log_probs.masked_fill(must_end & is_other, -torch.inf)
        best, index = (scores.unsqueeze(-1) + log_probs).flatten(1).topk(2 * beam)
        vocab_size = log_probs.shape[-1]
        parents, tokens = index.div(vocab_size, rounding_mode='floor'), index % vocab_size
        is_end = tokens.eq(EOS)

        for row, rank in (is_end & best.isfinite())[:, :beam].nonzero().tolist():
            words = prefixes[row, parents[row, rank], 1:].tolist()
            finished[active[row]].append((best[row, rank].item() / length**length_penalty, words))

        rows = [row for row, sentence in enumerate(active) if len(finished[sentence]) < beam and not at_limit[row]]
        if not rows:
            break
        scores, order = best.masked_fill(is_end, -torch.inf).topk(beam)
        parents, tokens = parents.gather(1, order), tokens.gather(1, order)
        decoder.select(parents, rows)
        prefixes = prefixes.gather(1, parents.unsqueeze(-1).expand(-1, -1, length))
        prefixes = torch.cat([prefixes, tokens.unsqueeze(-1)], dim=-1)[rows]
        scores = scores[rows]
        active = [active[row] for row in rows]
    return [sorted(hypotheses, key=lambda hypothesis: -hypothesis[0])[:beam] or [(-torch.inf, [])]
            for hypotheses in finished]
