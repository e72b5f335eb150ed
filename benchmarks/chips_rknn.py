"""Builds an ONNX file for the RK3588 and runs the simulator, for chips_time.py, with the Python of .venv-rknn.

    python chips_rknn.py FILE.onnx INT8|F16 FOLDER

The compiler's log has the table of operators; the last line is the SNR of the first output beside ONNX Runtime's.
"""
import sys
from pathlib import Path

import cv2
import numpy as np
import onnxruntime
from rknn.api import RKNN

MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]


def main():
    path, precision, folder = sys.argv[1:]
    files = sorted(Path(folder).iterdir())
    names = Path(folder).with_suffix('.txt')
    names.write_text(''.join(f'{file}\n' for file in files))
    compiler = RKNN(verbose=True)
    compiler.config(mean_values=[MEAN], std_values=[STD], target_platform='rk3588')
    compiler.load_onnx(path)
    compiler.build(do_quantization=precision == 'INT8', dataset=str(names))
    compiler.init_runtime()  # the simulator
    session, signal, noise = onnxruntime.InferenceSession(path), 0, 0
    for file in files[:4]:
        image = cv2.imread(str(file))[None, ..., ::-1]
        normalized = ((image - np.float32(MEAN)) / np.float32(STD)).transpose(0, 3, 1, 2)
        exact = session.run(None, {'images': normalized})[0]
        got = compiler.inference(inputs=[image], data_format='nhwc')[0]
        signal, noise = signal + np.square(exact).sum(), noise + np.square(exact - got).sum()
    print(f'SNR: {10 * np.log10(signal / noise):.1f} dB')


if __name__ == '__main__':
    main()
