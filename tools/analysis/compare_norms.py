"""Trains one recipe with several norms and seeds; writes one table, one CSV and one picture of the curves.

The same command goes on after an interruption: finished runs are not repeated, others resume from their
last checkpoint. A run is stopped and marked FAIL when for --fail-patience steps in a row its loss or the
output of a norm is not finite, or its loss exceeds --fail-factor times that of its start; and also when it
ends in fewer steps that are not finite. A run that crashes for another reason is an error, and is tried again
by the next call.

The results are OUT/comparison.md, .csv and .png, with --stress OUT/stress.md, .csv and .png, always of the
norms and seeds that the command names.
"""
import argparse
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import mmunorm  # noqa: F401  registers everything, and mmcv's operators before mmdet asks for them

# isort: split
from mmengine.config import Config
from mmengine.registry import HOOKS, init_default_scope
from mmengine.runner import Runner
from tqdm import tqdm

from mmunorm.analysis import comparison
from mmunorm.analysis.comparison import CALM, STRESSED, Run
from mmunorm.analysis.curves import latest
from mmunorm.engine import launch
from mmunorm.engine.errors import PreflightError
from mmunorm.engine.preflight import check_data, check_norms, pretrained_path

TRAIN = Path(__file__).resolve().parent.parent / 'train.py'


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        'config',
        help='config of the recipe, with UN; the norm_cfg of its backbone is replaced. Its arguments go to '
        'every UN, its warmup_iters to all that have one; PRepBN fades LayerNorm out over half a run from '
        'nothing')
    parser.add_argument(
        '--norms', nargs='+', required=True, metavar='NORM',
        help=f'{", ".join(comparison.NORMS)}, or NAME=TYPE,argument=value,... (quote PN*, which is PN '
        'without its scale of each token)')
    parser.add_argument('--seeds', type=int, default=3,
                        help='runs of each norm, with seeds 0, 1, ... (default 3)')
    parser.add_argument('--out', required=True, type=Path, help='folder for the runs and the results')
    parser.add_argument('--jobs', type=int, default=1,
                        help='runs at a time (default 1), which all share one GPU if there is one')
    parser.add_argument(
        '--pretrained', metavar='PATTERN',
        help="backbone weights to start from, with {norm} (the name of the norm's folder) and {seed} in it, "
        'e.g. "OUT/{norm}/seed_{seed}/epoch_8.pth"; without it every backbone starts from nothing')
    parser.add_argument('--fail-factor', type=float, default=3.0,
                        help='how many times the starting loss is an explosion (default 3)')
    parser.add_argument('--fail-patience', type=int, default=10,
                        help='bad steps in a row that end a run (default 10)')
    stress = parser.add_argument_group('stress')
    stress.add_argument(
        '--stress', action='store_true',
        help='train everything a second time with a higher learning rate and disturbed inputs: a share of '
        'the steps, the same for every norm, has its inputs multiplied by a log-uniform factor')
    stress.add_argument('--stress-probability', type=float, default=0.02,
                        help='share of the steps (default 0.02)')
    stress.add_argument('--stress-scale', type=float, nargs=2, default=(2.0, 30.0),
                        metavar=('LEAST', 'GREATEST'), help='range of the factor (default 2 30)')
    stress.add_argument('--stress-lr', type=float, default=1.5,
                        help='what the learning rate is multiplied by (default 1.5)')
    launch.add_config_arguments(parser)
    args = parser.parse_args(argv)
    for name in ('seeds', 'jobs'):
        if getattr(args, name) < 1:
            parser.error(f'--{name} must be at least 1, got {getattr(args, name)}')
    if len(set(args.norms)) < len(args.norms):
        parser.error('--norms names one twice')
    return args


def plan(args):
    """The config of every run, in the order of running: seed by seed, so that a table fills evenly."""
    base = launch.load_config(args.config, args.cfg_options)
    if 'norm_cfg' not in (base.model.get('backbone') or {}):
        raise PreflightError(f'{args.config} has no model.backbone.norm_cfg to put norms into.')
    refuse_other_weights(args, base)
    if args.stress and learning_rate(base) is None:
        raise PreflightError(f'--stress raises optim_wrapper.optimizer.lr, which {args.config} does not set.')
    check_data(base, ['train', 'val'])
    steps = count_steps(base)
    norm_cfgs = {}
    for text in args.norms:
        try:
            name, norm_cfg = comparison.parse_norm(text)
            norm_cfgs[name] = comparison.complete_norm_cfg(norm_cfg, base.model.backbone.norm_cfg, steps)
        except ValueError as error:
            raise PreflightError(f'--norms: {error}.') from error
    if len({comparison.slug(name) for name in norm_cfgs}) < len(args.norms):
        raise PreflightError('--norms: two have one name, or names that give one folder.')

    configs = {}
    for condition in (CALM, STRESSED) if args.stress else (CALM, ):
        for seed in range(args.seeds):
            for name, norm_cfg in norm_cfgs.items():
                run = Run(args.out, name, seed, condition)
                configs[run] = make_config(base, run, norm_cfg, args)
    return configs


