"""Tables of the documents: ``python -m benchmarks tables``."""
