"""Every public name, used as a typed program would; mypy checks it in `make lint`, and nothing runs it."""
from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import mmunorm
from mmunorm.norms import Norm


def build() -> list[Norm]:
    return [mmunorm.UN(8, window=4, alpha=0.9, warmup_iters=0.1, outlier_filter=False), mmunorm.SyncUN(8),
            mmunorm.UN2d(8, window=8), mmunorm.MABN(8, window=16), mmunorm.PN(8, layer_scale=False),
            mmunorm.TokenBN(8), mmunorm.RepBN(8), mmunorm.RMSN(8), mmunorm.DyT(8, init_alpha=0.5), mmunorm.Derf(8),
            mmunorm.NoNorm(8, affine=True)]


def fold(norm: mmunorm.UN, x: Tensor, pad_mask: Tensor | None = None) -> Tensor:
    scale, shift = norm.affine()
    assert_type(norm.running_var, Tensor)
    assert_type(norm.weight, nn.Parameter)
    assert_type(norm.forward(x, pad_mask), Tensor)
    return scale * x + shift


def deploy(model: nn.Module, teacher: nn.Module, images: list[Tensor]) -> nn.Module:
    assert_type(mmunorm.replace_norms(model, dict(type='UN')), nn.Module)
    assert_type(mmunorm.revert_sync(mmunorm.convert_sync(model)), nn.Module)
    mmunorm.update_norms(model, images, progress=True)
    conversion = mmunorm.convert_norms(model, images, dict(type='UN', window=4), keep=['head.norm'], progress=True)
    assert_type(conversion, mmunorm.ConversionReport)
    print(conversion, [norm.norm for norm in conversion.converted], mmunorm.__version__.split('.'))

    adapted = mmunorm.adapt(model, teacher, images, steps=10, lr=1e-4)
    assert_type(adapted, mmunorm.AdaptReport)
    report = mmunorm.fuse_norms(model, strict=True, example=torch.zeros(1, 3, 224, 224))
    assert_type(report, mmunorm.FusionReport)
    print(report, report.difference, [fold.norm for fold in report.folded + report.kept])
    mmunorm.save_folded(model, 'folded.pth', report=report)
    mmunorm.export(model, images[0], 'model.tflite', int8='full', calibration=images)
    assert_type(mmunorm.compare('model.tflite', model, images), mmunorm.Comparison)
    return mmunorm.load_folded(Path('folded.pth'), teacher)
