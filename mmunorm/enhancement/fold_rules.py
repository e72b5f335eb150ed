"""Where the norms of the enhancer go when it is folded."""
from ..fusion.rules import After, Into, Reads, fold_rule
from .iat import GlobalBranch, LocalBlock, QueryAttention

fold_rule(QueryAttention)(lambda module: [Reads('k', 'v')])
fold_rule(LocalBlock)(lambda block: [Into('norm1', 'conv1'), After('scale1', 'conv2'),
                                     Into('norm2', 'fc1'), After('scale2', 'fc2')])
fold_rule(GlobalBranch)(lambda branch: [After('bn1', 'conv1'), After('bn2', 'conv2'),
                                        Into('norm1', 'attn'), Into('norm2', 'fc1')])
