"""Run programs of unknown origin where they can reach nothing.

program_run      the limits of a program, and what became of it
bwrap            a program in bubblewrap on this machine, with control_groups or resource limits, and a syscall_filter
interpreter      the Python of the programs
probes           the self-test of it at the start of a run
sandbox_service  a program on a service of the user's own, by HTTP
"""
