"""Files for Arm's Ethos-U: full-integer LiteRT files compiled by Arm's Vela."""
from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from ...utils import PreflightError
from ..graph import Exportable
from .base import EDGE_INSTALL, Batches, Session, counted, register_format, stage
from .litert import LiteRt


@register_format
class EthosU(LiteRt):
    """Files that run only on the chip, with Vela's estimates of the model and of each layer in separate files."""
    name, suffixes, runtime = 'ethos-u', ('.vela.tflite', '.vela.csv', '.vela.layers.csv'), 'Arm Ethos-U'
    packages, int8_packages = (*LiteRt.packages, 'ai_edge_quantizer', 'ethosu'), ()
    int8_kinds, uncalibrated, variants, takes_half = ('full', ), (), {}, False
    install, takes_vendor_options = EDGE_INSTALL, True

    def check(self, int8: str | None = None, option: str = 'int8') -> str:
        """Like the base class, but files are never in floating point."""
        return super().check(int8 or '', option)

    def export(self, model: Exportable, path: Path, half: bool = False, int8: str | None = None,
               samples: Batches = (), accelerator: str = 'ethos-u85-512') -> list[str]:
        from ethosu.vela.architecture_features import Accelerator
        if accelerator not in (known := Accelerator.member_list()):
            raise PreflightError(f'accelerator must be one of {", ".join(known)}, got {accelerator!r}.')
        with tempfile.TemporaryDirectory() as folder:
            integers = Path(folder, 'm.tflite')
            lines = super().export(model, integers, int8=int8, samples=samples)
            self._opened = super().load(integers, None)  # this machine cannot run what Vela makes of it
            stage("compiling by Arm's Vela")
            compile_file(integers, path, accelerator)
        return lines

    def load(self, path: Path, threads: int | None) -> Session:
        raise PreflightError('it runs only on an Ethos-U; for this machine export a .tflite file with the INT8 full.')

    def usage(self, path: Path) -> str:
        return "use it: with Arm's driver for the chip; it runs only on this chip"

    def report(self, path: Path) -> list[str]:
        _, summary, layers = self.files(path)
        summary, = rows_of(summary)
        names = (row['Original Operator'] for row in rows_of(layers) if row['Target'] == 'CPU')
        on_cpu = Counter('unknown to Vela' if name == 'None' else name for name in names)  # such as BROADCAST_TO
        return [f"Vela's ESTIMATE for {summary['accelerator_configuration']}, not a measurement: "
                f"{float(summary['inference_time']) * 1e3:.1f} ms, {int(float(summary['cycles_total'])):,} cycles at "
                f"{float(summary['core_clock']) / 1e6:.0f} MHz",
                *(f'memory, {name}: {float(summary[key]):,.0f} KiB' for name, key in (
                    ('SRAM', 'sram_memory_used'), ('DRAM', 'dram_memory_used'),
                    ('flash', 'off_chip_flash_memory_used')) if float(summary[key])),
                f'operators left to the CPU: {counted(on_cpu)}']


def compile_file(source: Path, path: Path, accelerator: str) -> None:
    """Compiles a full-integer `.tflite` file for an accelerator; a PreflightError if Vela fails or crashes."""
    with tempfile.TemporaryDirectory() as folder:
        # In a subprocess, because Vela crashes with a segmentation fault on some networks.
        done = subprocess.run(
            [sys.executable, '-m', 'ethosu.vela', str(source), '--accelerator-config', accelerator,
             '--output-dir', folder, '--verbose-performance'], capture_output=True, text=True)
        compiled = Path(folder, f'{source.stem}_vela.tflite')
        if done.returncode or not compiled.exists():
            said = (done.stderr or done.stdout).strip().splitlines() or ['no message']
            raise PreflightError(f"Arm's Vela cannot compile this model for {accelerator} (exit {done.returncode}): "
                                 f'{said[-1]}')
        summary, = Path(folder).glob('*_summary_*.csv')
        layers, = Path(folder).glob('*_per-layer.csv')
        for file, target in zip((compiled, summary, layers), EthosU().files(path), strict=True):
            target.write_bytes(file.read_bytes())


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with open(path, newline='') as file:
        return list(csv.DictReader(file))
