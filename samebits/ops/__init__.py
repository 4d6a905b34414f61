"""The public operations: one file each, with its maths, validation, autograd and registration."""
