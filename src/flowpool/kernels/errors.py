"""What goes wrong with kernels as such; no Numba is needed to know it."""


class KernelError(RuntimeError):
    """Kernels cannot be compiled on this machine."""
