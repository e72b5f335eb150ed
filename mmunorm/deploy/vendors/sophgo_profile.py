"""The profile that Sophgo's compiler writes. Imported in its Python, too."""
import re
from collections import Counter

import numpy as np

COMMAND = re.compile(r'(\w+?)_\d+\|(\w+)\|s:(\d+)\|[^|]*\|[^|]*\|e:(\d+)')


def read_profile(text):
    """Milliseconds, cycles and megabytes of a profile of the compiler, and the cycles of each operator.

    A cycle in which the chip computes is one of the operator that it computes, and any other one of the operator
    whose data moves; so they add up to the total.
    """
    total, owners = int(re.search(r'total_cycle:(\d+)', text)[1]), Counter()
    commands = sorted((('DMA' in engine, int(start), int(end) + 1, name)
                       for name, engine, start, end in COMMAND.findall(text)), reverse=True)
    owner = np.full(total, len(commands))
    for index, (_, start, end, _) in enumerate(commands):  # those of computing and of the earliest last
        owner[start:end] = index
    for (_, _, _, name), cycles in zip(commands, np.bincount(owner, minlength=len(commands)).tolist(), strict=False):
        owners[name] += cycles
    return dict(ms=float(re.search(r'runtime: ([\d.]+)ms', text)[1]), cycles=total,
                megabytes=round(sum(map(int, re.findall(r'(?:S2L|L2S):(\d+)', text))) / 2**20, 2),
                by_operator=dict((+owners).most_common()))
