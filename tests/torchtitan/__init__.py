"""TorchTitan's models, where it is installed."""
