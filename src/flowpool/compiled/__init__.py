"""The compiled engine: the solver and its adjoint as Numba kernels, for the squared Euclidean cost on the CPU.

:mod:`flowpool.compiled.engine` has the two functions. Importing this package imports no Numba, and importing the engine
compiles nothing: the first call does.
"""
