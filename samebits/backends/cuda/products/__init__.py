"""Kernels of matrix products, one host file each, and how each is planned."""
