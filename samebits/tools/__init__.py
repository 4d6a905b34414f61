"""The command-line tools: ``samebits audit``, ``bench``, ``info`` and ``verify``."""
