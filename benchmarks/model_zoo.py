"""Replaces and folds the norms of many Transformers of timm, mmpretrain and mmdet, and writes docs/models.md.

    python benchmarks/model_zoo.py            # all models, about ten minutes on one core
    python benchmarks/model_zoo.py --only 'swin|convnext' --again

Each model has random weights, and norms with random statistics and scales that are negative or zero in some channels.
It runs in float64 before and after `fuse_norms(model, example=...)`: once with its LayerNorms, and once with UN in
place of these. Each finished model is one line in benchmarks/results/model_zoo.jsonl; an interrupted run resumes.
"""
import argparse
import gc
import json
import re
from collections import Counter
from pathlib import Path

import mmunorm
from mmunorm import fuse_norms, replace_norms
from mmunorm.cli.arguments import command
from mmunorm.modules import tensors_in
from mmunorm.norms.layers import is_norm
from mmunorm.norms.replace import layer_norms
from mmunorm.utils import error_text

import mmdet
import mmpretrain
import timm
import torch
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / 'benchmarks/results/model_zoo.jsonl', ROOT / 'docs/models.md'
# Names with the image size, and arguments if the architecture needs them.
TIMM = {
    'swin_tiny_patch4_window7_224': 224, 'swin_s3_tiny_224': 224, 'swinv2_tiny_window8_256': (128, dict(img_size=128)),
    'swinv2_cr_tiny_ns_224': 224, 'vit_tiny_patch16_224': (64, dict(img_size=64)),
    'vit_small_patch14_dinov2': (56, dict(img_size=56)), 'vit_relpos_small_patch16_224': 224,
    'vit_base_patch16_clip_224': (64, dict(img_size=64)),
    'deit_tiny_patch16_224': (64, dict(img_size=64)), 'deit_tiny_distilled_patch16_224': (64, dict(img_size=64)),
    'deit3_small_patch16_224': (64, dict(img_size=64)), 'beit_base_patch16_224': (64, dict(img_size=64)),
    'beitv2_base_patch16_224': (64, dict(img_size=64)), 'eva02_tiny_patch14_224': (56, dict(img_size=56)),
    'eva02_base_patch14_224': (56, dict(img_size=56)), 'cait_xxs24_224': (64, dict(img_size=64)),
    'xcit_nano_12_p16_224': 64, 'pvt_v2_b0': 64, 'twins_pcpvt_small': 64, 'twins_svt_small': 64, 'convnext_atto': 64,
    'convnextv2_atto': 64, 'maxvit_pico_rw_256': (128, dict(img_size=128)), 'coatnet_pico_rw_224': 224,
    'tiny_vit_5m_224': 224, 'mobilevit_xxs': 64, 'mobilevitv2_050': 64, 'edgenext_xx_small': 64, 'mvitv2_tiny': 64,
    'davit_tiny': 64, 'caformer_s18': 64, 'levit_128s': 224, 'focalnet_tiny_srf': 64, 'gcvit_xxtiny': 224,
    'nest_tiny': 224, 'hiera_tiny_224': 224, 'volo_d1_224': 224, 'pit_ti_224': 224, 'convit_tiny': 224,
    'tnt_s_patch16_224': 224, 'mixer_s32_224': 224, 'crossvit_tiny_240': 240, 'efficientformer_l1': 224,
}
MMPRETRAIN = {
    'swin_transformer/tiny_224': 224, 'swin_transformer_v2/tiny_256': 256, 'vit-base-p32': 224,
    'deit3/deit3-small-p16-224': 224, 't2t-vit-t-14': 224, 'convnext/convnext-tiny': 64, 'convnext_v2/atto': 64,
    'hornet/hornet-tiny': 64, 'mvit/mvitv2-tiny': 224, 'davit/davit-tiny': 224, 'conformer/tiny-p16': 224,
    'edgenext/edgenext-xxsmall': 64, 'mobilevit/mobilevit_xxs': 64, 'tinyvit/tinyvit-5m': 224, 'twins_svt_base': 64,
    'twins_pcpvt_base': 64, 'tnt_s_patch16_224': 224, 'efficientformer-l1': 224, 'hivit/tiny_224': 224,
}
MMDET = ('swin/retinanet_swin-t-p4-w7_fpn_1x_coco', 'swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco',
         'cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco', 'atss/atss_r50_fpn_1x_coco', 'detr/detr_r50_8xb2-150e_coco',
         'conditional_detr/conditional-detr_r50_8xb2-50e_coco', 'dab_detr/dab-detr_r50_8xb2-50e_coco',
         'deformable_detr/deformable-detr_r50_16xb2-50e_coco', 'dino/dino-4scale_r50_8xb2-12e_coco',
         'mask2former/mask2former_swin-t-p4-w7-224_8xb2-lsj-50e_coco')
