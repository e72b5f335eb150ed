"""What runs in several processes at once, which talk over gloo."""
import gc
import multiprocessing
import os
import socket
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def without_a_gpu():
    """Environment of `dist_train.sh` and `dist_test.sh`."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    return dict(PYTHON=sys.executable, PORT=str(port), CUDA_VISIBLE_DEVICES='')


def run(function, *args, processes=2):
    """What `function(rank, *args)`, of a module's top level, returns in each process, in order."""
    with tempfile.TemporaryDirectory() as folder:
        # Forked from a server that has imported everything once; tests themselves have threads.
        multiprocessing.set_forkserver_preload(['mmunorm', function.__module__])
        context = mp.start_processes(_enter, (folder, processes, function, args), nprocs=processes,
                                     join=False, start_method='forkserver')
        while not context.join(grace_period=5):
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
    os._exit(0)  # nothing of torch is left to be torn down in the wrong order
