"""The public operations. Each file has the maths, validation, autograd and registration of one."""
