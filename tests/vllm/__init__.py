"""A real engine, on the device that its vLLM is for. CI has one on a CPU, in an environment of its own."""
