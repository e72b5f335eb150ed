"""mmengine's logs, without a training."""
import json


def write_log(work_dir, name, entries):
    folder = work_dir / name / 'vis_data'
    folder.mkdir(parents=True)
    (folder / 'scalars.json').write_text(''.join(json.dumps(entry) + '\n' for entry in entries))


def train(step, loss):
    return dict(lr=0.1, loss=loss, epoch=1, iter=step, step=step)