def refuse_other_weights(args, base):
    """Raises a PreflightError if the runs are to start from weights that they would not get."""
    for option, value in (args.cfg_options or {}).items():
        if value is not None and (option == 'pretrained' or option.startswith('model.backbone.init_cfg')):
            raise PreflightError(f'--cfg-options {option} is not for a comparison: name the backbone weights '
                                 'to start from with --pretrained.')
    if base.get('load_from') is not None:
        raise PreflightError(f'{args.config} has load_from={base.load_from!r}, which these runs would not '
                             'load: they resume from their own checkpoints. Name backbone weights with '
                             '--pretrained.')


def learning_rate(cfg):
    """The learning rate of a config with one optimizer that sets it, else None."""
    return ((cfg.get('optim_wrapper') or {}).get('optimizer') or {}).get('lr')


def count_steps(cfg):
    """Training steps of a whole run."""
    if 'max_iters' in cfg.train_cfg:
        return cfg.train_cfg.max_iters
    init_default_scope(cfg.default_scope)
    loader = {**cfg.train_dataloader, 'num_workers': 0, 'persistent_workers': False}
    return cfg.train_cfg.max_epochs * len(Runner.build_dataloader(loader))


def make_config(base, run, norm_cfg, args):
    cfg = Config(base.to_dict())
    cfg.model.backbone.norm_cfg = norm_cfg
    check_norms(cfg)
    cfg.randomness = {**(cfg.get('randomness') or {}), 'seed': run.seed}
    hooks = [checked_hook('--fail-factor and --fail-patience', type='DivergenceHook',
                          patience=args.fail_patience, factor=args.fail_factor)]
    if run.condition == STRESSED:
        # One seed's disturbance for every norm, another's for another seed.
        hooks.append(checked_hook('--stress-probability and --stress-scale', type='InputStressHook',
                                  probability=args.stress_probability, scale=tuple(args.stress_scale),
                                  seed=run.seed))
        cfg.optim_wrapper.optimizer.lr *= args.stress_lr
    cfg.custom_hooks = [*(cfg.get('custom_hooks') or []), *hooks]
    if args.pretrained:
        try:
            path = args.pretrained.format(norm=comparison.slug(run.norm), seed=run.seed)
        except (KeyError, IndexError, ValueError):
            raise PreflightError('--pretrained may have {norm} and {seed} in it, and no other braces, got '
                                 f'{args.pretrained!r}.') from None
        launch.set_pretrained(cfg, path)
    elif pretrained_path(cfg) is not None:
        launch.set_pretrained(cfg, None)
    return cfg


def checked_hook(options, **cfg):
    """The config of a hook that can be built, so that no run starts with settings which would end it."""
    try:
        HOOKS.build(cfg)
    except (TypeError, ValueError) as error:
        raise PreflightError(f'{options}: {error}.') from None
    return cfg


def check_settings(configs):
    """Raises a PreflightError if a run of other settings lies where one of these is to go."""
    for run, cfg in configs.items():
        if not run.config.exists():
            continue
        text = comparison.config_text(cfg)
        if run.config.read_text() == text:
            continue
        old = Config.fromfile(run.config).to_dict()
        if keys := comparison.differing_keys(old, Config.fromstring(text, '.py').to_dict()):
            raise PreflightError(f'{run.work_dir} was trained with other settings ({", ".join(keys[:5])}): '
                                 'choose another --out, or remove that folder and the config beside it.')


class Process:
    """A run while it is trained by tools/train.py."""

    def __init__(self, run, cfg, threads):
        self.run = run
        run.work_dir.mkdir(parents=True, exist_ok=True)
        run.config.write_text(comparison.config_text(cfg))
        # The child holds the lock with its copy of the file, so that one which outlives this process is seen.
        with (run.work_dir / 'lock').open('w') as lock, run.log.open('a') as log:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            command = [sys.executable, str(TRAIN), str(run.config), '--work-dir', str(run.work_dir),
                       '--resume']
            # Threads that wait by spinning slow a machine down that has other work.
            env = {'GOMP_SPINCOUNT': '20000', **os.environ}
            if threads:
                env['OMP_NUM_THREADS'] = str(threads)
            log.write(f'$ {shlex.join(command)}\n')
            log.flush()
            self.popen = subprocess.Popen(command, env=env, stdout=log, stderr=log, pass_fds=[lock.fileno()],
                                          start_new_session=True)

    def stop(self):
        """Ends it, with the workers that load its data."""
        try:
            os.killpg(self.popen.pid, signal.SIGTERM)
        except ProcessLookupError:
            return
        self.popen.wait()

    def progress(self):
        step, loss = latest(self.run.work_dir, 'loss') or (None, None)
        return f'{self.run} starts' if step is None else f'{self.run}: step {step}, loss {loss:.3f}'


