"""The environment of a measurement. (mmengine's `collect_env` takes seconds and does not report the CPU.)"""
from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import mmcv
import mmengine
import mmpretrain
import torch
import torchvision

# CPU flags of fast INT8 and bfloat16 in /proc/cpuinfo, on x86 and Arm.
INSTRUCTIONS = ('avx2', 'avx512f', 'avx_vnni', 'avx512_vnni', 'avx_vnni_int8', 'avx512_bf16', 'amx_int8', 'amx_bf16',
                'asimddp', 'i8mm', 'bf16')


def environment(device: torch.device) -> dict:
    """Hardware, threads and versions, as plain values."""
    packages = (torch, torchvision, mmengine, mmcv, mmpretrain)
    flags = (_cpu_info('flags') or _cpu_info('Features')).split()
    return dict(
        device=device_name(device),
        cpu=device_name(torch.device('cpu')),
        instructions=[name for name in INSTRUCTIONS if name in flags],
        cores=os.cpu_count(),
        threads=torch.get_num_threads(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        cuda=torch.version.cuda if device.type == 'cuda' else None,
        float32_matmul_precision=torch.get_float32_matmul_precision(),
        python=platform.python_version(),
        system=f'{platform.system()} {platform.machine()}',
        versions={package.__name__: package.__version__ for package in packages})


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the CPU."""
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    return _cpu_info('model name') or platform.processor() or platform.machine()


def result_file(folder: Path, name: str, device: torch.device) -> Path:
    """The data file of a benchmark on a device; creates its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f'{name}_{re.sub(r"[^a-z0-9]+", "_", device_name(device).lower()).strip("_")}.jsonl'


def _cpu_info(key: str) -> str:
    """An entry of /proc/cpuinfo for the first core; '' if it does not exist."""
    info = Path('/proc/cpuinfo')
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(':')[2].strip() for line in lines if line.startswith(key)), '')
