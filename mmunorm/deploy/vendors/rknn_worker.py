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

    def compile(self, out, mean, std, options):
        """Compiles the sources to a file `out`, if it is not None; in INT8 if they have samples, else in float16."""
        build = {name: options.pop(name) for name in inspect.signature(self.rknn.build).parameters if name in options}
        unknown = sorted(options.keys() - inspect.signature(self.rknn.config).parameters.keys())
        if unknown:
            raise ValueError(f'rknn-toolkit2 has no option {unknown[0]}')
        samples = sorted(Path('sources/samples').resolve().iterdir())
        Path('samples.txt').write_text(''.join(f'{path}\n' for path in samples))
        for step in (lambda: self.rknn.config(mean_values=mean and [mean], std_values=std and [std], **options),
                     lambda: self.rknn.load_onnx('sources/model.onnx'),
                     lambda: self.rknn.build(do_quantization=bool(samples), dataset='samples.txt', **build),
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
