"""Estimates by Arm's compiler for LN, LN folded exactly and folded UN on three Ethos-U; random weights.

    python benchmarks/ethos_u.py

Nothing runs on a chip. The file has the estimates, the operators that fall back to the CPU, and the share of cycles of
each operator type.
"""
import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

from deployed_speed import NETWORKS, NORMS, ROOT, subject_of
from mmunorm.cli.arguments import command
from mmunorm.deploy.formats import FORMATS
from mmunorm.deploy.formats.ethos_u import compile_file, rows_of
from mmunorm.deploy.preprocessing import Samples
from mmunorm.tables import markdown_table
from mmunorm.utils import write_text

ACCELERATORS = ('ethos-u85-512', 'ethos-u65-512', 'ethos-u55-256')


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--networks', nargs='+', choices=NETWORKS, default=['Swin-T', 'DeiT-S'], metavar='NETWORK')
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results/ethos_u.jsonl')
    return parser.parse_args(argv)


def estimates(network, norm, folder):
    """One dict per accelerator."""
    subject = subject_of(network, norm, folder)
    source, files = folder / 'm.tflite', FORMATS['ethos-u'].files(folder / 'm.vela.tflite')
    FORMATS['litert'].export(subject.exportable, source, int8='full',
                             samples=Samples(subject.images, subject.exportable.meta, 1))
    for accelerator in ACCELERATORS:
        compile_file(source, files[0], accelerator)
        summary, = rows_of(files[1])
        layers, cycles = rows_of(files[2]), Counter()
        for layer in layers:
            cycles[layer['Original Operator']] += float(layer['Op Cycles'])
        yield dict(network=network, norm=norm, accelerator=accelerator, ms=float(summary['inference_time']) * 1e3,
                   cycles=float(summary['cycles_total']), system=summary['system_config'],
                   on_cpu=Counter(layer['Original Operator'] for layer in layers if layer['Target'] == 'CPU'),
                   share={kind: count / cycles.total() for kind, count in cycles.most_common(8)})


@command
def main(argv=None):
    args = parse_args(argv)
    rows = []
    for network in args.networks:
        for norm in NORMS:
            with tempfile.TemporaryDirectory() as folder:
                rows += estimates(network, norm, Path(folder))
    ms = {(row['network'], row['norm'], row['accelerator']): row['ms'] for row in rows}
    pairs = [(network, accelerator) for network in args.networks for accelerator in ACCELERATORS]
    print(*markdown_table(
        ['network', 'accelerator', 'LN, ms', 'exact, ms', 'UN folded, ms', 'exact over LN', 'UN over LN'],
        [[network, accelerator, *(f'{ms[network, norm, accelerator]:.1f}' for norm in NORMS),
          *(f'{ms[network, NORMS[0], accelerator] / ms[network, norm, accelerator]:.2f}' for norm in NORMS[1:])]
         for network, accelerator in pairs]), sep='\n')
    write_text(args.out, ''.join(json.dumps(row) + '\n' for row in rows))


if __name__ == '__main__':
    main()
