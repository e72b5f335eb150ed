"""Measures the translation model on random ids: training with UN and LN, search with a cache, and folded search.

    python projects/translation/tools/benchmark.py
    python projects/translation/tools/benchmark.py --arch base --device cuda

- training: steps of LN and UN on batches of sentences of 10 to 30 tokens with padding, after UN's warm-up.
- search: beam search with a beam of 4 and a fixed number of tokens, with and without cached keys and values; with LN,
  UN, and UN folded.

All run in rotation in each round. Ratios are medians over rounds. Prints a table and writes the rows to
benchmarks/results/translation_speed_DEVICE.jsonl.
"""
import argparse
import copy
import json
import statistics
from pathlib import Path

from mmunorm import fuse_norms
from mmunorm.benchmark import measure
from mmunorm.benchmark.environment import environment, result_file
from mmunorm.cli.arguments import command, device, positive, threads
from mmunorm.fusion import allow_partial_calls
from projects.translation.translation import TranslationModel
from projects.translation.translation.search import CachedDecoder, beam_search
from projects.translation.translation.text.ids import EOS, PAD

import torch

# projects/translation/configs/debian_en_it_*.py
SMALL = dict(encoder_layers=3, decoder_layers=3, embed_dims=256, feedforward_channels=1024, num_heads=4)
VOCABULARY = 4000


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--arch', help="such as base (default: the small recipe's, 3 + 3 layers of width 256)")
    parser.add_argument('--sentences', type=positive, default=64, help='in a training batch (default: 64)')
    parser.add_argument('--searched', type=positive, default=8, help='sentences that are searched (default: 8)')
    parser.add_argument('--length', type=positive, default=50, help='tokens of a translation (default: 50)')
    parser.add_argument('--device', type=device, default='cpu', help='e.g. cuda:0')
    parser.add_argument('--rounds', type=positive, default=9)
    parser.add_argument('--threads', type=threads, help='threads of a CPU')
    parser.add_argument('--out', default=Path(__file__).parents[3] / 'benchmarks/results', type=Path,
                        help='folder of the results')
    return parser.parse_args(argv)


class PrefixDecoder(CachedDecoder):
    """The decoder without a cache: each step decodes the whole prefixes."""

    def step(self, prefixes):
        logits = self.model.decode(prefixes.flatten(0, 1), self.memory)[:, -1]
        return logits.view(*prefixes.shape[:2], -1)

    def select(self, parents, rows):
        assert len(rows) == len(parents), 'sentences of this benchmark have one limit'


def sentences(number, device):
    """Random ids of 9 to 29 words and EOS."""
    lengths = torch.randint(10, 31, (number, 1))
    positions = torch.arange(30)
    ids = torch.randint(4, VOCABULARY, (number, 30)).masked_fill(positions >= lengths, PAD)
    return ids.masked_fill(positions == lengths - 1, EOS).to(device)


def build(norm, args):
    cfg = dict(type=norm) if norm == 'LN' else dict(type=norm, outlier_filter=False, warmup_iters=0)
    backbone = dict(type='UNTransformer', vocab_size=VOCABULARY, arch=args.arch or SMALL, norm_cfg=cfg)
    return TranslationModel(backbone).to(args.device)


def training(models, args, device):
    """A training step of each model by name, and its number of tokens."""
    source, target = sentences(args.sentences, device), sentences(args.sentences, device)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(source, target, mode='loss')['loss'].backward()
        optimizer.step()

    optimizers = {name: torch.optim.Adam(model.parameters(), 1e-4) for name, model in models.items()}
    runs = {name: lambda name=name: step(models[name].train(), optimizers[name]) for name in models}
    return runs, int(source.ne(PAD).sum() + target.ne(PAD).sum())


def searching(models, args, device):
    """A search of each model by name, and its number of output tokens."""
    source = sentences(args.searched, device)
    models = {name: copy.deepcopy(model).eval() for name, model in models.items()}
    for model in models.values():  # the limit ends each sentence
        model.backbone.output.bias = torch.nn.Parameter(torch.zeros(VOCABULARY, device=device))
        model.backbone.output.bias.data[EOS] = -1e4
    models['UN, folded'] = copy.deepcopy(models['UN'])
    fuse_norms(models['UN, folded'], strict=True)
    allow_partial_calls(models['UN, folded'])  # a search calls encoder and decoder alone

    def search(model, decoder=CachedDecoder):
        return beam_search(decoder(model.backbone, source), [args.length] * len(source), 4, 1.)

    runs = {name: lambda model=model: search(model) for name, model in models.items()}
    runs['LN, no cache'] = lambda: search(models['LN'], PrefixDecoder)
    return runs, len(source) * args.length


@command
def main(argv=None):
    args = parse_args(argv)
    device = torch.device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    models, rows = {norm: build(norm, args) for norm in ('LN', 'UN')}, []
    path = result_file(args.out, 'translation_speed', device)
    print('| what | norm | tokens / s | time / LN |\n|---|---|---|---|')
    for what, prepare in (('training', training), ('search', searching)):
        runs, tokens = prepare(models, args, device)
        with torch.set_grad_enabled(what == 'training'):
            timer = measure.InterleavedTimer(runs, device)
            timer.time(2)  # to warm up
            seconds = timer.time(args.rounds)
        for name, values in seconds.items():
            row = dict(what=what, norm=name, tokens=tokens, seconds=statistics.median(values),
                       to_ln=measure.ratio(values, seconds['LN']), arch=args.arch or SMALL,
                       threads=torch.get_num_threads(), rounds=args.rounds, environment=environment(device))
            print(f'| {what} | {name} | {tokens / row["seconds"]:.0f} | {row["to_ln"]["value"]:.2f} |', flush=True)
            rows.append(row)
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    print(f'written: {path}')


if __name__ == '__main__':
    main()
