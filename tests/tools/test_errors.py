"""Errors of the tools: one line that names the argument, and no file is written or changed."""
import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from .. import tiny_runs
from ..checkpoints.test_reading import Opens

pytestmark = pytest.mark.usefixtures('in_a_folder')

# (call, what the error names). {un} and {ln} are configs, {data} class folders with images; see `folder` for the rest.
NO_STATISTICS = 'affine.pth has the scale but not the statistics of ... (--norm LN)'
TRAIN = [
    ('train nowhere.py', 'no config file nowhere.py'), ('train loop', 'no config file loop'),
    ('train broken.py', 'broken.py'), ('train {coco}', 'the data set is not there: data/coco/annotations/'),
    ('train {un} --resume nowhere.pth', 'no checkpoint nowhere.pth'),
    ('train {un} --resume empty', 'empty is a folder: a checkpoint is a file'),
    ('train {un} --resume un.pth --norm LN', 'un.pth has backbone.norm1.activation_record: its norms are not'),
    ('train {un} --resume un.pth --cfg-options model.head.in_channels=3', 'un.pth does not fit the config: '),
    ('train {un} --cfg-options model.backbone.norm_cfg.type=UNX', "no norm 'UNX'"),
    ('train {un} --cfg-options model.backbone.drop_path_rat=0.1', "unexpected keyword argument 'drop_path_rat'"),
    ('train {un} --cfg-options model.colour=1', 'cannot build the config'),
    ('train {un} --cfg-options val_evaluator.colour=1', 'cannot build the config'),
    ('train {un} --cfg-options train_dataloader.batch_size=0', 'cannot build the config'),
    ('train {un} --cfg-options optim_wrapper.optimizer.lr=-1', 'cannot build the config'),
    ('train {un} --cfg-options visualizer.vis_backends.0.type=WandbVisBackend', 'pip install wandb'),
    ("train {un} --work-dir ''", "--work-dir '': it must be a folder"),
    ('train {un} --work-dir file', "--work-dir 'file': it must be a folder"),
    ('train whole.py --norm UN', 'whole.py has no model.backbone to put a norm into'),
    ('train {un} --cfg-options train_dataloader.dataset.data_root=loop', 'the data set is not there: loop: '),
    ('train {un} --cfg-options pretrained=loop', 'no checkpoint loop'),
    ('train {un} --work-dir latest --resume', '--trust-checkpoint'),
    ('train {un} --cfg-options load_from=latest/epoch_1.pth', '--trust-checkpoint'),
    ('train {un} --cfg-options pretrained=latest/epoch_1.pth', '--trust-checkpoint'),
    ('train {un} --resume affine.pth', NO_STATISTICS),
]
TEST = [
    ('test {un} nowhere.pth', 'no checkpoint nowhere.pth'), ('test {un} loop', 'no checkpoint loop'),
    ('test {un} empty', 'empty is a folder: a checkpoint is a file'),
    ('test {un} latest', 'latest is a folder: choose a checkpoint in it, such as latest/epoch_1.pth'),
    ('test {un} un.pth --norm LN', 'un.pth has backbone.norm1.activation_record: its norms are not'),
    ('test {un} un.pth --norm UN+', 'un.pth lacks backbone.norm1.eta: its norms are not'),
    ('test {un} un.pth --cfg-options model.head.in_channels=3', 'un.pth does not fit the config: '),
    ('test {un} un.pth --cfg-options test_evaluator.colour=1', "unexpected keyword argument 'colour'"),
    ('test {un} un.pth --out a.json', '--out takes a .pkl file, got a.json'),
    ('test {un} un.pth --out file/inside/a.pkl', '--out file/inside'),
    ('test {un} un.pth --save a.pth', '--save writes a folded checkpoint: add --fuse'),
    ('test {un} un.pth --fuse --save ./un.pth', '--save ./un.pth would overwrite'),
    ('test {un} un.pth --fuse --save .', '--save .: must be a regular file'),
    ('test {un} latest/epoch_1.pth', '--trust-checkpoint'),
    ('test {coco} un.pth', 'the data set is not there: data/coco/annotations/'),
    ('test {un} affine.pth', NO_STATISTICS),
]
INFER = [
    ('infer {un} un.pth nowhere.jpg --out-dir out', 'no image at nowhere.jpg'),
    ('infer {un} un.pth empty --out-dir out', 'no image at empty'),
    ('infer {un} un.pth loop --out-dir out', 'no image at loop'),
    ('infer {un} nowhere.pth {data} --out-dir out', 'no checkpoint nowhere.pth'),
    ('infer nowhere.py un.pth {data} --out-dir out', 'no config file nowhere.py'),
    ('infer {un} un.pth {data}/dark --out-dir {data}/light/../dark', '/../dark is where the images are'),
    ('infer {un} un.pth {data}/dark/0.png --out-dir {data}/dark', '--out-dir {data}/dark is where the images are'),
    ('infer {un} un.pth {data} --out-dir file/inside', '--out-dir file/inside'),
    ("infer {un} un.pth {data}/dark/0.png --out-dir ''", "--out-dir '': must be a writable folder"),
    ('infer {un} un.pth twins --out-dir out', 'twins/0.bmp and another image of this name'),
    ('infer {un} un.pth mine/a.jpg --out-dir out', 'no image could be drawn: mine/a.jpg: not readable'),
    ('infer {un} latest/epoch_1.pth {data} --out-dir out', '--trust-checkpoint'),
    ('infer {un} affine.pth {data} --out-dir out --device cpu', NO_STATISTICS),
]
CONVERT = [(f'convert_norms {call} --out out --device cpu', message) for call, message in [
    ('{ln} nowhere.pth', 'there is no checkpoint nowhere.pth'),
    ('{ln} ln.pth --to XN', "there is no norm 'XN'"),
    ('{ln} nowhere.pth --to DyT', "--to DyT: norm_cfg={{'type': "),
    ('{ln} nowhere.pth --to X=UN,window=0', "--to X=UN,window=0: norm_cfg={{'type': "),
    ('{ln} nowhere.pth --to X=Foo', "--to X=Foo: there is no norm of type 'Foo'"),
    ('{ln} nowhere.pth --to =UN', 'NAME=TYPE'), ('{ln} nowhere.pth --to X=UN,=4', 'NAME=TYPE'),
    ('{ln} nowhere.pth --to X=UN,window', 'NAME=TYPE'),
    ('{ln} ln.pth --keep x', "keep: no LayerNorm has the name 'x'"),
    ('{ln} ln.pth --cfg-options model.head.in_channels=3', 'does not fit the config'),
    ('{un} un.pth', 'ImageClassifier has no LayerNorm or RMSNorm'),
    ('{ln} ln.pth --cfg-options train_dataloader.dataset.data_root=nowhere', 'the data set is not there'),
    ('only_tested.py ln.pth', 'only_tested.py has no train_dataloader'),
    ('{ln} infinite.pth', 'infinite.pth has infinite values in backbone.patch_embed.projection.bias'),
    ('{ln} ln.pth --images nowhere', '--images nowhere: must be a folder of images'),
    ('{ln} ln.pth --images empty', '--images empty: there is no image'),
    ('{ln} ln.pth --images mine', '--images mine: 1 of 1 images cannot be used, such as mine/a.jpg: it is empty'),
    ('{ln} ln.pth --adapt-steps -1', '--adapt-steps: must be at least 0, got -1'),
]] + [
    ('convert_norms {ln} swin_un_tiny.pth --device cpu --num-samples 2 --out .', 'is the checkpoint to convert'),
    ('convert_norms {ln} ln.pth --device cpu --num-samples 2 --out by_hand',
     'by_hand/swin_un_tiny.py is not from a conversion'),
]
AVERAGE = [(f'average_checkpoints {call}', message) for call, message in [
    ('un.pth --out mean.pth', 'at least two'), ('un.pth ln.pth --out ./un.pth', '--out ./un.pth would overwrite'),
    ('un.pth nowhere.pth --out mean.pth', 'there is no checkpoint nowhere.pth'),
    ('un.pth ln.pth --out mean.pth', 'ln.pth belongs to another model than un.pth: ')]]
