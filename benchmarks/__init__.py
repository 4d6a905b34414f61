"""Benchmarks: cases as data, measurements to JSON, pictures and tables from JSON."""
