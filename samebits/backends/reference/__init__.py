"""The CPU backend. It executes a Contract literally, and is its definition."""
