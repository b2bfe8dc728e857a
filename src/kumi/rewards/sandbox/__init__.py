"""Run programs of unknown origin where they can reach nothing.

program_run      the limits of a program, and what became of it
bwrap            runs a program in bubblewrap on this machine, with a syscall_filter, and control_groups if possible
interpreter      the Python of the programs
probes           the self-test of bwrap at the start of a run
sandbox_service  runs a program on a service of the user's own, by HTTP
"""
