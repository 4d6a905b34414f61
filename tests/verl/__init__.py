"""verl's FSDP engine in one process, where verl is installed. ``examples/verl_grpo.py`` runs all of verl."""
