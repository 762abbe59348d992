"""Test cases of the built-in ops: one table an op, used by every backend."""
