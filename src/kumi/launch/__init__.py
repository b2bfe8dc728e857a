"""Start the ranks of a run: `launchers` is the table of launchers, `local` starts ranks on this machine, and `signals`
turns stop signals into a flag.
"""