# The threshold of a difference, relative to the largest value.
EXACT = 1e-8
# Reasons in words, by the code of `fusion.obstacles` that a row has.
WORDS = {'sum': 'a sum reads them', 'norm': 'another norm reads them', 'function': '`{}` reads them',
         'scale': 'a product reads them', 'mixed': 'a layer reads them beside padding',
         'padded convolution': 'a convolution that pads reads them', 'no stream': 'their input is no sum',
         'groups': 'a convolution with groups reads the stream', 'maps': 'a norm of maps writes the stream',
         'own layer': 'a norm of the stream would need a linear layer',
         'joined': 'the stream is joined with other values'}
HEADER = ('model', 'LayerNorms without weights', 'in a rotated stream', 'UN: folded')


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', default='', help='regular expression of model names')
    parser.add_argument('--again', action='store_true', help='also rerun models that have a result')
    parser.add_argument('--results', type=Path, default=RESULTS, help='the file of finished models')
    parser.add_argument('--page', type=Path, default=PAGE, help='the page to write')
    return parser.parse_args(argv)


def timm_case(name):
    side, kwargs = TIMM[name] if isinstance(TIMM[name], tuple) else (TIMM[name], {})
    return timm.create_model(name, num_classes=1000, **kwargs), image(side, side)


def mmpretrain_case(name):
    folder = Path(mmpretrain.__file__).parent / '.mim/configs/_base_/models'
    cfg = Config.fromfile(folder / f'{name}.py').model
    cfg.pop('train_cfg', None)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        return MODELS.build(cfg), image(MMPRETRAIN[name], MMPRETRAIN[name])


def mmdet_case(name):
    cfg = Config.fromfile(Path(mmdet.__file__).parent / '.mim/configs' / f'{name}.py').model
    if 'num_queries' in cfg:
        cfg.num_queries = 50  # DINO selects them from the few pixels
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = MODELS.build(cfg)
    return model, [dict(inputs=image(*size), data_samples=[sample(*size)]) for size in ((96, 128), (101, 150))]


def image(height, width):
    return torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def sample(*size):
    return DetDataSample(metainfo=dict(img_shape=size, ori_shape=size, batch_input_shape=size, pad_shape=size,
                                       scale_factor=(1, 1)))


def cases():
    """Names of all models, with functions that build them."""
    for source, names, make in (('timm', TIMM, timm_case), ('mmpretrain', MMPRETRAIN, mmpretrain_case),
                                ('mmdet', MMDET, mmdet_case)):
        for name in names:
            yield f'{source}: {name}', make, name


@torch.no_grad()
def randomize(model):
    """Draws statistics, scales and shifts of the norms, a tenth of the scales zero, and constant parameters elsewhere.

    Otherwise a layer scale of 1e-6 would hide errors of a norm.
    """
    generator = torch.Generator().manual_seed(1)

    def draw(tensor):
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)

    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if name == 'running_var':
                tensor.copy_(draw(tensor).abs() + 0.5)
            elif is_norm(module) and name in ('weight', 'bias', 'running_mean'):
                tensor.copy_(draw(tensor) * (1 if name == 'weight' else 0.2))
                if name == 'weight':
                    tensor[::10] = 0
            elif isinstance(tensor, torch.nn.Parameter) and tensor.dim() and (tensor == tensor.flatten()[0]).all():
                tensor.add_(draw(tensor) * 0.1)
            elif not (tensor.abs() < 1e3).all() and isinstance(tensor, torch.nn.Parameter):
                tensor.copy_(draw(tensor))  # mmdet does not initialize all
    return model.eval()


