"""Starting the ranks of a run. `launchers`: which ways there are; `local`: on this machine; `signals`: how a run is
asked to stop.
"""
