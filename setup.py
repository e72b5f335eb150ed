"""Package metadata. The OpenMMLab packages are an extra, never a hard requirement: `mmcv` and `mmdet`
exist under two distribution names, and pip would lay the second over the first."""
import os
import sys
import zlib
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent


def read_requirements(name):
    lines = (ROOT / 'requirements' / name).read_text().splitlines()
    return [line for line in map(str.strip, lines) if line and not line.startswith('#')]


# Loaded with ctypes, so that it needs neither Python's headers nor torch's. Without a C compiler or OpenMP
# the package goes without it.
SOURCE = 'mmunorm/norms/kernels/native.c'
OPENMP = [] if sys.platform == 'darwin' else ['-fopenmp']  # which Apple's compiler does not know
NATIVE = Extension(
    'mmunorm.norms.kernels._native',
    sources=[SOURCE],
    define_macros=[('SOURCE', f'{zlib.crc32((ROOT / SOURCE).read_bytes())}u')],
    # NaN has to stay NaN, whatever CFLAGS say.
    extra_compile_args=[
        '-std=gnu11', '-O3', '-fno-fast-math', '-fno-math-errno', '-fno-trapping-math', *OPENMP
    ],
    extra_link_args=OPENMP,
    libraries=[] if os.name == 'nt' else ['m'],
    optional=True)

setup(
    name='mmunorm',
    version='0.1.0',
    description='Unified Normalization for vision Transformers, as an OpenMMLab extension',
    long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    python_requires='>=3.10,<3.13',
    packages=find_packages(include=['mmunorm', 'mmunorm.*']),
    ext_modules=[NATIVE],
    install_requires=[
        'torch', 'torchvision', 'numpy', 'pillow>=10.1', 'scipy', 'scikit-learn', 'pycocotools',
        'tqdm', 'matplotlib'
    ],
    extras_require={
        'onedl': read_requirements('onedl.txt'),
        'test': read_requirements('test.txt'),
    },
    classifiers=[
        'Programming Language :: Python :: 3.10',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
)