FOLD = [(f'analysis/fuse_and_benchmark {call}', message) for call, message in [
    ('nowhere.py', 'no config file nowhere.py'), ('{un} nowhere.pth', 'no checkpoint nowhere.pth'),
    ('{un} latest/epoch_1.pth', '--trust-checkpoint'), ('{un} --save a.pth', '--save needs a CHECKPOINT'),
    ('{un} un.pth --out file/inside', '--out file/inside'),
    ('{un} un.pth --out o --save file/inside/a.pth', '--save file/inside'),
    ('{un} --shape 3 4 5', '--shape takes one or two numbers, got 3'),
    ('{un} --batch-size 0', 'must be at least 1, got 0'), ('{un} --device potato', 'must be such as cpu'),
    ('{un} --device cuda:99', 'must be such as cpu')]]
EXPORT = [(f'deploy/export {call}', message) for call, message in [
    ('{un} un.pth --format openvno', 'did you mean openvino?'),
    ('{un} un.pth --format onnx --dynamic --batch 2', '--batch cannot be combined with --dynamic'),
    ('{un} un.pth --format onnx --int8 --half', '--half cannot be combined with --int8'),
    ('{un} un.pth --format onnx --vendor a=1', 'a is not an option of the format onnx'),
    ('{un} un.pth --format onnx --vendor a', "argument --vendor: must be NAME=VALUE, got 'a'"),
    ('{un} un.pth --format onnx --int8 --dynamic', '--dynamic cannot be combined with --int8'),
    ('{un} un.pth --format onnx --int8 --batch 9', '--batch 9'),
    ('{un} un.pth --format onnx --shape 12 12 --out a', 'does not run on images of 12 x 12'),
    ('{un} un.pth --format onnx --out empty', '--out empty: must be a regular file'),
]]
DEPLOY = [
    ('deploy/test {un} nowhere.onnx', 'no exported model nowhere.onnx'), ('deploy/test {un} un.pth', 'suffix .onnx or'),
    ('deploy/test {un} cut.onnx', 'cut.onnx cannot be loaded: '),
    ('deploy/test {un} alone.xml', 'needs its weights beside it'),
    ('deploy/benchmark {un} un.pth --formats onnx --file torch a.onnx', 'must be one of --formats, onnx'),
    ('deploy/benchmark {un} un.pth --formats onnx --file onnx a.onnx', 'there is no exported model a.onnx'),
]
SHIP = [(f'ship {call} --format onnx', message) for call, message in [
    ('{ln} ln.pth --out out --steps -1', 'argument --steps: must be at least 0, got -1'),
    ('{ln} ln.pth --out out --int8 full', "--int8 of onnx must be one of static, external, got 'full'"),
    ('{ln} nowhere.pth --out out', 'no checkpoint nowhere.pth'),
    ('{ln} nowhere.pth --out out --to exact', 'no checkpoint nowhere.pth'),
    ('{ln} ln.pth --out out --cfg-options model.head.in_channels=3', 'does not fit the config'),
    ('{ln} ln.pth --out out --cfg-options train_dataloader.dataset.data_root=nowhere', 'nowhere'),
    ('only_tested.py ln.pth --out out --images {data}', 'no train_dataloader: take --images, --steps 0'),
    ('{ln} ln.pth --out out --images nowhere --dry-run', '--images nowhere: must be a folder of images'),
    ('{ln} ln.pth --out out --to LN --dry-run', '--to LN: norm_cfg='),
    ('{un} un.pth --out out', 'has no LayerNorm to convert'),
    ('{un} un.pth --out out --to exact', 'has no LayerNorm to fold'),
    ('{ln} ln.pth --out out --to exact --steps 0', '--steps cannot be combined with --to exact'),
    ('{ln} ln.pth --out out --to exact --adapt-steps 9', '--adapt-steps cannot be combined with --to exact'),
    ('{ln} ln.pth --out out --to exact --images mine', '--images cannot be combined with --to exact'),
    ('labels.py ln.pth --out out', 'its head is MultiLabelLinearClsHead'),  # what the fourth stage would find
    ('{ln} ln.pth --out out --parts backbone --dry-run', '--parts backbone takes detectors of mmdet'),
    ('{ln} ln.pth --out other_chain', 'other_chain has another chain, with `python tools/other.py`'),
    ('{ln} ln.pth --out older', 'older has results of an older '),
]]


