"""The command-line tools: ``samebits audit``, ``bench``, ``info`` and ``verify``.

They use the library, and nothing of the library uses them. Each has a function ``main``, which its command
calls.
"""
