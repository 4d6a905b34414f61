"""What inference engines need to give a trainer's bits, whichever engine it is.

The definition is ``transformers``' own modelling code under :class:`samebits.batch_invariant`. An engine's
layer that rounds elsewhere is replaced by one of :mod:`samebits.engines.layers`. Each engine's own package
(``samebits.vllm``) has its hooks, and nothing else.
"""
