"""Functions in other processes, forked from one that has imported everything once."""
import gc
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import traceback
from multiprocessing import forkserver

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from . import tiny_runs

# Tests have threads, and cannot be forked. The working directory may be any, so no module of the tests is here.
FORKSERVER = multiprocessing.get_context('forkserver')
FORKSERVER.set_forkserver_preload(['mmunorm.cli.training', 'mmdet.apis', 'mmdet.datasets', 'mmpretrain.apis'])


def start():
    """Starts the process that others are forked from, also those of the package."""
    forkserver.ensure_running()


def free_port():
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def run(function, *args, processes=2):
    """The results of `function(rank, *args)`, of a module's top level, in each process, in order.

    The processes communicate over gloo.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(_enter, (folder, processes, function, args), nprocs=processes,
                                     join=False, start_method='forkserver')
        while not context.join():
            pass
        return [torch.load(f'{folder}/{rank}.pt', weights_only=False) for rank in range(processes)]


def _enter(rank, folder, processes, function, args):
    torch.set_num_threads(1)
    os.environ['LOCAL_RANK'] = str(rank)  # mmengine asks for it
    dist.init_process_group('gloo', init_method=f'file://{folder}/group', rank=rank, world_size=processes)
    result = function(rank, *args)
    torch.save(result, f'{folder}/{rank}.pt')
    dist.barrier()
    gc.collect()  # a DistributedDataParallel must be gone before its group
    dist.destroy_process_group()
    os._exit(0)  # so that torch is not torn down in the wrong order


def run_tool(name, *arguments, processes=1, **environment):
    """Runs tools/NAME.py, or the script at this path, on one thread in each of so many processes, as torchrun does.

    ERRORS names a file for what they print to stderr.

    Returns:
        The exit status of each, negative for a signal.
    """
    if processes > 1:
        arguments = *arguments, '--launcher', 'pytorch'
        environment.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port()), WORLD_SIZE=str(processes))
    path, arguments = tiny_runs.ROOT / 'tools' / f'{str(name).removesuffix(".py")}.py', list(map(str, arguments))
    started = []
    for rank in range(processes):
        ranks = dict(RANK=str(rank), LOCAL_RANK=str(rank)) if processes > 1 else {}
        started.append(FORKSERVER.Process(target=_run_script, args=(str(path), arguments, {**environment, **ranks})))
        started[-1].start()
    for process in started:
        process.join(300)
        assert process.exitcode is not None, f'{path} hangs'
    return [process.exitcode for process in started]


def _run_script(path, arguments, environment):
    os.environ.update(environment)
    if 'ERRORS' in environment:  # the server that forks has the output of the test that started it
        os.dup2(os.open(environment['ERRORS'], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    torch.set_num_threads(1)
    tiny_runs.skip_what_is_slow()
    sys.argv = [path, *arguments]
    status = 1
    try:
        runpy.run_path(path, run_name='__main__')
        status = 0
    except SystemExit as stop:
        status = stop.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)
