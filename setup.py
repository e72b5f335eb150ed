"""Package metadata. The OpenMMLab packages are an extra, never a hard requirement: `mmcv` and `mmdet`
exist under two distribution names, and pip would lay the second over the first."""
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_requirements(name):
    lines = (ROOT / 'requirements' / name).read_text().splitlines()
    return [line for line in map(str.strip, lines) if line and not line.startswith('#')]


setup(
    name='mmunorm',
    version='0.1.0',
    description='Unified Normalization for vision Transformers, as an OpenMMLab extension',
    long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    python_requires='>=3.10,<3.13',
    packages=find_packages(include=['mmunorm', 'mmunorm.*']),
    package_data={'mmunorm.analysis': ['*.jinja']},
    install_requires=[
        'torch', 'torchvision', 'numpy', 'pillow>=10.1', 'scipy', 'scikit-learn', 'pycocotools',
        'tqdm', 'matplotlib', 'jinja2'
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
