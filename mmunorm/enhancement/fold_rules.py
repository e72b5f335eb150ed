"""Where the norms of the enhancer go when it is folded."""
from ..fusion.rules import Behind, Into, Reads, fold_rule
from .iat import GlobalBranch, LocalBlock, QueryAttention

fold_rule(QueryAttention)(lambda module: [Reads('k', 'v')])
fold_rule(LocalBlock)(lambda block: [Into('norm1', 'conv1'), Behind('scale1', 'conv2'),
                                     Into('norm2', 'fc1'), Behind('scale2', 'fc2')])
fold_rule(GlobalBranch)(lambda branch: [Behind('bn1', 'conv1'), Behind('bn2', 'conv2'),
                                        Into('norm1', 'attn'), Into('norm2', 'fc1')])
