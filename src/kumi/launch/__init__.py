"""Starting the ranks of a run. `local`: on this machine; `signals`: how a run is asked to stop."""
