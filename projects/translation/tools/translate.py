"""Translates text: reads one sentence per line, writes one translation per line."""
import argparse
import os
import sys
from contextlib import redirect_stdout

from mmunorm import fuse_norms
from mmunorm.cli.arguments import add_config_arguments, add_device_argument, command, load_config, positive
from mmunorm.cli.data_checks import class_name
from mmunorm.config.models import load_model, match_folded
from mmunorm.fusion import allow_partial_calls
from mmunorm.utils import PreflightError
from projects.translation.translation.text.lines import read_lines
from projects.translation.translation.text.subwords import Subwords, check_vocabulary
from projects.translation.translation.translate import translate_lines

from tqdm import tqdm


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, epilog='An empty line gives an empty line. Progress is written to the standard error '
        'output.')
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file, folded or not')
    parser.add_argument('file', nargs='?', help='text in UTF-8 (default: the standard input)')
    parser.add_argument('--beam', type=positive, help="number of hypotheses, 1 for greedy search (default: the "
                        "config's)")
    parser.add_argument('--length-penalty', type=float, help="p in score / length^p (default: the config's)")
    parser.add_argument('--nbest', type=positive, default=1, metavar='N',
                        help='write the N best, each after the number of its line and a tab')
    parser.add_argument('--scores', action='store_true', help='write the score and a tab before each')
    parser.add_argument('--batch-size', type=positive, default=2000, metavar='TOKENS',
                        help='source tokens in a batch (default: 2000)')
    parser.add_argument('--fuse', action='store_true', help='fold the norms of the model first')
    add_device_argument(parser)
    add_config_arguments(parser)
    return parser.parse_args(argv)


def set_search(cfg, args):
    """Applies --beam and --length-penalty."""
    kind = cfg.model.get('of', cfg.model.type)
    if kind != 'TranslationModel':
        raise PreflightError(f'{args.config}: the model must be a TranslationModel, got {kind}.')
    if args.beam is not None:
        cfg.model.beam = args.beam
    if args.length_penalty is not None:
        if not 0 <= args.length_penalty <= 10:
            raise PreflightError(f'--length-penalty must be from 0 to 10, got {args.length_penalty}.')
        cfg.model.length_penalty = args.length_penalty
    beam = cfg.model.get('beam', 4)
    if args.nbest > beam:
        raise PreflightError(f'--nbest {args.nbest} is more than the {beam} hypotheses that are followed: name a '
                             'larger --beam.')


def find_subwords(cfg):
    """The subwords of the config's data, which must be those of its model."""
    dataset = (cfg.get('test_dataloader') or {}).get('dataset') or {}
    if class_name(dataset) != 'TranslationDataset':
        raise PreflightError('test_dataloader.dataset must be a TranslationDataset, which names the subwords; got '
                             f'{dataset.get("type")}.')
    subwords = Subwords(os.path.join(dataset.get('data_root') or '', dataset.subwords))
    check_vocabulary(len(subwords), cfg.model.backbone.vocab_size)
    return subwords


def format_hypotheses(number, hypotheses, nbest, with_scores):
    """The lines of one sentence."""
    lines = []
    for score, text in hypotheses[:nbest]:
        fields = [str(number)] * (nbest > 1) + [f'{score:.4f}'] * with_scores + [text]
        lines.append('\t'.join(fields))
    return lines or ['']


@command
def main(argv=None):
    args = parse_args(argv)
    with redirect_stdout(sys.stderr):  # keeps messages of libraries out of the output
        cfg = load_config(args.config, args.cfg_options, args.norm)
        match_folded(cfg, args.checkpoint)
        set_search(cfg, args)
        subwords = find_subwords(cfg)
        model = load_model(cfg, args.checkpoint)
        if args.fuse:
            print(fuse_norms(model).summary)
    allow_partial_calls(model)  # a search calls encoder and decoder alone
    model.to(args.device)
    lines = tqdm(read_lines(args.file or '/dev/stdin', allow_empty=True), desc='translating', unit='line', disable=None)
    for number, hypotheses in enumerate(translate_lines(model, subwords, lines, args.batch_size), start=1):
        for line in format_hypotheses(number, hypotheses, args.nbest, args.scores):
            print(line)


if __name__ == '__main__':
    main()
