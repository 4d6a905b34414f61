"""What NVRTC says of the kernels that tests compile, kept in the on-disk cache.

A kernel is compiled again when its sources, its constants, the options or the compiler change. GitHub's
nightly workflow starts without a cache, and so compiles all of them.
"""

from __future__ import annotations

import dataclasses
import json

from samebits.backends import cache
from samebits.backends.cuda import compiler
from samebits.backends.cuda.compiler import Cubin, KernelSpec

__all__ = ["resources"]


def resources(spec: KernelSpec, arch: str) -> Cubin:
    """As :func:`samebits.backends.cuda.compiler.compile`, without the code."""
    name = f"{compiler._entry(spec, arch)}.json"
    known = cache.read(name)
    if known is None:
        found = dataclasses.replace(compiler.compile(spec, arch), code=b"")
        fields = {f.name: getattr(found, f.name) for f in dataclasses.fields(found) if f.name != "code"}
        cache.write(name, json.dumps(fields).encode())
        return found
    return Cubin(code=b"", **json.loads(known))