def to_double(model):
    """The model in float64, including position encodings that some models compute in float32."""
    for module in model.modules():
        if getattr(module, 'dtype', None) is torch.float32:
            module.dtype = torch.float64
        if 'PositionalEncoding' in type(module).__name__:
            module.register_forward_hook(lambda module, args, output: output.to(next(model.parameters()).dtype))
    return model.double()


@torch.no_grad()
def outputs(model, example):
    """All output tensors for an example, or for each of several."""
    if isinstance(example, list):
        return [tensor for inputs in example for tensor in outputs(model, inputs)]
    results = tensors_in(model(**example) if isinstance(example, dict) else model(example))
    return [tensor for tensor in results if tensor.is_floating_point()]


def difference(after, before):
    """The largest difference of any two outputs, relative to the output's largest value; inf must stay in place."""
    assert len(after) == len(before) > 0 and all(a.shape == b.shape for a, b in zip(after, before, strict=True))
    largest = 0.
    for a, b in zip(after, before, strict=True):
        finite = b.isfinite()
        if b.isnan().any() or not finite.any():
            raise ValueError('an output of the unfolded model is nan, or has no finite value')
        if not torch.equal(a[~finite], b[~finite]):
            return float('inf')
        largest = max(largest, ((a - b)[finite].abs().max() / b[finite].abs().max().clamp(min=1e-300)).item())
    return largest


def reason(obstacle):
    """The innermost reason of an obstacle, and the function or class that it is about."""
    while obstacle.cause is not None:
        obstacle = obstacle.cause
    about = obstacle.part if obstacle.code in ('function', 'sum', 'online', 'no layer') else obstacle.detail if (
        obstacle.code == 'padded convolution') else ''
    return f'{obstacle.code} {about.strip("_")}'.strip()


def measure_exact(make, name):
    """The part of a row for the model with its LayerNorms, as they are folded for INT8."""
    torch.manual_seed(0)
    model, example = make(name)
    names = set(layer_norms(model))
    randomize(to_double(model))
    before = outputs(model, example)
    report = fuse_norms(model, example=example, rotate='hadamard')
    rotated = {norm for stream in report.streams for norm in stream.norms} & names
    return dict(layer_norms=len(names), plain=len({fold.norm for fold in report.reduced} & names), rotated=len(rotated),
                attentions=report.attentions,
                kept=[reason(fold.obstacle) for fold in report.kept if fold.norm in names],
                not_rotated=[reason(fold.not_rotated) for fold in (*report.reduced, *report.kept)
                             if fold.norm in names and fold.not_rotated],
                difference=difference(outputs(model, example), before))


def measure(make, name):
    """The row of one model."""
    exact = measure_exact(make, name)
    torch.manual_seed(0)
    model, example = make(name)
    replaced = len(set(layer_norms(model).values()))
    if replaced:
        replace_norms(model, dict(type='UN'))
    randomize(to_double(model))
    count = len({module for module in model.modules() if is_norm(module)})
    before = outputs(model, example)
    report = fuse_norms(model, example=example, layer_norms='keep')
    return dict(exact=exact, norms=count, replaced=replaced, folded=len(report.folded),
                kept=[reason(fold.obstacle) for fold in report.kept],
                difference=difference(outputs(model, example), before))


def read(path):
    return {row['model']: row for row in map(json.loads, path.read_text().splitlines())} if path.is_file() else {}


def share(part, whole):
    return 'all' if part == whole > 0 else 'none' if not part else f'{part} of {whole}'


def cells(row):
    if 'error' in row:
        return row['model'], row['error'].replace('|', '/')[:160], '', ''
    exact = row['exact']
    return (row['model'], share(exact['plain'], exact['layer_norms']), share(exact['rotated'], exact['layer_norms']),
            share(row['folded'], row['norms']))


