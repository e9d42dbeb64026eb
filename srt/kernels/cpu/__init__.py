"""CPU kernels: a C++ library without dependencies, bound with ctypes.

    formats, matrix    stored blocks → weights repacked for sixteen outputs at a time
    vector_*           sixteen lanes in AVX2, AVX-512 or plain C++: the words of the kernels
    tiles              the same for AMX
    kernels_impl       the kernels, compiled once for each instruction set
    attention          cuts attention over KV slots into tasks
    decoder            one step of a whole model
    team               the threads
    api                what `library` binds

Equal inputs give equal bits: for a row in any batch, with any number of threads, and on any
instruction set, but that AMX attends to bfloat16 in its own way.
"""
