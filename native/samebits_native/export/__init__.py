"""``samebits export``: kernels and the choice of their schedules in one file, for ``libsamebits``."""
