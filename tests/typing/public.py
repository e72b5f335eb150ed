"""Every public name, used as a typed program would; mypy checks it in `make lint`, and nothing runs it."""
from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

from mmunorm import (
    MABN,
    PN,
    RMSN,
    UN,
    AdaptReport,
    Comparison,
    ConversionReport,
    Derf,
    DyT,
    FusionReport,
    NoNorm,
    RepBN,
    SyncUN,
    TokenBN,
    UN2d,
    __version__,
    adapt,
    compare,
    convert_norms,
    convert_sync,
    export,
    fuse_norms,
    load_folded,
    replace_norms,
    revert_sync,
    save_folded,
    update_norms,
)
from mmunorm.norms import Norm


def build() -> list[Norm]:
    return [UN(8, window=4, alpha=0.9, warmup_iters=0.1, outlier_filter=False), SyncUN(8), UN2d(8, window=8),
            MABN(8, window=16), PN(8, layer_scale=False), TokenBN(8), RepBN(8), RMSN(8),
            DyT(8, init_alpha=0.5), Derf(8), NoNorm(8, affine=True)]


def fold(norm: UN, x: Tensor, pad_mask: Tensor | None = None) -> Tensor:
    scale, shift = norm.affine()
    assert_type(norm.running_var, Tensor)
    assert_type(norm.weight, nn.Parameter)
    assert_type(norm.forward(x, pad_mask), Tensor)
    return scale * x + shift


def deploy(model: nn.Module, teacher: nn.Module, images: list[Tensor]) -> nn.Module:
    assert_type(replace_norms(model, dict(type='UN')), nn.Module)
    assert_type(revert_sync(convert_sync(model)), nn.Module)
    update_norms(model, images, progress=True)
    conversion = convert_norms(model, images, dict(type='UN', window=4), keep=['head.norm'], progress=True)
    assert_type(conversion, ConversionReport)
    print(conversion, [norm.norm for norm in conversion.converted], __version__.split('.'))

    adapted = adapt(model, teacher, images, steps=10, lr=1e-4)
    assert_type(adapted, AdaptReport)
    report = fuse_norms(model, strict=True, example=torch.zeros(1, 3, 224, 224))
    assert_type(report, FusionReport)
    print(report, report.difference, [fold.norm for fold in report.folded + report.kept])
    save_folded(model, 'folded.pth', report=report)
    export(model, images[0], 'model.tflite', int8='full', calibration=images)
    assert_type(compare('model.tflite', model, images), Comparison)
    return load_folded(Path('folded.pth'), teacher)
