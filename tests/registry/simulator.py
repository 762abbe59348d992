"""A simulator of a device that does not exist: it only notes that it was entered."""

entered = 0
inside = False
seen = None


def simulate(kernel, request, operands, config, options):
    global entered, inside, seen
    entered, inside, seen = entered + 1, True, options
    try:
        return kernel(request, operands, config)
    finally:
        inside = False


def kernel(request, operands, config):
    return {"out": operands["x"] + operands["y"] + (10.0 if inside else 1.0)}


def gradient(request, operands, config):
    return dict.fromkeys(request.wanted, operands["d_out"] * (10.0 if inside else 1.0))
