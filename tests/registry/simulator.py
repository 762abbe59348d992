"""A simulator of a device that does not exist: it only notes that it was entered."""

import contextlib

entered = 0
inside = False


@contextlib.contextmanager
def simulate():
    global entered, inside
    entered += 1
    inside = True
    try:
        yield
    finally:
        inside = False


def kernel(request, operands, config):
    return {"out": operands["x"] + operands["y"] + (10.0 if inside else 1.0)}


def gradient(request, operands, config):
    return dict.fromkeys(request.wanted, operands["d_out"] * (10.0 if inside else 1.0))
