"""Package metadata. The OpenMMLab packages are an extra, never a hard requirement: `mmcv` and `mmdet`
exist under two distribution names, and pip would lay the second over the first. The norms, their conversion and their
folding need torch alone."""
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_requirements(name):
    lines = (ROOT / 'requirements' / name).read_text().splitlines()
    return [line for line in map(str.strip, lines) if line and not line.startswith('#')]


# The oldest releases, here and below, are those that `make test-openmmlab` tests with.
TOOLS = ['torchvision>=0.16', 'pillow>=10.1', 'scipy>=1.11', 'scikit-learn>=1.3', 'pycocotools>=2.0.7',
         'matplotlib>=3.8', 'jinja2>=3.1']

setup(
    name='mmunorm',
    version='0.1.0',
    description='Unified Normalization for vision Transformers, as an OpenMMLab extension',
    long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    python_requires='>=3.10,<3.13',
    packages=find_packages(include=['mmunorm', 'mmunorm.*']),
    package_dir={'': '.'},  # so that an editable install finds projects/ as well
    # .mim is where mmengine looks for configs; in the repository it is links to configs/ and tools/.
    package_data={'mmunorm.analysis': ['*.jinja'], 'mmunorm.cli': ['*.jinja'],
                  'mmunorm': ['py.typed', '.mim/*.yml', '.mim/configs/**/*.py', '.mim/tools/**/*.py',
                              '.mim/tools/*.sh']},
    exclude_package_data={'mmunorm': ['.mim/tools/demo.py', '.mim/tools/zoo.py']},
    entry_points=dict(console_scripts=['mmunorm = mmunorm.__main__:main']),
    install_requires=['torch>=2.1', 'numpy>=1.26', 'tqdm>=4.65'],
    extras_require={
        'tools': TOOLS,
        'deploy': TOOLS + read_requirements('deploy.txt'),
        'enhance': TOOLS + read_requirements('enhance.txt'),
        'onedl': TOOLS + read_requirements('onedl.txt'),
        'segmentation': TOOLS + read_requirements('onedl.txt') + read_requirements('segmentation.txt'),
        'test': read_requirements('test.txt'),
        'translate': TOOLS + read_requirements('translate.txt'),
    },
    classifiers=[
        'Programming Language :: Python :: 3.10',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
)
