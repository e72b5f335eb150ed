"""Sophgo's compiler and simulator, in the Python that has tpu_mlir."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import tpu_mlir  # sets the environment of its programs
from protocol import serve
from sophgo_profile import read_profile
from tpu_mlir.python.utils.mlir_parser import MlirParser

TOOLS = Path(tpu_mlir.__file__).parent / 'python/tools'


class Sophgo:

    def compile(self, shape, out, quantize, wide_attention, options):
        """Compiles the sources with an input of a shape to a file `out`; ranges are those of the samples, if any."""
        calibration, deployment = arguments('run_calibration', options), arguments('model_deploy', options)
        if unknown := sorted(name for name in options if f'--{name}' not in calibration + deployment):
            raise ValueError(f'tpu_mlir has no option {unknown[0]}')
        run('model_transform', '--model_name', 'network', '--model_def', 'sources/model.onnx',
            '--input_shapes', str([list(shape)]).replace(' ', ''), '--mlir', 'network.mlir')
        if paths := sorted(Path('sources/samples').iterdir()):
            Path('samples.txt').write_text(''.join(f'{path}\n' for path in paths))
            if '--search' in calibration:  # it writes a table of the layers in floating point
                calibration += ['--quantize_table', 'layers']
                deployment += ['--quantize_table', 'layers']
            run('run_calibration', 'network.mlir', '--data_list', 'samples.txt', '--input_num', str(len(paths)),
                '-o', 'ranges', *calibration)
            deployment += ['--calibration_table', 'ranges']
            if wide_attention:
                Path('layers').write_text(''.join(f'{name} F16\n' for name in attention_layers('network.mlir')))
                deployment += ['--quantize_table', 'layers']
        run('model_deploy', '--mlir', 'network.mlir', '--quantize', quantize, '--model', 'network.bmodel', *deployment)
        shutil.copy('network.bmodel', out)  # beside which there is a folder and much else
        return read_profile(Path('compiler_profile_0.txt').read_text()), ()

    def open(self, model):
        """Opens a `.bmodel` file."""
        from tpu_mlir.python.tools import model_runner
        chip = model_runner.get_chip_from_model(model)
        with model_runner.FileLock('/tmp/cmodel_so.lock'):  # links in the package choose the chip
            model_runner.link_cmodel_so(chip)
            model_runner.link_custom_so(chip)
            model_runner.link_bmlib_so(chip)
            import pyruntime_bm
            model_runner.bind_cmodel_so(chip)
        self.model = pyruntime_bm.Model(model, 0, '')
        self.net = self.model.Net(self.model.networks[0])
        return dict(chip=chip), ()

    def run(self, images):
        image, = self.net.inputs
        image.data[:] = images
        self.net.forward()
        return {}, [np.array(out.data, np.float32) for out in self.net.outputs]


def arguments(program, options):
    """Those of the options that a program has, for its command line."""
    text, found = (TOOLS / f'{program}.py').read_text(), []
    for name, value in options.items():
        if re.search(rf"['\"]--{re.escape(name)}['\"]", text) and value is not False:
            found += [f'--{name}'] if value is True else [f'--{name}', str(value)]
    return found


def attention_layers(path):
    """The names of the softmaxes in a file, of what leads from a product to each, and from each to a product."""
    network, found = MlirParser(path), set()
    kinds = {name: network.get_op_type_by_op_name(name) for name in network.get_op_name_list()}
    for softmax in (name for name, kind in kinds.items() if kind == 'top.Softmax'):
        for neighbours in (network.get_pre_op_by_op_name, network.get_next_op_by_op_name):
            chain = [softmax]
            while kinds[chain[-1]] != 'top.MatMul' and (others := neighbours(chain[-1])):
                chain.append(others[0])
            found.update(chain)
    return sorted(found)


def run(program, *arguments):
    print('$', program, *arguments, flush=True)
    subprocess.run([sys.executable, TOOLS / f'{program}.py', *arguments], check=True, stdin=subprocess.DEVNULL)


if __name__ == '__main__':
    if 'started again' not in sys.argv:  # the loader reads LD_LIBRARY_PATH when a process starts
        os.execv(sys.executable, [sys.executable, '-u', *sys.argv, 'started again'])
    serve(Sophgo())
