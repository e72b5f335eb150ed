"""Compiles every Triton kernel for two generations of GPU, which needs none; run by test_triton.py."""
import sys

import triton
from triton.compiler import compiler

from mmunorm.norms.kernels import triton as kernels

FLOAT, FLAGS, COUNT, NUMBER = '*fp32', '*u8', '*i64', 'i32'
BLOCKS = dict(BLOCK_T=32, BLOCK_C=128)


def compile_for(gpu, kernel, blocks=BLOCKS, **types):
    """`types` by argument; None for an argument that is None."""
    signature = {name: types.get(name, NUMBER) for name in kernel.arg_names}
    signature = {name: 'constexpr' if type_ is None or name in blocks else type_ for name, type_ in signature.items()}
    constants = dict(blocks, **{name: None for name, type_ in types.items() if type_ is None})
    from triton.backends.compiler import GPUTarget
    triton.compile(compiler.ASTSource(kernel, signature, constants), GPUTarget('cuda', gpu, 32), dict(num_warps=8))


if __name__ == '__main__':
    if not hasattr(compiler, 'ASTSource'):
        print('the compiler of Triton 2 asks for a GPU')
        sys.exit(77)  # test_triton.py skips
    for gpu, dtype, number, flag in ((80, '*fp16', COUNT, FLAGS), (90, '*bf16', None, None)):
        for gradient in (None, dtype):
            compile_for(gpu, kernels._products, x=dtype, dy=gradient, partial=FLOAT)
        compile_for(gpu, kernels._map, x=dtype, slope=FLOAT, constant=FLOAT, rstd=None, dy=None, direct=None, out=dtype)
        compile_for(gpu, kernels._map, x=dtype, slope=FLOAT, constant=None, rstd=FLOAT, dy=dtype, direct=FLOAT,
                    out=dtype)
        blocks, weight = dict(WINDOW=4, BLOCK_P=4, BLOCK_C=1024), FLOAT if number else dtype
        compile_for(gpu, kernels._average_activation, blocks, parts=FLOAT, weight=weight, step=COUNT, running_var=FLOAT,
                    record=FLOAT, outliers=number, rstd_out=FLOAT, scale_out=FLOAT, s_out=FLOAT, outlier_out=flag,
                    averaged_out=FLAGS, factor='fp32', alpha='fp32', eps='fp32')
        compile_for(gpu, kernels._average_gradient, blocks, parts=FLOAT, rstd=FLOAT, weight=weight, dweight_out=FLOAT,
                    dbias_out=FLOAT, psi=FLOAT, record=FLOAT, outlier=flag, averaged=FLAGS,
                    loss_scale=FLOAT if number else None, used_out=FLOAT, factor='fp32', alpha='fp32')
    print('all kernels compile')
