"""Host shared memory: the embedded default backend, in C++. Importing it loads no native code."""

from ubep_backends.shm.backend import Backend

__all__ = ["Backend"]
