"""Benchmarks: cases as data, measurements as JSON, and pictures and tables made from JSON."""
