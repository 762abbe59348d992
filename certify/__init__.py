"""Proof without the device: simulators, deviceless compilers, static measures and reports."""
