"""Messages between mmunorm and a vendor's Python, over pipes.

It is imported in both; the vendor's Python has numpy, of any release, and neither torch nor mmunorm.
"""
import io
import os
import pickle
import sys
import traceback

import numpy as np


def send(stream, header, arrays=()):
    """Writes a dict and arrays."""
    content = io.BytesIO()
    np.savez(content, *arrays)  # releases of numpy may not read each other's pickles
    pickle.dump((header, content.getvalue()), stream)
    stream.flush()


def receive(stream):
    """The dict and the arrays of the next message. Raises an EOFError or UnpicklingError if the stream ends."""
    header, content = pickle.load(stream)
    arrays = np.load(io.BytesIO(content))
    return header, [arrays[name] for name in arrays.files]


def serve(compiler):
    """Answers messages with the results of an object's methods, until the input ends.

    A header names the method as `call`; its other items are arguments. A method takes these and the arrays, and returns
    a dict and arrays. What vendors print goes to the standard error, the log.
    """
    replies = os.fdopen(os.dup(1), 'wb')
    os.dup2(2, 1)
    while True:
        try:
            header, arrays = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            result = getattr(compiler, header.pop('call'))(*arrays, **header)
        except (Exception, SystemExit) as error:  # vendors' compilers end the process
            traceback.print_exc()
            result = dict(error=f'{type(error).__name__}: {error}'), ()
        send(replies, *result)