@pytest.fixture(scope='module')
def folder(tmp_path_factory, classifier, ln_classifier):
    """The files of the calls, and the values of their placeholders."""
    folder = tmp_path_factory.mktemp('errors')
    (un, un_pth, data), (ln, ln_pth) = classifier, ln_classifier
    shutil.copytree(data, folder / 'data')
    for source, name in ((un_pth, 'un.pth'), (ln_pth, 'ln.pth'), (ln_pth, 'swin_un_tiny.pth')):
        shutil.copy(source, folder / name)
    for name in ('empty', 'latest', 'mine', 'twins', 'by_hand', 'other_chain', 'older'):
        (folder / name).mkdir()
    for name in ('0.png', '0.bmp'):
        shutil.copy(data / 'dark/0.png', folder / 'twins' / name)
    linear = ln.read_text().replace('LinearClsHead', 'MultiLabelLinearClsHead')
    chain = json.dumps({'python tools/other.py': 3.0})
    for name, text in {
            'broken.py': 'model = dict(\n', 'whole.py': "model = dict(type='DETR')\n", 'file': '',
            'mine/a.jpg': 'no image', 'cut.onnx': 'onnx', 'alone.xml': '<net/>',
            'latest/last_checkpoint': 'latest/epoch_1.pth', 'by_hand/swin_un_tiny.py': '# mine\n',
            'other_chain/ship.json': chain, 'older/ship.json': chain,
            'only_tested.py': f"_base_ = ['{ln}']\ntrain_dataloader = None\n",
            'labels.py': linear.replace("Accuracy', topk=1", "MultiLabelMetric'")}.items():
        (folder / name).write_text(text)
    os.utime(folder / 'older/ship.json', (0, 0))
    (folder / 'loop').symlink_to('loop')
    content = tiny_runs.checkpoint(un_pth)
    content['meta']['extra'] = Opens(folder / 'code_ran')
    torch.save(content, folder / 'latest/epoch_1.pth')
    affine = {key: value for key, value in content['state_dict'].items()
              if key.endswith(('.weight', '.bias', 'relative_position_bias_table'))}
    torch.save(dict(state_dict=affine), folder / 'affine.pth')
    content = tiny_runs.checkpoint(ln_pth)
    content['state_dict']['backbone.patch_embed.projection.bias'][0] = torch.inf
    torch.save(content, folder / 'infinite.pth')
    return folder, dict(un=un, ln=ln, data='data', coco=tiny_runs.ROOT / 'configs/swin_t_un_maskrcnn_3x.py')


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob('*')
            if path.is_file() and 'work_dirs' not in path.parts}


