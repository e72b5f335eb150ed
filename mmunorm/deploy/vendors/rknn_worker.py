"""Rockchip's compiler and simulator, in the Python that has rknn-toolkit2."""
import inspect
import re
from collections import Counter
from pathlib import Path

from protocol import serve
from rknn.api import RKNN

LAYER = re.compile(r'\] \d+ +(\w+) +\w+ +(?:NPU|CPU|GPU) .*?\d+/\d+/\d+ +(\d+) ')


class Rockchip:

    def __init__(self):
        self.rknn = RKNN(verbose=True)  # prints the table of layers

    def compile(self, model, samples=None, out=None, mean=None, std=None, options=()):
        """Compiles an ONNX file, in INT8 with a folder of `samples`, `.npy`, else in float16; `out` is the file."""
        options = dict(options)
        build = {name: options.pop(name) for name in inspect.signature(self.rknn.build).parameters if name in options}
        unknown = sorted(options.keys() - inspect.signature(self.rknn.config).parameters.keys())
        if unknown:
            raise ValueError(f'rknn-toolkit2 has no option {unknown[0]}')
        names = Path('samples.txt')
        names.write_text(''.join(f'{path}\n' for path in sorted(Path(samples).iterdir())) if samples else '')
        for step in (lambda: self.rknn.config(mean_values=mean and [mean], std_values=std and [std], **options),
                     lambda: self.rknn.load_onnx(model),
                     lambda: self.rknn.build(do_quantization=bool(samples), dataset=str(names), **build),
                     lambda: out and self.rknn.export_rknn(out), self.rknn.init_runtime):
            if step():
                raise RuntimeError('a step failed')
        layers = LAYER.findall(Path('log').read_text(errors='replace').rpartition(
            'Network Layer Information Table')[2])
        return dict(operators=dict(Counter(name for name, _ in layers).most_common()),
                    megabytes=round(sum(int(moved) for _, moved in layers) / 1024, 2)), ()

    def run(self, images):
        return {}, self.rknn.inference(inputs=[images], data_format='nchw')


if __name__ == '__main__':
    serve(Rockchip())
