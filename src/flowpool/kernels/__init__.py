"""The compiled engine: frames, solver and adjoint as Numba kernels, for the squared Euclidean cost on the CPU.

:mod:`flowpool.kernels.batch` has its functions. Importing this package imports no Numba, and importing that module
compiles nothing: the first call does.
"""
