"""An accelerator for tests on machines that have none.

    build       compiles `device.cpp` once per machine
    device      makes it torch's accelerator, named "simulated", with four devices
    group       process groups with NCCL's semantics; ranks are threads, of which one runs at a time
    process     runs tests with it in a process of their own, because it is the accelerator of all of a process

It computes what a CPU computes, bit for bit. What it shows is order: its streams run as late, as early or as mixed as
a policy lets them, so a wait that is missing gives a wrong number each time.
"""
