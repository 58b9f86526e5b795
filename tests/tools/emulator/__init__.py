"""A GPU played by NumPy: it runs the PTX that Triton has compiled, on tensors on the CPU.

Triton's interpreter runs what the frontend writes, so what passes, layouts and pipelines make of a
kernel was only ever run on a card. Here it is run everywhere: `launch.emulating("sm_80")` compiles
for that target and runs every launch of a call.

    source   PTX as statements, in blocks that end where threads may part
    values   registers as arrays with an element for every thread
    numbers  arithmetic, comparisons, conversions
    memory   what a launch may touch of global memory, and a CTA's shared memory
    matrix   ldmatrix, mma, wgmma: who holds which element
    copies   cp.async, TMA and the barriers that tell of them
    machine  threads, barriers, and whose turn it is
    launch   a driver for Triton that launches here

Beyond results it finds, and says of which line of the kernel's source: accesses outside of every
tensor of a launch, or of a CTA's shared memory; addresses that are no multiple of what is read;
threads that touch the same shared memory with no barrier between; barriers that never complete.
What is asynchronous happens as late as it may (copies land, and products read, when they are waited
for) or, of the copy engine, at once by chance; warps that go different ways take turns by chance;
registers and shared memory begin with garbage. It knows neither time nor ptxas.
"""
