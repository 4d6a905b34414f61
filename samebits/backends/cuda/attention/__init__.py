"""Attention on CUDA tensors."""