def most_frequent(reasons):
    """The most frequent reasons of norms, each with the number of norms."""
    found = Counter()
    for why in reasons:
        code = next((code for code in WORDS if why.startswith(code)), why)
        found[WORDS.get(code, code).format(why.removeprefix(code).strip())] += 1
    return '; '.join(f'{why} ({count})' for why, count in found.most_common(5))


def page(rows):
    """The text of docs/models.md."""
    good = [row for row in rows if 'error' not in row]
    exact = [row['exact'] for row in good if row['exact']['layer_norms']]
    wrong = [row['model'] for row in good if not max(row['difference'], row['exact']['difference']) <= EXACT]
    total, plain, rotated = (sum(part[key] for part in exact) for key in ('layer_norms', 'plain', 'rotated'))
    norms, folded = (sum(row[key] for row in good) for key in ('norms', 'folded'))
    whole = sum(part['rotated'] == part['layer_norms'] for part in exact)
    kept, not_rotated, un = ([why for part in parts for why in part[key]] for parts, key in (
        (exact, 'kept'), (exact, 'not_rotated'), (good, 'kept')))
    tables = '\n\n'.join(f'## {title}\n{table(found)}' for title, found in groups(rows).items() if found)
    return f'''# Models that fold

What `fuse_norms` folds in {len(rows)} architectures of timm, mmpretrain and mmdet; Swins and ViTs of torchvision and
transformers fold as timm's do. To try another model: [Fold](how_to/fusion.md#the-example).
`python benchmarks/model_zoo.py` writes this page.

- **LayerNorms without weights**: {plain} of {total} LayerNorms and RMSNorms. The others are kept because of:
  {most_frequent(kept)}.
- **Rotated streams**: {rotated} of {total} of these norms read a residual stream that can be rotated for INT8, all of
  them in {whole} of {len(exact)} models. Not rotated because of: {most_frequent(not_rotated)}.
- **UN in place of every LayerNorm and RMSNorm**: {folded} of {norms} norms fold. Kept because of: {most_frequent(un)}.
- {len(wrong)} models have different outputs after folding{': ' + ', '.join(wrong) if wrong else ''}.
  {len(rows) - len(good)} models did not run. Outputs are compared in float64, at sizes as small as the architecture
  allows; detectors run in the mode `tensor`.

{tables}
'''


def groups(rows):
    """The rows by how many of a model's LayerNorms fold."""
    found = {title: [] for title in ('All LayerNorms fold', 'A part of the LayerNorms folds', 'No LayerNorm folds',
                                     'Models without LayerNorms', 'Models that did not run')}
    all_of_them, part, none, without, failed = found.values()
    for row in rows:
        exact = row.get('exact')
        group = failed if exact is None else without if not exact['layer_norms'] else (
            none if not exact['plain'] else part if exact['plain'] < exact['layer_norms'] else all_of_them)
        group.append(row)
    return found


def table(rows):
    lines = (HEADER, ['---'] * len(HEADER), *map(cells, rows))
    return '\n'.join(f'| {" | ".join(map(str, line))} |' for line in lines)


@command
def main(argv=None):
    args = parse_args(argv)
    rows = read(args.results)
    chosen = [case for case in cases() if re.search(args.only, case[0])
              and (args.again or case[0] not in rows)]
    args.results.parent.mkdir(parents=True, exist_ok=True)
    for name, make, key in (bar := tqdm(chosen, unit='model')):
        bar.set_description(name)
        try:
            row = measure(make, key)
        except Exception as error:  # a model that does not run is also a row of the table
            row = dict(error=error_text(error))
        rows[name] = dict(model=name, versions=dict(mmunorm=mmunorm.__version__, timm=timm.__version__), **row)
        args.results.write_text(''.join(json.dumps(rows[case[0]]) + '\n' for case in cases() if case[0] in rows))
        gc.collect()
    args.page.write_text(page([rows[case[0]] for case in cases() if case[0] in rows]))
    print(f'written: {args.page}')


if __name__ == '__main__':
    main()