@pytest.mark.parametrize(('call', 'named'), [
    *TRAIN, *TEST, *INFER, *CONVERT, *AVERAGE, *FOLD, *EXPORT, *DEPLOY, *SHIP])
def test_a_wrong_argument_is_one_line(call, named, folder, monkeypatch, capsys):
    tool, *arguments = shlex.split(call)
    if tool.startswith(('deploy', 'ship')):
        for package in ('onnx', 'onnxscript', 'onnxruntime', 'openvino'):
            pytest.importorskip(package)
    folder, values = folder
    monkeypatch.chdir(folder)
    before = files(folder)
    with pytest.raises(SystemExit) as stop:
        tiny_runs.call(tool, *(argument.format(**values) for argument in arguments),
                       trusts='--trust-checkpoint' not in named)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and 'Traceback' not in error
    assert 'error: ' in (line := error.splitlines()[-1])
    assert all(part in line for part in named.format(**values).split(' ... '))
    assert files(folder) == before and not Path('code_ran').exists()


def test_trusted_code_runs(classifier, tmp_path):
    content = tiny_runs.checkpoint(classifier[1])
    content['meta']['extra'] = Opens(tmp_path / 'code_ran')
    torch.save(content, 'code.pth')
    tiny_runs.call('test', classifier[0], 'code.pth', '--work-dir', 'w', '--trust-checkpoint')
    assert Path('code_ran').exists()
