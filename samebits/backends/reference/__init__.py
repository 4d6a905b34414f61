"""The CPU backend: executes a Contract literally, and is its definition."""