def train_all(pending, args, after_each):
    """Trains the runs, `args.jobs` at a time; returns what went wrong, by run."""
    errors = {}
    threads = max(1, len(os.sched_getaffinity(0)) // args.jobs) if args.jobs > 1 else None
    queue, active = list(pending.items()), []
    with tqdm(total=len(queue), desc='runs', unit='run') as bar, ExitStack() as stack:
        stack.callback(lambda: [process.stop() for process in active])
        while queue or active:
            while queue and len(active) < args.jobs:
                run, cfg = queue.pop(0)
                problem = missing_weights(run, cfg)
                if problem is None:
                    try:
                        active.append(Process(run, cfg, threads))
                        continue
                    except BlockingIOError:
                        problem = 'another process is training it'
                errors[run] = problem
                bar.update()
            for process in [process for process in active if process.popen.poll() is not None]:
                active.remove(process)
                status = process.popen.returncode
                if process.run.close(status) is None:
                    what = f'with status {status}' if status else 'without writing its final metrics'
                    errors[process.run] = f'tools/train.py ended {what}; see {process.run.log}'
                after_each(errors)
                bar.update()
            progress = '; '.join(process.progress() for process in active)
            if progress != bar.postfix:
                bar.set_postfix_str(progress)
            if active:
                time.sleep(1)
    return errors


def missing_weights(run, cfg):
    path = pretrained_path(cfg)
    if path is None or '://' in path or os.path.isfile(path):
        return None
    return f'there are no backbone weights {path}'


def describe(args, configs):
    """What the results are about."""
    rate = learning_rate(next(iter(configs.values())))
    lines = [f'# Norms compared: {args.config}', '', f'`{shlex.join(["python", *args.command])}`', '',
             f'Metrics of the last validation; {args.seeds} seed(s); '
             + ('' if rate is None else f'learning rate {rate:g}; ') +
             'std is the sample standard deviation; FAIL is a run whose loss or a norm\'s output is not '
             f'finite, or whose loss is more than {args.fail_factor:g} times that of the start, for '
             f'{args.fail_patience} steps in a row, or which ends in fewer steps that are not finite.']
    if args.stress:
        low, high = args.stress_scale
        lines.append(
            f'Stressed: learning rate times {args.stress_lr:g}; with probability '
            f'{args.stress_probability:g} the inputs of a step are multiplied by a factor whose logarithm is '
            f'uniform between those of {low:g} and {high:g}, on the same steps for every norm.')
    if args.pretrained:
        lines.append(f'Backbones start from `{args.pretrained}`.')
    settings = {run.norm: dict(cfg.model.backbone.norm_cfg) for run, cfg in configs.items()}
    lines += ['', *(f'- {norm}: `{norm_cfg}`' for norm, norm_cfg in settings.items())]
    return '\n'.join(lines)


@launch.command
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    args.command = ['tools/analysis/compare_norms.py', *argv]
    configs = plan(args)
    check_settings(configs)
    if args.pretrained and all(missing_weights(run, cfg) for run, cfg in configs.items()):
        raise PreflightError(f'--pretrained: {missing_weights(*next(iter(configs.items())))}, nor those of '
                             'any other run.')
    header = describe(args, configs)
    name = 'stress' if args.stress else 'comparison'
    args.out.mkdir(parents=True, exist_ok=True)

    def write(errors):
        return comparison.write_outputs(args.out, name, list(configs), errors, header, args.config)

    pending = {run: cfg for run, cfg in configs.items() if run.result() is None}
    if len(pending) < len(configs):
        print(f'{len(configs) - len(pending)} of {len(configs)} runs are finished already.')
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        errors = train_all(pending, args, write)
    except KeyboardInterrupt:
        raise launch.RunError('interrupted; the same command goes on.') from None
    written = write(errors)
    print(written[0].read_text())
    print(f'written: {", ".join(map(str, written))}')
    if errors:
        raise launch.RunError(f'{len(errors)} of {len(configs)} runs are not finished, see above; the same '
                              'command tries them again.')


if __name__ == '__main__':
    main()
