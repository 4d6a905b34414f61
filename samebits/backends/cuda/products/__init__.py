"""Product kernels: a host file for each, and their plans."""
