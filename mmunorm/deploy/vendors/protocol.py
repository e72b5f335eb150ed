"""Messages between mmunorm and a vendor's Python, over pipes: a length, then an `.npz` with a header in JSON.

It is imported in both; the vendor's Python has numpy, and neither torch nor mmunorm.
"""
import io
import json
import os
import struct
import sys
import traceback

import numpy as np

LENGTH = struct.Struct('<Q')


def send(stream, header, arrays=()):
    """Writes a dict and arrays."""
    content = io.BytesIO()
    np.savez(content, header=json.dumps(header), **{f'array{index}': array for index, array in enumerate(arrays)})
    stream.write(LENGTH.pack(content.tell()) + content.getvalue())
    stream.flush()


def receive(stream):
    """The dict and the arrays of the next message. Raises an EOFError if the stream ends."""
    length = stream.read(LENGTH.size)
    content = stream.read(*LENGTH.unpack(length)) if len(length) == LENGTH.size else b''
    if not content:
        raise EOFError
    message = np.load(io.BytesIO(content))
    return json.loads(str(message['header'])), [message[f'array{index}'] for index in range(len(message.files) - 1)]


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
