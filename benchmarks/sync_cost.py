"""Counts the communication of SyncUN in a training step: `python benchmarks/sync_cost.py [RANKS ...]`.

The numbers are computed from the models of the configs. Nothing is timed.
"""
import argparse
from pathlib import Path

from mmunorm.norms import OfflineNorm

from mmengine.config import Config
from mmengine.registry import MODELS
from torch import nn

CONFIGS = Path(__file__).parent.parent / 'configs'
LARGE = dict(arch='large')


def bytes_per_step(norm: OfflineNorm) -> int:
    """Bytes that one norm with float32 statistics reduces in a training step, forward and backward."""
    channels = norm.num_features
    if norm.centered:  # two moments and the count in float64, then two gradient statistics
        return 8 * (2 * channels + 1) + 4 * 2 * channels
    return 4 * (channels + 1) + 4 * channels


def sent_per_step(total: int, ranks: int) -> float:
    """Bytes that each rank sends in a ring all-reduce of `total` bytes."""
    return 2 * (ranks - 1) / ranks * total


def build_backbone(config: str, **changes) -> nn.Module:
    """The backbone of `configs/CONFIG.py`."""
    cfg = Config.fromfile(CONFIGS / f'{config}.py').model.backbone
    cfg.update(changes, init_cfg=None)
    return MODELS.build(cfg)


def cost(model: nn.Module) -> tuple[int, int, int]:
    """Norms, bytes that SyncUN reduces in a step, and bytes of float32 gradients that training reduces."""
    norms = [module for module in model.modules() if isinstance(module, OfflineNorm)]
    return len(norms), sum(map(bytes_per_step, norms)), 4 * sum(p.numel() for p in model.parameters())


def models():
    """(name, backbone) of every row."""
    for name, changes in (('Swin-T', {}), ('Swin-L', LARGE)):
        for task, config in (('classifier', 'swin_t_un_imagenet'), ('detector', 'swin_t_un_maskrcnn_3x')):
            yield f'{name}, {task}', build_backbone(config, **changes)


def table(ranks: list[int]) -> str:
    """The table of docs/results/training.md."""
    columns = ['backbone of a', 'norms', 'all-reduces', 'bytes reduced', 'of the gradients\' bytes',
               *(f'sent by each of {n}' for n in ranks)]
    lines = [columns, ['---'] * len(columns)]
    for name, model in models():
        norms, total, gradients = cost(model)
        lines.append([name, norms, 2 * norms, f'{total:,}', f'{total / gradients:.2%}',
                      *(f'{sent_per_step(total, n):,.0f}' for n in ranks)])
    return '\n'.join(f'| {" | ".join(map(str, line))} |' for line in lines)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('ranks', nargs='*', type=int, default=[2, 8, 64], help='numbers of processes')
    print(table(parser.parse_args().ranks))
