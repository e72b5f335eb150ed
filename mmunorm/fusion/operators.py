"""The functions that a tagged tensor may go through, by name. Any other one is a consumer, see `trace`."""

JOINS = frozenset({'cat', 'concat', 'concatenate', 'dstack', 'hstack', 'stack', 'vstack'})
# Move elements, or average elements of one channel, wherever the tag shows that they do.
MOVES = JOINS | frozenset({
    '__get__', '__getitem__', 'adaptive_avg_pool1d', 'adaptive_avg_pool2d', 'adaptive_avg_pool3d',
    'alias', 'atleast_2d', 'atleast_3d', 'avg_pool1d', 'avg_pool2d', 'avg_pool3d', 'broadcast_tensors',
    'broadcast_to', 'chunk', 'clone', 'contiguous', 'cpu', 'cuda', 'detach', 'diagonal', 'dropout', 'dropout1d',
    'dropout2d', 'dropout3d', 'dsplit', 'embedding', 'expand', 'expand_as', 'feature_dropout', 'flatten', 'flip',
    'fliplr', 'flipud', 'gather', 'grid_sample', 'hsplit', 'index_put', 'index_select', 'interpolate',
    'masked_fill', 'masked_scatter', 'masked_select', 'mean', 'moveaxis', 'movedim', 'narrow', 'pad', 'permute',
    'pixel_shuffle', 'pixel_unshuffle', 'ravel', 'repeat', 'repeat_interleave', 'reshape', 'reshape_as',
    'resolve_conj', 'resolve_neg', 'roll', 'rot90', 'select', 'select_scatter', 'slice_scatter', 'split',
    'split_with_sizes', 'squeeze', 'swapaxes', 'swapdims', 't', 'take', 'take_along_dim', 'tensor_split', 'tile',
    'to', 'transpose', 'unbind', 'unflatten', 'unfold', 'unsqueeze', 'upsample', 'view', 'view_as', 'vsplit',
    'where'})
# Those of them that may put other values beside the elements.
MIXERS = JOINS | frozenset({
    'index_put', 'masked_fill', 'masked_scatter', 'pad', 'select_scatter', 'slice_scatter', 'where'})
CASTS = frozenset({'bfloat16', 'double', 'float', 'half', 'to', 'type', 'type_as'})
SUMS = frozenset({
    '__add__', '__iadd__', '__isub__', '__radd__', '__rsub__', '__sub__', 'add', 'add_', 'rsub', 'sub', 'sub_',
    'subtract'})
PRODUCTS = frozenset({
    '__imul__', '__itruediv__', '__mul__', '__neg__', '__rmul__', '__truediv__', 'div', 'div_', 'divide', 'mul',
    'mul_', 'multiply', 'neg', 'negative', 'true_divide'})
MATRIX_PRODUCTS = frozenset({'__matmul__', 'bmm', 'matmul'})
# What scores of attention may go through before their softmax, and probabilities after it.
KEEP_SCORES = SUMS | PRODUCTS | CASTS | frozenset({
    '__get__', 'clone', 'contiguous', 'dropout', 'expand', 'flatten', 'masked_fill', 'masked_fill_', 'reshape',
    'squeeze', 'unflatten', 'unsqueeze', 'view', 'view_as', 'where'})
# Return a size, a type, or a tensor that does not depend on the values.
SIZES = frozenset({
    '__get__', '__hash__', '__len__', 'dim', 'element_size', 'get_device', 'has_names', 'is_complex', 'is_conj',
    'is_contiguous', 'is_floating_point', 'is_inference', 'is_neg', 'is_pinned', 'is_same_size', 'is_shared',
    'is_signed', 'ndimension', 'nelement', 'numel', 'register_hook', 'requires_grad_', 'result_type', 'size',
    'storage_offset', 'stride'})
SHAPE_ONLY = frozenset({
    '_shape_as_tensor', 'empty_like', 'full_like', 'new_empty', 'new_empty_strided', 'new_full', 'new_ones',
    'new_tensor', 'new_zeros', 'ones_like', 'rand_like', 'randint_like', 'randn_like', 'zeros_like'})
